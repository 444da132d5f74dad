"""Which tile a projection of a decoding step takes: every candidate beside the library's product, as a share of the
bandwidth of a large copy.

    python -m benchmarks.projections --out FILE                 # one H200, about 90 seconds, most of them compiling

Shapes are those of the 1.26 billion decoder of `benchmarks.generate`. Weights rotate among copies that together are far
larger than the cache. A candidate whose result is not the reference's shows no time.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.ops.decode import Merge, Norm, project, projection

from .measure import captured, copy_bandwidth, provenance, times

DIM, WIDE, VOCABULARY = 2048, 5632, 32000
# name: output channels of each weight, input channels, normed, gated, added
SHAPES: dict[str, tuple[tuple[int, ...], int, bool, bool, bool]] = {
    "qkv": ((2048, 1024, 1024), DIM, True, False, False),
    "gate and up": ((WIDE, WIDE), DIM, True, True, False),
    "attention's output": ((DIM,), DIM, False, False, True),
    "down": ((DIM,), WIDE, False, False, True),
    "head": ((VOCABULARY,), DIM, True, False, False),
}
# output channels, input channels, warps, tiles under way
ONE = (
    (1, 2048, 4, 1),
    (2, 1024, 4, 1),
    (4, 512, 4, 1),
    (4, 1024, 4, 1),
    (8, 512, 4, 1),
    (8, 1024, 8, 1),
)
FEW = ((16, 128, 4, 5), (16, 256, 4, 4), (32, 128, 4, 5), (32, 256, 4, 3), (64, 128, 4, 4))
# output channels, warps, programs a multiprocessor
STREAM = ((1, 4, 4), (1, 4, 8), (2, 4, 4), (2, 4, 6), (4, 4, 4), (2, 8, 2))
TOTAL = 400 << 20  # bytes of all copies of a weight


class Case:
    """One shape at one batch: its tensors, its reference, its candidates."""

    def __init__(self, name: str, batch: int, merged: bool) -> None:
        sizes, inner, normed, self.gated, added = SHAPES[name]
        copies = max(2, TOTAL // (2 * inner * sum(sizes)))
        draw = torch.Generator("cuda").manual_seed(0)

        def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(*shape, generator=draw, device="cuda")).to(dtype)

        self.weights = [
            [numbers(size, inner, scale=inner**-0.5) for size in sizes] for _ in range(copies)
        ]
        self.x, self.bytes = numbers(batch, inner), 2 * inner * sum(sizes)
        self.norm = Norm(1 + numbers(inner, scale=0.1), 1e-6) if normed else None
        self.merge = None
        if merged:
            f32 = torch.float32
            self.merge = Merge(
                numbers(batch, inner),
                numbers(batch, dtype=f32),
                numbers(inner, dtype=f32, scale=0.02),
                1e-6,
            )
        self.add = numbers(batch, sizes[0]) if added else None
        self.out = torch.empty(
            batch, sizes[0] if self.gated else sum(sizes), dtype=torch.bfloat16, device="cuda"
        )

    def run(self, weights: list[Tensor], backend: str = "triton") -> Tensor:
        """With `backend` reference: in fp32."""
        if backend == "triton":
            return project(
                self.x,
                weights,
                norm=self.norm,
                merge=self.merge,
                add=self.add,
                gated=self.gated,
                out=self.out,
            )
        wide = [weight.float() for weight in weights]
        merge = None if self.merge is None else self.merge._replace(out=self.merge.out.float())
        add = None if self.add is None else self.add.float()
        return project(
            self.x.float(),
            wide,
            norm=self.norm,
            merge=merge,
            add=add,
            gated=self.gated,
            backend="reference",
        )

    def timed(self, function: Callable[[list[Tensor]], Any], bandwidth: float) -> dict[str, float]:
        """Of one weight, from a captured pass over all."""
        us = times(captured(lambda: [function(weights) for weights in self.weights]), repeats=7)[
            "ms"
        ]
        us = us / len(self.weights) * 1e3
        return {"us": round(us, 2), "share": round(self.bytes / us / 1e6 / bandwidth, 3)}

    def library(self, weights: list[Tensor]) -> Tensor:
        """The products alone."""
        return torch.cat([F.linear(self.x, weight) for weight in weights], -1)

    def candidates(self, tiles: tuple[tuple[int, ...], ...], bandwidth: float) -> dict[str, Any]:
        """Of tiles of `projection`; timed unless the bandwidth is 0."""
        truth, found = self.run(self.weights[0], "reference"), {}
        kept = projection.tile_for
        for tile in tiles:
            kernel = "few" if len(self.x) > 1 else "stream" if len(tile) == 3 else "one"
            inputs, rest = (4096, tile[1:]) if kernel == "stream" else (tile[1], tile[2:])
            one = projection.Tile(kernel, tile[0], inputs, *rest)
            projection.tile_for = lambda *_, one=one: one
            try:
                self.out.fill_(torch.nan)
                off = float((self.run(self.weights[0]).float() - truth).norm() / truth.norm())
                found[str(tile)] = {"off_by": round(off, 5)}
                if off < 0.01 and bandwidth:
                    found[str(tile)] |= self.timed(self.run, bandwidth)
            except RuntimeError as error:
                found[str(tile)] = {"refused": str(error)[:200]}
            finally:
                projection.tile_for = kept
        if bandwidth:
            found["library"] = self.timed(self.library, bandwidth)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument(
        "--untimed", action="store_true", help="compile and compare alone: several processes may"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    found: dict[str, Any] = provenance("python -m benchmarks.projections " + " ".join(sys.argv[1:]))
    bandwidth = found["copy_tb_per_second"] = copy_bandwidth()
    for batch, name in itertools.product(flags.batches, flags.shapes):
        for merged in (False, True) if SHAPES[name][2] and name != "head" else (False,):
            case = Case(name, batch, merged)
            peak = 0.0 if flags.untimed else bandwidth
            one = case.candidates(ONE if batch == 1 else FEW, peak)
            if batch == 1 and case.norm is not None:
                one |= case.candidates(STREAM, peak)
            title = f"batch {batch}, {name}{', merged' if merged else ''}"
            found[title] = one
            print(
                title,
                "best",
                min((v.get("us", 1e9), k) for k, v in one.items()),
                json.dumps(one),
                flush=True,
            )
            if flags.out:
                flags.out.write_text(json.dumps(found, indent=1) + "\n")
            del case
            torch.cuda.empty_cache()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
