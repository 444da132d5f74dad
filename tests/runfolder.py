"""Makes run folders that look like real ones, without training anything: the report reads files and nothing else."""

import html
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path

RESIDUALS = ["standard", "attnres-block:block=4", "attnres-full"]
# What the made-up losses differ by
QUALITY = {"standard": 0.0, "attnres-block": -0.028, "attnres-full": -0.041}


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))


def family(residual: str) -> str:
    return residual.split(":", 1)[0]


def mixing_row(residual: str, read: int, sublayers: int, sharpness: float) -> list[float]:
    """One read's weights over the embedding and the outputs before it; zero above the diagonal."""
    count = read + 1
    if family(residual) == "attnres-full":
        scores = [
            sharpness * (1.9 * (source == read) + 0.9 * (source == 0) * (read % 2 == 0))
            for source in range(count)
        ]
        scores = [s - 0.05 * sharpness * min(read - j, 14) for j, s in enumerate(scores)]
        scores[max(0, read // 3)] += 0.7 * sharpness * (read % 5 == 3)
        total = sum(map(math.exp, scores))
        weights = [math.exp(s) / total for s in scores]
    elif family(residual) == "attnres-block":
        block = max(1, sublayers // 8)
        owner = [0] + [1 + j // block for j in range(read)]
        blocks = sorted(set(owner))
        scores = [
            sharpness * (1.5 * (n == blocks[-1]) + 0.5 * (n == 0) - 0.04 * (blocks[-1] - n))
            for n in blocks
        ]
        total = sum(map(math.exp, scores))
        weights = [math.exp(scores[blocks.index(n)]) / total for n in owner]
    else:
        weights = [1.0] * count
    return weights + [0.0] * (sublayers + 1 - count)


def entropy(weights: list[float]) -> float:
    total = sum(weights)
    return -sum(w / total * math.log(w / total) for w in weights if w > 0)


def depth_record(
    residual: str, step: int, tokens: int, layers: int, progress: float, rng: random.Random
) -> dict:
    sublayers = 2 * layers
    mixing = [
        mixing_row(residual, read, sublayers, 0.2 + progress) for read in range(sublayers + 1)
    ]
    growth = 1.0 if family(residual).startswith("attnres") else 1 + 6 * progress
    output = [
        (0.5 + 0.4 * (i % 2)) * growth ** (i / sublayers) * rng.uniform(0.85, 1.15)
        for i in range(sublayers)
    ]
    squares = [0.3, *[value**2 for value in output]]
    read = [math.sqrt(sum(w * w * s for w, s in zip(row, squares))) for row in mixing]
    slope = -2.2 if family(residual) == "standard" else -0.4
    gradient = [
        0.05 * math.exp(slope * i / sublayers) * (1 + 0.3 * (i % 2)) * rng.uniform(0.8, 1.2)
        for i in range(sublayers)
    ]
    return {
        "kind": "depth", "step": step, "tokens": tokens, "sublayers": ["attention", "mlp"] * layers,
        "output_norm": output, "read_norm": read, "gradient_norm": gradient, "mixing": mixing,
        "entropy": [entropy(row) for row in mixing],
    }  # fmt: skip


def metrics(
    residual: str, seed: int, layers: int, steps: int, *, evals: bool, depth: bool, records: int
) -> list[dict]:
    rng = random.Random(f"{residual}/{seed}")
    # Equal data order: every residual sees the same easy and hard batches
    order = random.Random(seed)
    gain = QUALITY.get(family(residual), -0.01) + rng.gauss(0, 0.004)
    rows: list[dict] = []
    for step in range(1, steps + 1):
        tokens, progress = step * 4096, step / steps
        loss = (
            1.45
            + 4.1 * math.exp(-9 * progress**0.6)
            + gain * min(1.0, 2 * progress)
            + 0.1 * order.gauss(0, 1) * 0.4
        )
        rows.append({"kind": "train", "step": step, "tokens": tokens, "loss": loss + rng.gauss(0, 0.02), "lr": 1e-3,
                     "grad_norm": 0.8, "tokens_per_second": 21000.0, "seconds": step * 0.19})  # fmt: skip
        clean = (
            1.5
            + 4.1 * math.exp(-9 * progress**0.6)
            + gain * min(1.0, 2 * progress)
            + rng.gauss(0, 0.002)
        )
        if evals and step % max(1, steps // 40) == 0:
            rows.append(
                {
                    "kind": "eval",
                    "step": step,
                    "tokens": tokens,
                    "loss": clean,
                    "bits_per_byte": clean / math.log(2),
                }
            )
        if depth and step % max(1, steps // records) == 0:
            rows.append(depth_record(residual, step, tokens, layers, progress, rng))
    return rows


def make_run(
    folder: Path, residual: str = "standard", seed: int = 0, *, layers: int = 6, steps: int = 200, evals: bool = True,
    depth: bool = True, finished: bool = True, records: int = 5, dim: int = 192, lr: float = 1e-3,
) -> Path:  # fmt: skip
    """A run folder as the trainer leaves it; `finished=False` is one that was interrupted before its summary."""
    folder.mkdir(parents=True)
    model = {
        "vocab_size": 257,
        "dim": dim,
        "layers": layers,
        "heads": 6,
        "context": 256,
        "residual": residual,
    }
    write_json(folder / "config.json", {
        "model": model, "data": {"source": ["stdlib"], "tokenizer": "bytes"},
        "optim": {"optimizer": "adamw", "lr": lr, "schedule": "cosine"},
        "train": {"seed": seed, "steps": steps, "batch_size": 16, "skip_nonfinite": 0, "skip_spikes": 0},
    })  # fmt: skip
    write_json(folder / "tokenizer.json", {"type": "bytes"})
    rows = metrics(residual, seed, layers, steps, evals=evals, depth=depth, records=records)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    extra = 0 if family(residual) == "standard" else (2 * layers + 1) * 2 * dim
    last = [row for row in rows if row["kind"] == "eval"][-1:]
    if finished:
        write_json(folder / "summary.json", {
            "residual": residual, "seed": seed, "parameters": 12 * layers * dim * dim + 257 * dim + extra,
            "residual_parameters": extra, "flops_per_token": 6 * 12 * layers * dim * dim + 9 * extra,
            "tokens": steps * 4096, "steps": steps, "seconds": steps * (0.19 if extra == 0 else 0.21) + seed,
            "peak_memory_bytes": (880 << 20) + 64 * extra,
            "loss": last[0]["loss"] if last else None, "bits_per_byte": last[0]["bits_per_byte"] if last else None,
            "device": "cpu", "torch": "2.10.0", "headwater": "0.1.0",
        })  # fmt: skip
    return folder


def make_comparison(
    folder: Path, residuals: list[str], seeds: list[int], jobs: int | None = 1, **settings
) -> Path:
    """A comparison's folder; `jobs=None` is one of before it was recorded how many runs were made at a time."""
    folder.mkdir(parents=True)
    corpus = {
        "source_hash": "7d69e0bf02c6e71c",
        "tokenizer_hash": "1860b66e",
        "split": "by_document",
    }
    write_json(
        folder / "compare.json",
        {"residuals": residuals, "seeds": seeds, "corpus": corpus, "config": {}},
    )
    for number, residual in enumerate(residuals):
        for seed in seeds:
            run = make_run(folder / "runs" / f"{number}-seed{seed}", residual, seed, **settings)
            launch = {"corpus": corpus}
            if jobs is not None:
                launch["side_by_side"] = jobs
            write_json(run / "launch.json", launch)
    return folder


def words_of(page: Path) -> str:
    """The words of a page: without scripts, styles and tags, each space a plain one."""
    text = re.sub(r"<(script|style).*?</\1>", "", page.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def rewrite(path: Path, **changes: object) -> None:
    """Change values of a JSON file."""
    write_json(path, json.loads(path.read_text()) | changes)


def read_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def change_rows(folder: Path, change: Callable[[dict], dict | None]) -> None:
    """Change every record of a run's metrics; None leaves a record out."""
    rows = [row for row in map(change, read_rows(folder)) if row is not None]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def append_rows(folder: Path, *rows: dict) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
