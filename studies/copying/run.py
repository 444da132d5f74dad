"""Has a run learned to copy? Tokens drawn at random, told twice: how much less surprising are they the second time.

    PYTHONPATH=. python studies/copying/run.py RUN [RUN ...] --out results.json      # runs whose weights are kept

A decoder learns to look up what followed last time in one sudden step, early in its training or late; until then it is
as surprised by the second telling as by the first. Runs of one size that differ in nothing but rounding may stand on
either side of it. The table has nats per token for both tellings, and the run's bits per byte beside it.
studies/attention-residuals/page.py makes a table of its runs/copying.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.train import load_run


def told_twice(vocabulary: int, count: int, length: int) -> Tensor:
    """(count, 2 * length), every token as likely as any other."""
    once = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(0))
    return torch.cat([once, once], 1)


@torch.no_grad()
def surprise(model: Any, tokens: Tensor) -> tuple[float, float]:
    """Nats per token of the first and of the second telling, whose first token nothing foretells."""
    losses = F.cross_entropy(
        model(tokens[:, :-1]).float().transpose(1, 2), tokens[:, 1:], reduction="none"
    )
    length = tokens.shape[1] // 2
    return float(losses[:, : length - 1].mean()), float(losses[:, length:].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=16, help="of sequences")
    parser.add_argument("--length", type=int, default=128, help="tokens that are told twice")
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    results = []
    for folder in flags.runs:
        model = load_run(folder).model.eval()
        first, second = surprise(
            model, told_twice(model.config.vocab_size, flags.count, flags.length)
        )
        summary = json.loads((folder / "summary.json").read_text())
        run = {key: summary[key] for key in ("residual", "seed", "bits_per_byte")}
        results.append({"run": folder.name, **run, "first": first, "second": second})
        print(
            f"{folder.name}: {first:.2f} nats, then {second:.2f}; {run['bits_per_byte']:.4f} bits per byte",
            flush=True,
        )
    if flags.out:
        flags.out.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
