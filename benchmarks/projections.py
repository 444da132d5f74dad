"""Time the tiles that a projection of a decoding step may take, beside the library's product.

Results are microseconds, and shares of the bandwidth of a large copy.

    python -m benchmarks.projections --out FILE      # one H200, about 90 seconds, mostly compiling

Shapes are those of the 1.26 billion decoder of `benchmarks.generate`. Weights rotate among copies
that together are far larger than the cache. A candidate whose result is not the reference's shows
no time.
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
    """One shape at one batch: tensors, reference and candidates."""

    def __init__(self, name: str, batch: int, merged: bool) -> None:
        sizes, inner, normed, self.gated, added = SHAPES[name]
        channels = sizes[0] if self.gated else sum(sizes)
        copies = max(2, TOTAL // (2 * inner * sum(sizes)))
        draw = torch.Generator("cuda").manual_seed(0)

        def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(*shape, generator=draw, device="cuda")).to(dtype)

        self.weights = []
        for _ in range(copies):
            weights = [numbers(size, inner, scale=inner**-0.5) for size in sizes]
            self.weights.append(weights)
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
        self.out = torch.empty(batch, channels, dtype=torch.bfloat16, device="cuda")

    def run(self, weights: list[Tensor], backend: str = "triton") -> Tensor:
        """Project by the kernels, or with `backend` reference by PyTorch in fp32."""
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
        """Time one projection, from a captured pass over all copies of the weights."""

        def all_copies() -> None:
            for weights in self.weights:
                function(weights)

        milliseconds = times(captured(all_copies), repeats=7)["ms"]
        us = milliseconds / len(self.weights) * 1e3
        return {"us": round(us, 2), "share": round(self.bytes / us / 1e6 / bandwidth, 3)}

    def library(self, weights: list[Tensor]) -> Tensor:
        """Only the products, by the library."""
        return torch.cat([F.linear(self.x, weight) for weight in weights], -1)

    def candidates(self, tiles: tuple[tuple[int, ...], ...], bandwidth: float) -> dict[str, Any]:
        """Compare tiles of `projection` with the reference; time them unless the bandwidth is 0."""
        truth, results = self.run(self.weights[0], "reference"), {}
        chooser = projection.tile_for
        for numbers in tiles:
            tile = self.tile(numbers)
            projection.tile_for = lambda *_, tile=tile: tile
            result: dict[str, Any] = {}
            try:
                self.out.fill_(torch.nan)
                error = self.run(self.weights[0]).float() - truth
                result["off_by"] = round(float(error.norm() / truth.norm()), 5)
                if result["off_by"] < 0.01 and bandwidth:
                    result |= self.timed(self.run, bandwidth)
            except RuntimeError as failure:
                result = {"refused": str(failure)[:200]}
            finally:
                projection.tile_for = chooser
            results[str(numbers)] = result
        if bandwidth:
            results["library"] = self.timed(self.library, bandwidth)
        return results

    def tile(self, numbers: tuple[int, ...]) -> projection.Tile:
        """Make a tile of a candidate's numbers: three are for `stream`, which reads all inputs."""
        if len(self.x) > 1:
            return projection.Tile("few", *numbers)
        if len(numbers) == 4:
            return projection.Tile("one", *numbers)
        channels, *rest = numbers
        return projection.Tile("stream", channels, 4096, *rest)


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
    results: dict[str, Any] = provenance(
        "python -m benchmarks.projections " + " ".join(sys.argv[1:])
    )
    bandwidth = results["copy_tb_per_second"] = copy_bandwidth()
    for batch, name in itertools.product(flags.batches, flags.shapes):
        merges = SHAPES[name][2] and name != "head"
        for merged in (False, True) if merges else (False,):
            case = Case(name, batch, merged)
            peak = 0.0 if flags.untimed else bandwidth
            candidates = case.candidates(ONE if batch == 1 else FEW, peak)
            if batch == 1 and case.norm is not None:
                candidates |= case.candidates(STREAM, peak)
            title = f"batch {batch}, {name}{', merged' if merged else ''}"
            results[title] = candidates
            best = min((result.get("us", 1e9), tile) for tile, result in candidates.items())
            print(title, "best", best, json.dumps(candidates), flush=True)
            if flags.out:
                flags.out.write_text(json.dumps(results, indent=1) + "\n")
            del case
            torch.cuda.empty_cache()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
