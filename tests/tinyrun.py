"""A run so small that it takes a second: a few kilobytes of text, four sublayers, sixteen channels."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from headwater.runs.settings import Config, DataSettings, ModelConfig, OptimSettings, TrainSettings
from headwater.train.checkpoint.storage import Reader, Tensors, read

STEPS = 12


def write_corpus(folder: Path) -> Path:
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for i in range(40):
        (corpus / f"{i}.txt").write_text(f"river {i} runs from its headwater to the sea. " * 6)
    return corpus


def tiny(
    folder: Path, *, residual: str = "attnres-block:block=2", optimizer: str = "adamw", **train: Any
) -> Config:
    model = ModelConfig(
        residual=residual,
        dim=16,
        layers=2,
        heads=2,
        kv_heads=1,
        mlp_dim=32,
        context=32,
        tie_embeddings=True,
    )
    data = DataSettings(
        source=(str(write_corpus(folder)),), cache=str(folder / "cache"), validation=0.1
    )
    settings = TrainSettings(
        steps=STEPS,
        batch_size=4,
        log_every=1,
        eval_every=4,
        eval_windows=8,
        depth_every=6,
        save_every=5,
        device="cpu",
    )
    optim = OptimSettings(optimizer=optimizer, warmup=2)  # type: ignore[arg-type]
    return Config(model=model, data=data, optim=optim, train=replace(settings, **train))


def flags(config: Config, out: Path) -> list[str]:
    """The command line that asks for the same run."""
    file = out.with_suffix(".json")
    file.write_text(json.dumps(asdict(config)))
    return ["train", "--config", str(file), "--out", str(out)]


def fingerprint(run: Path) -> dict[str, Any]:
    """What must not depend on interruptions: weights, optimizer, and everything logged but the clock."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in last.glob("*.safetensors")
    }
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clocks = ("seconds", "tokens_per_second")
    kept = [
        {key: value for key, value in record.items() if key not in clocks} for record in records
    ]
    return {"step": last.name, "files": files, "metrics": kept}


def read_all(checkpoint: Path, kind: str) -> Tensors:
    """Every tensor of a kind, whole, in this process."""
    reader = Reader(checkpoint)
    dtypes = {
        name: entry.properties.dtype for name, entry in reader.metadata.state_dict_metadata.items()
    }
    found = {
        name: torch.empty(shape, dtype=dtypes[f"{kind}/{name}"])
        for name, shape in reader.shapes(kind).items()
    }
    read(reader, {f"{kind}/{name}": value for name, value in found.items()}, alone=True)
    return found
