"""Checkpoints that are whole or absent: a folder per step, written under another name, synced, then renamed into place.

`manifest.json` holds the sha256 of every file. Loading checks them all and never falls back in silence: a damaged
checkpoint is an error that names the file and the newest good one. Tensors are safetensors, the rest is JSON; nothing
is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from headwater.errors import UserError
from headwater.models import Decoder
from headwater.models.tokenizer import Tokenizer, load_tokenizer
from headwater.train.config import differences

PREFIX = "step-"
MANIFEST = "manifest.json"
Optimizers = Mapping[str, torch.optim.Optimizer]


def save(root: Path, step: int, model: Decoder, optimizers: Optimizers, state: dict[str, Any], *, keep: int) -> Path:
    """Write `root/step-N`, then drop all but the newest `keep`. A failed write leaves what was there as it was."""
    final = root / f"{PREFIX}{step:08d}"
    scratch = root / f".tmp-{final.name}"
    sweep(root)
    try:
        scratch.mkdir(parents=True)
        files = {
            "model.safetensors": safetensors.torch.save(model.weights()),
            "optimizer.safetensors": safetensors.torch.save(_optimizer_tensors(model, optimizers)),
            "config.json": _encode(model.config.to_dict()),
            "state.json": _encode({"step": step, **state}),
        }
        hashes = {name: _write(scratch / name, content) for name, content in files.items()}
        _write(scratch / MANIFEST, _encode({"step": step, "sha256": hashes}))
        _sync_folder(scratch)
        _put_in_place(scratch, final)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UserError(
            f"could not write the checkpoint {final}: {error.strerror or error}. {last_good(root)} "
            "Make room (or pass a smaller --keep), then go on with --resume"
        ) from error
    for old in checkpoints(root)[:-keep]:
        _remove(old)
    return final


def load(folder: Path, model: Decoder, optimizers: Optimizers) -> dict[str, Any]:
    """Fill model and optimizers from a verified checkpoint; returns its state.json."""
    verify(folder)
    device = next(model.parameters()).device
    model.load_weights(safetensors.torch.load_file(folder / "model.safetensors", device=str(device)))
    tensors = safetensors.torch.load_file(folder / "optimizer.safetensors", device=str(device))
    _fill_optimizers(model, optimizers, tensors)
    return read_state(folder)


def load_model(folder: Path, device: str = "cpu") -> tuple[Decoder, Tokenizer]:
    """The model of a run (its newest checkpoint) or of one checkpoint, with the run's tokenizer."""
    chosen = folder if (folder / "model.safetensors").is_file() else newest(folder / "checkpoints")
    if chosen is None:
        raise UserError(f"no checkpoint in {folder}: give the folder of a run that has saved one, or of a checkpoint")
    verify(chosen)
    return Decoder.load(chosen, device), load_tokenizer(chosen.parent.parent)


def read_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "state.json").read_text(encoding="utf-8"))


def refuse_other(folder: Path, asked: dict[str, Any]) -> None:
    """A run continues only under the configuration, and on the tokens, that it began with."""
    differing = differences(read_state(folder)["config"], asked)
    if differing:
        listing = "\n  ".join(differing)
        raise UserError(
            f"the checkpoint {folder} belongs to another configuration:\n  {listing}\n"
            "Resume with the settings it was made with (leave the flags out), or start a new run in another --out"
        )


def checkpoints(root: Path) -> list[Path]:
    """Committed checkpoints, oldest first."""
    return sorted(path for path in root.glob(f"{PREFIX}*") if path.is_dir())


def newest(root: Path) -> Path | None:
    """The checkpoint to resume from. A damaged one is never skipped in silence: the user decides what to lose."""
    found = checkpoints(root)
    if not found:
        return None
    verify(found[-1])
    return found[-1]


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        hashes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is missing or unreadable"
    for name, expected in hashes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                return f"{name} is not what was written ({path.stat().st_size} bytes, its hash differs)"
    return None


def verify(folder: Path) -> None:
    problem = damage(folder)
    if problem:
        raise UserError(
            f"the checkpoint {folder} is damaged: {problem}. {last_good(folder.parent)} "
            f"To go on from there, delete the damaged folder (rm -r {folder}) and pass --resume"
        )


def sweep(root: Path) -> None:
    """Remove what a killed process left half written or half deleted."""
    for stale in root.glob(".tmp-*"):
        shutil.rmtree(stale)


def last_good(root: Path) -> str:
    good = next((path for path in reversed(checkpoints(root)) if damage(path) is None), None)
    return f"The last good checkpoint is {good}." if good else "There is no good checkpoint yet."


def _encode(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _write(path: Path, content: bytes) -> str:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put_in_place(scratch: Path, final: Path) -> None:
    if final.exists():  # a step taken again, after its damaged checkpoint was left behind
        _remove(final)
    scratch.rename(final)
    _sync_folder(final.parent)


def _remove(folder: Path) -> None:
    """Rename first: a deletion cut short must not look like a damaged checkpoint."""
    doomed = folder.with_name(f".tmp-old-{folder.name}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _names(model: Decoder) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _optimizer_tensors(model: Decoder, optimizers: Optimizers) -> dict[str, Tensor]:
    """Every slot of every parameter under "optimizer/parameter/slot"; learning rates come from the schedule instead."""
    names = _names(model)
    return {
        f"{kind}/{names[id(parameter)]}/{slot}": value.detach().contiguous()
        for kind, optimizer in optimizers.items()
        for parameter, slots in optimizer.state.items()
        for slot, value in slots.items()
    }


def _fill_optimizers(model: Decoder, optimizers: Optimizers, tensors: dict[str, Tensor]) -> None:
    names = _names(model)
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for key, value in tensors.items():
        kind, name, slot = key.split("/")
        found.setdefault(kind, {}).setdefault(name, {})[slot] = value
    for kind, optimizer in optimizers.items():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        by_index = {i: found.get(kind, {}).get(names[id(p)]) for i, p in enumerate(parameters)}
        filled = {i: slots for i, slots in by_index.items() if slots}
        optimizer.load_state_dict({"state": filled, "param_groups": optimizer.state_dict()["param_groups"]})
