"""Train SmolLM2 further with its own residual and with others, on the same windows of text, until a deadline.

    PYTHONPATH=.:studies/pretrained python studies/pretrained/train.py MODEL --text DIR --out OUT \
        --arms plain attnres-block --rates 3e-5 1e-4 3e-4 --factors 10 --seeds 0 --tokens 10_000_000 --minutes 8

DIR has train.npy, prose.npy and code.npy, tokens as uint16, which text.py writes: the text that is trained on, and two
that are held out. An arm is `plain`, a residual, or a residual with `/queries`: then all but what the residual adds is
frozen. Each run that ends adds a line to OUT/runs.jsonl; a run that has its line there is not made again.
"""

import argparse
import copy
import json
import math
import time
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import headwater
from headwater import hf

LENGTH = 1024
WARMUP = 0.05  # share of the steps
DECAY = 0.1  # weight decay of matrices


@dataclass(frozen=True)
class Run:
    arm: str
    rate: float
    factor: float
    seed: int
    tokens: int
    batch: int

    @property
    def steps(self) -> int:
        return self.tokens // (self.batch * LENGTH)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", required=True)
    parser.add_argument("--rates", type=float, nargs="+", required=True)
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=int, default=30_000_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--windows", type=int, default=256, help="of each held-out text")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    finished = finished_runs(options.out / "runs.jsonl")
    for arm in options.arms:
        # The plain residual has no queries, so their factor means nothing to it.
        factors = [1.0] if arm == "plain" else options.factors
        runs = [
            Run(arm, rate, factor, seed, options.tokens, options.batch)
            for seed, rate, factor in product(options.seeds, options.rates, factors)
        ]
        missing = [run for run in runs if run not in finished]
        if missing:
            train_arm(base, arm, missing, options, deadline)


def finished_runs(path: Path) -> set[Run]:
    if not path.exists():
        return set()
    runs = set()
    for line in path.read_text().splitlines():
        values = json.loads(line)
        runs.add(Run(**{field.name: values[field.name] for field in fields(Run)}))
    return runs


def train_arm(
    base: Any, arm: str, runs: list[Run], options: argparse.Namespace, deadline: float
) -> None:
    """Make the arm's runs with one model, so that it is compiled once, and set back to its start for each run."""
    residual, _, part = arm.partition("/")
    model = copy.deepcopy(base).to(options.device)
    if residual != "plain":
        headwater.convert(model, residual)
        hf.trainable(model, only=part == "queries")
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compiled = torch.compile(model) if options.device == "cuda" else model
    # Nothing is known of an arm's first run, so it begins only while half of the time is left.
    seconds = 30.0 * options.minutes
    for run in runs:
        if time.monotonic() + seconds > deadline:
            print(f"no time for {run}", flush=True)
            return
        began = time.monotonic()
        model.load_state_dict(start)
        result = train(model, compiled, run, options)
        seconds = time.monotonic() - began
        line = json.dumps(asdict(run) | result | {"seconds": round(seconds, 1)})
        print(line, flush=True)
        with open(options.out / "runs.jsonl", "a") as file:
            file.write(line + "\n")


def train(model: Any, compiled: Any, run: Run, options: argparse.Namespace) -> dict[str, Any]:
    text = np.load(options.text / "train.npy", mmap_mode="r")
    held_out = {
        name: windows_of(np.load(options.text / f"{name}.npy"), options.windows)
        for name in ("prose", "code")
    }
    groups = headwater.param_groups(model, lr=run.rate, weight_decay=DECAY, query_lr=run.factor)
    fused = options.device == "cuda"
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=fused)
    # A seed is an order of the windows; every arm sees the same windows in the same order.
    order = np.random.default_rng(run.seed).permutation(len(text) // LENGTH)
    losses = []
    before = evaluate(compiled, held_out, run, options.device)
    model.train()
    for step in range(run.steps):
        share = schedule(step, run.steps)
        for group in optimizer.param_groups:
            group["lr"] = run.rate * group["lr_factor"] * share
        places = order[step * run.batch : (step + 1) * run.batch]
        batch = torch.stack([window_at(text, place) for place in places]).to(options.device)
        loss = loss_of(compiled, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    after = evaluate(compiled, held_out, run, options.device)
    curve = torch.stack(losses).float().cpu()
    return {
        "before": before,
        "after": after,
        "train": [round(x, 4) for x in curve[:: max(1, run.steps // 50)].tolist()],
        "weights": depth_weights(model, held_out["prose"][:4].to(options.device)),
    }


def schedule(step: int, steps: int) -> float:
    """The share of the learning rate: linear warm-up, then a cosine to a tenth."""
    warmup = max(1, int(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def window_at(text: np.ndarray, place: int) -> Tensor:
    return torch.from_numpy(text[place * LENGTH : (place + 1) * LENGTH].astype(np.int64))


def windows_of(text: np.ndarray, count: int) -> Tensor:
    """`count` windows, spread evenly over a text."""
    places = np.linspace(0, len(text) // LENGTH - 1, count).astype(int)
    return torch.stack([window_at(text, place) for place in places])


def loss_of(model: Any, batch: Tensor) -> Tensor:
    with torch.autocast(batch.device.type, torch.bfloat16):
        return model(input_ids=batch, labels=batch).loss


@torch.no_grad()
def evaluate(model: Any, held_out: dict[str, Tensor], run: Run, device: str) -> dict[str, float]:
    """Mean loss of each held-out text, nats a token."""
    model.eval()
    losses = {}
    for name, windows in held_out.items():
        parts = [loss_of(model, part.to(device)) for part in windows.split(run.batch)]
        losses[name] = torch.stack(parts).mean().item()
    return losses


@torch.no_grad()
def depth_weights(model: Any, batch: Tensor) -> list[list[float]]:
    """What each read takes of its sources, averaged over tokens; nothing of a model without depth weights."""
    if getattr(model, "residual", None) is None and getattr(model.model, "residual", None) is None:
        return []
    model.eval()
    weights = model(batch, output_depth_weights=True).depth_weights
    return [[round(x, 4) for x in read.float().mean((1, 2, 3)).tolist()] for read in weights]


if __name__ == "__main__":
    main()
