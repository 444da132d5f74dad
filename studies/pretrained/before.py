"""Convert SmolLM2 with each residual that starts exactly, check it in every way, and look into it before training.

    PYTHONPATH=.:studies/pretrained python studies/pretrained/before.py MODEL --text FILE --out OUT [--device cuda]

MODEL is the folder that smollm2.py writes; FILE is held-out text. Writes OUT/before.json: for each residual the
distance from the plain model in fp32 and bf16 and how many greedy texts are equal, whether it is the same after it was
saved, loaded and reverted; and of the plain model the size of the stream by depth and what the loss rises by when an
output is taken away.
"""

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import headwater
from headwater import hf
from headwater.runs.stats import spearman

RESIDUALS = ("attnres-block", "attnres-full", "mhc", "mhc-lite", "denseformer", "laurel")
NEW = 32  # tokens that a prompt is continued by


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--residuals", nargs="+", default=RESIDUALS)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--windows", type=int, default=8)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model = model.to(options.device).eval()
    tokens = read_tokens(options, tokenizer)
    results: dict[str, Any] = {"perplexity": perplexity(model, tokens)}
    results["greedy"] = tokenizer.decode(continue_greedily(model, tokens[:1, :8])[0])
    results["depth"] = look(model, tokenizer, tokens, options.out)
    for residual in options.residuals:
        results[residual] = check(model, residual, tokens, options.prompts)
        print(residual, json.dumps(results[residual]), flush=True)
        (options.out / "before.json").write_text(json.dumps(results, indent=1) + "\n")


def read_tokens(options: argparse.Namespace, tokenizer: Any) -> Tensor:
    """Windows of 256 tokens, spread over the text; prompts are their first eight."""
    text = options.text.read_text(encoding="utf-8")
    count = max(options.windows, options.prompts)
    step = len(text) // count
    windows = []
    for start in range(0, step * count, step):
        ids = tokenizer(text[start : start + 4096]).input_ids[:256]
        windows.append(torch.tensor(ids))
    return torch.stack(windows).to(options.device)


@torch.no_grad()
def perplexity(model: Any, tokens: Tensor) -> float:
    losses = [model(input_ids=window[None], labels=window[None]).loss for window in tokens]
    return torch.stack(losses).mean().exp().item()


@torch.no_grad()
def continue_greedily(model: Any, prompts: Tensor) -> Tensor:
    mask = torch.ones_like(prompts)
    return model.generate(prompts, attention_mask=mask, max_new_tokens=NEW, do_sample=False)


def check(plain: Any, residual: str, tokens: Tensor, prompts: int) -> dict[str, Any]:
    """Say how far a converted model is from the plain one, in fp32 and bf16, and whether it survives folders."""
    results: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        reference = copy.deepcopy(plain).to(dtype)
        model = copy.deepcopy(reference)
        headwater.convert(model, residual)
        verification = headwater.verify(model, reference, tokens[:2, :64])
        name = str(dtype).removeprefix("torch.")
        results[name] = {
            "equal": verification.equal,
            "kl": verification.kl,
            "logit_difference": verification.logit_difference,
        }
        ours = continue_greedily(model, tokens[:prompts, :8])
        theirs = continue_greedily(reference, tokens[:prompts, :8])
        results[name]["texts"] = (ours == theirs).all(-1).sum().item()
        results[name]["of"] = prompts

    # The last model, in fp32, goes to a folder and back, and then loses its residual again.
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits = again.to(tokens.device).eval()(tokens[:2]).logits
        results["saved"] = torch.equal(logits, model(tokens[:2]).logits)
    hf.revert(model)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    results["reverted"] = all(torch.equal(*pair) for pair in pairs)
    return results


def look(model: Any, tokenizer: Any, tokens: Tensor, out: Path) -> dict[str, Any]:
    """Measure the plain model's stream by depth: its own residual, made one of headwater's."""
    converted = copy.deepcopy(model)
    headwater.convert(converted, "standard")
    passes = [headwater.inspect(converted, window, tokenizer=tokenizer) for window in tokens[:8]]
    passes[0].save(out / "smollm2.html")
    streams = torch.stack([one.read_size.mean(-1) for one in passes]).mean(0)
    sizes = torch.stack([one.source_size.mean(-1) for one in passes]).mean(0)
    losses = torch.stack([one.removed.loss.mean(-1) for one in passes]).mean(0)
    return {
        "stream_size": streams.tolist(),
        "output_size": sizes.tolist(),
        "loss_without": losses.tolist(),
        "rank_correlation": spearman(sizes.tolist(), losses.tolist()),
    }


if __name__ == "__main__":
    main()
