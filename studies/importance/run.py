"""Does a weight mean importance? Take a source away at a read, and set the change of the loss beside its weight.

    PYTHONPATH=. python studies/importance/run.py RUN [RUN ...] --out results.json      # runs whose weights are kept

For each run and each of some windows of held-out text: the weight of every source in every read, how large the source
is, and how much the loss rises when that read goes without it (what `headwater.inspect` computes), averaged over tokens
and windows. Then, for each read with three sources or more, Spearman's rank correlation over its sources; the table has
the mean over reads, and over the first, middle and last third of the depth. A residual whose weights mean importance
has one near 1. Beside it: that of weight times size; and of the changes on every other window with those on the rest,
which is the lower, the more of them is noise of so little text.
studies/attention-residuals/page.py makes a table of its runs/importance.json.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import headwater
from headwater.runs.stats import spearman
from headwater.train import load_run
from headwater.train.data.dataset import prepare

FEWEST = 3  # sources of a read that has a rank correlation


class Measured(NamedTuple):
    """Of each window, (windows, reads, sources) each, zero above the diagonal."""

    weights: Tensor
    sizes: Tensor  # of what the weights bring: times the root mean square of the source
    changes: Tensor  # of the loss


def measure(model: Any, windows: Tensor) -> Measured:
    """windows (W, T)."""
    found = []
    for window in windows:
        seen = headwater.inspect(model, window, removals="pairs", top=1)
        assert seen.removed_at is not None
        change = torch.zeros(seen.mixing.shape[:2])
        for (read, source), row in zip(seen.pairs, seen.removed_at.loss, strict=True):
            change[read, source] = row.mean()
        weights = seen.mixing.abs()
        found.append((weights.mean(-1), (weights * seen.source_size).mean(-1), change))
    return Measured(*map(torch.stack, zip(*found, strict=True)))


def correlations(found: Measured) -> dict[str, list[float | None]]:
    """By read: of the changes with weights, with weights times sizes, and of one half of the windows with the other."""
    weights, sizes, changes = (values.mean(0) for values in found)
    halves = [found.changes[first::2].mean(0) for first in (0, 1)]
    pairs = {"weights": (weights, changes), "sizes": (sizes, changes), "halves": halves}
    return {name: by_read(*pair) for name, pair in pairs.items()}


def by_read(ours: Tensor, theirs: Tensor) -> list[float | None]:
    """Of each read that has sources enough."""
    reads = range(FEWEST - 1, len(ours))
    return [spearman(ours[i, : i + 1].tolist(), theirs[i, : i + 1].tolist()) for i in reads]


def summary(found: Sequence[float | None]) -> dict[str, float | None]:
    """Means over all reads, and over thirds of the depth."""
    third = -(-len(found) // 3)
    parts = {
        "all": found,
        "first": found[:third],
        "middle": found[third : 2 * third],
        "last": found[2 * third :],
    }
    known = {
        name: [value for value in values if value is not None] for name, values in parts.items()
    }
    return {name: statistics.fmean(values) if values else None for name, values in known.items()}


def windows_of(config: Any, count: int, length: int) -> Tensor:
    """Windows of held-out text, (count, length), at equal distances."""
    held_out = prepare(config.data).windows("validation", length - 1)
    return torch.from_numpy(held_out.take(held_out.spread(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of a window")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    results = []
    for folder in flags.runs:
        run = load_run(folder, flags.device)
        found = measure(run.model, windows_of(run.config, flags.windows, flags.tokens))
        residual, reads = run.config.model.residual, correlations(found)
        parts = {name: summary(values) for name, values in reads.items()}
        results.append({
            "residual": residual, "seed": run.config.train.seed, "windows": flags.windows, "tokens": flags.tokens,
            "spearman": parts["weights"],
            "sizes": parts["sizes"]["all"], "halves": parts["halves"]["all"], "reads": reads["weights"],
            "weights": found.weights.mean(0).tolist(), "changes": found.changes.mean(0).tolist(),
        })  # fmt: skip
        shown = {**parts["weights"], "sizes": results[-1]["sizes"], "halves": results[-1]["halves"]}
        words = [
            f"{name} {'-' if value is None else format(value, '.2f')}"
            for name, value in shown.items()
        ]
        print(f"{residual}: {', '.join(words)}", flush=True)
    if flags.out:
        flags.out.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
