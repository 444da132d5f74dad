"""Sums over sources on a CPU: as a matrix product for each token, or source by source?

    PYTHONPATH=. python studies/cpu-sums/run.py --out studies/cpu-sums/results.json      # a minute on two cores

Forward and backward in milliseconds, the least of seven, the two ways in turn. What `headwater.ops.depth.reference.mix`
does is the second where there is one sum, or all of a token have no more numbers than `reference.SMALL`.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measure import provenance
from headwater.ops.depth import reference

SHAPES = ((1024, 64), (1024, 256), (4096, 512))  # tokens, width
SUMS = ((9, 1), (4, 3), (9, 8))  # sources, sums of a token


def products(values: list[Tensor], scores: Tensor) -> tuple[Tensor, ...]:
    return (scores.softmax(-2).mT @ torch.stack(values, -2)).unbind(-2)


def source_by_source(values: list[Tensor], scores: Tensor) -> tuple[Tensor, ...]:
    reference.SMALL = 2**62
    return reference.mix(values, (scores,))[0]


WAYS = {"products": products, "source by source": source_by_source}
Way = Callable[[list[Tensor], Tensor], tuple[Tensor, ...]]


def step(way: Way, tokens: int, width: int, sources: int, sums: int) -> tuple[float, float]:
    scores = torch.randn(tokens, sources, sums, requires_grad=True)
    values = [torch.randn(tokens, width, requires_grad=True) for _ in range(sources)]
    begun = time.perf_counter()
    outs = way(values, scores)
    read = time.perf_counter()
    torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    return 1e3 * (read - begun), 1e3 * (time.perf_counter() - read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    rows = []
    for tokens, width in SHAPES:
        for sources, sums in SUMS:
            rounds = [
                [step(way, tokens, width, sources, sums) for way in WAYS.values()] for _ in range(7)
            ]
            least = {
                name: [round(min(part), 2) for part in zip(*times, strict=True)]
                for name, times in zip(WAYS, zip(*rounds, strict=True), strict=True)
            }
            rows.append(
                {"tokens": tokens, "width": width, "sources": sources, "sums": sums, **least}
            )
            print(rows[-1], flush=True)
    if flags.out is not None:
        command = "PYTHONPATH=. python studies/cpu-sums/run.py"
        flags.out.write_text(
            json.dumps({**provenance(command, "cpu"), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
