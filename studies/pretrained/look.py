"""Look into SmolLM2 before any training: how its stream grows by depth, and which outputs matter.

    PYTHONPATH=. python studies/pretrained/look.py MODEL --text FILE

MODEL is the folder that smollm2.py writes; FILE is held-out text. Writes results/depth.json: the size of each output
and of the stream that it is added to, and the rise of the loss when an output is taken away at all reads. Sizes are
root mean squares over channels, and the median over tokens: the first token of a window is hundreds of times as large
as the others, so it would be most of a mean.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from before import HERE, read_windows
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import headwater
from headwater.runs.stats import spearman


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, help="the inspector's page of the first window")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of a window")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    headwater.convert(model, "standard")
    passes = []
    for window in read_windows(options.text, tokenizer, options.windows, options.tokens):
        passes.append(headwater.inspect(model, window, tokenizer=tokenizer, name="SmolLM2", top=3))
        print(f"window {len(passes)} of {options.windows}", flush=True)
    if options.page:
        passes[0].save(options.page)
    results = {"windows": options.windows, "tokens": options.tokens, **summary(passes)}
    (options.out / "depth.json").write_text(json.dumps(results, indent=1) + "\n")


def summary(passes: list[Any]) -> dict[str, Any]:
    reads = torch.stack([one.read_size for one in passes])
    sources = torch.stack([one.source_size for one in passes])
    changes = torch.stack([one.removed.loss.mean(-1) for one in passes])  # (W, S)
    sizes, losses = median(sources), changes.mean(0).tolist()
    halves = [changes[start::2].mean(0).tolist() for start in (0, 1)]
    return {
        "kinds": ["embedding", *passes[0].kinds],
        "loss": torch.stack([one.loss.mean() for one in passes]).mean().item(),
        "stream_size": median(reads),
        "output_size": sizes,
        "first_token": {
            "stream_size": reads[:, :, 0].mean(0).tolist(),
            "output_size": sources[:, :, 0].mean(0).tolist(),
        },
        "loss_without": losses,
        "rank_correlation": {
            "size": spearman(sizes, losses),
            "halves of the windows": spearman(*halves),
        },
    }


def median(sizes: Tensor) -> list[float]:
    """The median over windows and all tokens but the first; sizes (W, places, T)."""
    return sizes[:, :, 1:].transpose(0, 1).flatten(1).median(-1).values.tolist()


if __name__ == "__main__":
    main()
