"""Checkpoints that are whole or absent: a folder per step, written under another name, synced, then renamed into place.

`manifest.json` holds the sha256 of every file and of itself. Loading checks them all and never falls back in silence: a
damaged checkpoint is an error that names the file and the newest good one. Tensors are safetensors, the rest is JSON;
nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from headwater.errors import UserError
from headwater.models import Decoder, ModelConfig
from headwater.models.tokenizer import Tokenizer, load_tokenizer
from headwater.train.config import differences
from headwater.train.parallel import Ranks
from headwater.train.shards import INDEX, Archive, Index, Optimizers, fill_model, fill_optimizers, merge_indices, shards

PREFIX = "step-"
MANIFEST = "manifest.json"
MODEL = "model.safetensors"


def save(
    root: Path,
    step: int,
    model: nn.Module,
    optimizers: Optimizers,
    state: dict[str, Any],
    *,
    config: ModelConfig,
    keep: int,
    ranks: Ranks | None = None,
) -> Path:
    """Write `root/step-N`, then drop all but the newest `keep`. A failed write leaves what was there as it was.

    Several ranks write side by side into the same scratch folder; the main one renames it when all have succeeded.
    """
    ranks = ranks or Ranks()
    final = root / f"{PREFIX}{step:08d}"
    scratch = root / f".tmp-{final.name}"
    written = Written()
    with ranks.main_first():  # nobody writes before the folder is there
        written.attempt(lambda: _clear(root, scratch) if ranks.main else None)
    written.attempt(lambda: written.add(scratch, *shards(model, optimizers, ranks)))
    everyone = ranks.collect(written)
    if ranks.main and not any(one.problem for one in everyone):
        texts = {"config.json": config.to_dict(), "state.json": {"step": step, **state}}
        written.attempt(lambda: _commit(scratch, final, step, everyone, texts))
    problem = next((one.problem for one in ranks.collect(written) if one.problem), None)
    if problem:
        if ranks.main:
            shutil.rmtree(scratch, ignore_errors=True)
        raise UserError(
            f"could not write the checkpoint {final}: {problem}. {last_good(root)} "
            "Make room (or pass a smaller --keep), then go on with --resume"
        )
    for old in checkpoints(root)[:-keep] if ranks.main else ():
        _remove(old)
    return final


@dataclass
class Written:
    """What one rank has to report: the hash of each of its files, where tensors lie, and what went wrong."""

    hashes: dict[str, str] = field(default_factory=dict)
    index: Index = field(default_factory=dict)
    problem: str | None = None

    def attempt(self, action: Callable[[], None]) -> None:
        """Later steps of a save are not tried after one has failed; every rank learns of it when they report."""
        if self.problem is None:
            try:
                action()
            except OSError as error:
                self.problem = error.strerror or str(error)

    def add(self, scratch: Path, files: dict[str, dict[str, Tensor]], index: Index) -> None:
        for name, tensors in files.items():
            self.hashes[name] = _write(scratch / name, safetensors.torch.save(tensors))
        self.index = index


def _clear(root: Path, scratch: Path) -> None:
    sweep(root)
    scratch.mkdir(parents=True)


def _commit(scratch: Path, final: Path, step: int, everyone: list[Written], texts: dict[str, Any]) -> None:
    """The manifest is written last and the rename follows it: a checkpoint has both, or it is none."""
    index = merge_indices([one.index for one in everyone])
    if index:
        texts[INDEX] = index
    hashes = {name: digest for one in everyone for name, digest in one.hashes.items()}
    hashes |= {name: _write(scratch / name, _encode(value)) for name, value in texts.items()}
    _write(scratch / MANIFEST, _seal({"step": step, "sha256": hashes}))
    _sync_folder(scratch)
    _put_in_place(scratch, final)


def load(folder: Path, model: nn.Module, optimizers: Optimizers, ranks: Ranks | None = None) -> dict[str, Any]:
    """Fill model and optimizers from a verified checkpoint, whatever the layout it was saved under; returns its
    state.json. Each rank reads the rows it holds."""
    verify(folder, ranks)
    fill_model(Archive(folder, "model"), model, whole=ranks is None or ranks.alone)
    fill_optimizers(Archive(folder, "optimizer"), model, optimizers)
    return read_state(folder)


def load_model(folder: Path, device: str = "cpu") -> tuple[Decoder, Tokenizer]:
    """The model of a run (its newest checkpoint), of one checkpoint, or of a folder that `Decoder.save` wrote."""
    chosen = folder if (folder / MODEL).is_file() or (folder / MANIFEST).is_file() else newest(folder / "checkpoints")
    if chosen is None:
        raise UserError(f"no checkpoint in {folder}: give the folder of a run that has saved one, or of a checkpoint")
    if chosen == folder and not (folder / "state.json").is_file():  # a model saved by itself, its tokenizer beside it
        return Decoder.load(folder, device), load_tokenizer(folder)
    verify(chosen)
    model = Decoder(ModelConfig.from_dict(json.loads((chosen / "config.json").read_text(encoding="utf-8"))))
    fill_model(Archive(chosen, "model"), model, whole=True)
    return model.to(device), load_tokenizer(chosen.parent.parent)


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


def damage(folder: Path, share: slice = slice(None)) -> str | None:
    """What is wrong with a checkpoint, or None; of its files, only a share may be looked at."""
    try:
        raw = (folder / MANIFEST).read_bytes()
        manifest = json.loads(raw)
        hashes = manifest["sha256"]
        sealed = raw == _seal({"step": manifest["step"], "sha256": hashes})
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is missing or unreadable"
    if not sealed:
        return f"{MANIFEST} is not what was written"
    for name, expected in list(hashes.items())[share]:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                return f"{name} is not what was written ({path.stat().st_size} bytes, its hash differs)"
    return None


def verify(folder: Path, ranks: Ranks | None = None) -> None:
    """Every byte is checked before one is used; several ranks divide the files among them and agree."""
    ranks = ranks or Ranks()
    found = ranks.collect(damage(folder, slice(ranks.rank, None, ranks.world)))
    problem = next(filter(None, found), None)
    if problem:
        advice = "Start again in another --out"
        if good(folder.parent):
            advice = f"To go on from there, delete the damaged folder (rm -r {folder}) and pass --resume"
        raise UserError(f"the checkpoint {folder} is damaged: {problem}. {last_good(folder.parent)} {advice}")


def sweep(root: Path) -> None:
    """Remove what a killed process left half written or half deleted."""
    for stale in root.glob(".tmp-*"):
        shutil.rmtree(stale)


def good(root: Path) -> Path | None:
    """The newest checkpoint that is whole."""
    return next((path for path in reversed(checkpoints(root)) if damage(path) is None), None)


def last_good(root: Path) -> str:
    return f"The last good checkpoint is {path}." if (path := good(root)) else "There is no good checkpoint."


def _encode(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _seal(manifest: dict[str, Any]) -> bytes:
    """The manifest with a hash of itself, so that it too can be told from a damaged one."""
    return _encode({**manifest, "seal": hashlib.sha256(_encode(manifest)).hexdigest()})


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
