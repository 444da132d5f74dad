"""A run so small that it takes a second: a few kilobytes of text, four sublayers, sixteen channels."""

import hashlib
import json
import shutil
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from headwater.runs.settings import SETTINGS, Config
from headwater.train.checkpoint.storage import Reader, Tensors, read

STEPS = 12
CLOCKS = ("seconds", "tokens_per_second")
TINY = {
    "residual": "attnres-block:block=2",
    "dim": 16,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "mlp_dim": 32,
    "context": 32,
    "tie_embeddings": True,
    "validation": 0.1,
    "steps": STEPS,
    "batch_size": 4,
    "log_every": 1,
    "eval_every": 4,
    "eval_windows": 8,
    "depth_every": 6,
    "save_every": 5,
    "device": "cpu",
    "warmup": 2,
}


def write_corpus(folder: Path) -> Path:
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for i in range(40):
        (corpus / f"{i}.txt").write_text(f"river {i} runs from its headwater to the sea. " * 6)
    return corpus


def tiny(folder: Path, **settings: Any) -> Config:
    """A run on a corpus in this folder, with other settings by their names."""
    text = {"source": (str(write_corpus(folder)),), "cache": str(folder / "cache")}
    return changed(Config(), **{**TINY, **text, **settings})


def changed(config: Config, **settings: Any) -> Config:
    """The run with other settings, each by its name without its section: no two sections share a name."""
    sections: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in settings.items():
        (section,) = (key.partition(".")[0] for key in SETTINGS if key.endswith(f".{name}"))
        sections[section][name] = value
    return config.over(sections)


def flags(config: Config, out: Path) -> list[str]:
    """The command line that asks for the same run."""
    file = out.with_suffix(".json")
    file.write_text(json.dumps(asdict(config)))
    return ["train", "--config", str(file), "--out", str(out)]


def records(run: Path, kind: str = "") -> list[dict[str, Any]]:
    """The records of a run's metrics, of one kind or of all."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if kind in ("", record["kind"])]


def logged(run: Path, key: str) -> list[Any]:
    """A number of every training step."""
    return [record[key] for record in records(run, "train")]


def saved_steps(run: Path) -> list[int]:
    """The steps of a run's checkpoints; a folder that is none of them is an error."""
    folders = sorted((run / "checkpoints").iterdir())
    return [int(folder.name.removeprefix("step-")) for folder in folders]


def checkpoint_of(run: Path, step: int = STEPS) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def go_back(run: Path, step: int) -> None:
    """Make a finished run one that was killed after it had saved a step."""
    for later in saved_steps(run):
        if later > step:
            shutil.rmtree(checkpoint_of(run, later))
    (run / "summary.json").unlink()


def fingerprint(run: Path) -> dict[str, Any]:
    """All that must not depend on interruptions: weights, optimizer, and everything logged but the clock."""
    last = checkpoint_of(run, saved_steps(run)[-1])
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in last.glob("*.safetensors")
    }
    metrics = records(run)
    for record in metrics:
        for clock in CLOCKS:
            record.pop(clock, None)
    return {"step": last.name, "files": files, "metrics": metrics}


def read_all(checkpoint: Path, kind: str) -> Tensors:
    """Every tensor of a kind, whole, in this process."""
    reader = Reader(checkpoint)
    entries = reader.metadata.state_dict_metadata
    tensors = {}
    for name, shape in reader.shapes(kind).items():
        dtype = entries[f"{kind}/{name}"].properties.dtype
        tensors[name] = torch.empty(shape, dtype=dtype)
    read(reader, {f"{kind}/{name}": value for name, value in tensors.items()}, alone=True)
    return tensors
