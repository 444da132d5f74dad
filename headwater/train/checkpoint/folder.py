"""Checkpoints that are whole or absent: a folder per step, written under another name, synced, then renamed into place.

`manifest.json` holds the sha256 of every file and of itself. Loading checks them all and never falls back in silence: a
damaged checkpoint is an error that names the file and the newest good one. Tensors are safetensors, the rest is JSON;
nothing is pickled.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

from torch import nn

from headwater.errors import UserError, spell, user_values
from headwater.folders import hash_file, sync
from headwater.models import Decoder, ModelConfig
from headwater.runs.files import read_json
from headwater.train.checkpoint import storage as shards
from headwater.train.checkpoint.contents import Optimizers, fill, fill_model
from headwater.train.checkpoint.storage import Hashes, Tensors
from headwater.train.data.tokenizer import FILE as TOKENIZER
from headwater.train.data.tokenizer import Tokenizer, hash_of, load_tokenizer
from headwater.train.differences import differences
from headwater.train.distributed.parts import local
from headwater.train.distributed.ranks import Ranks
from headwater.train.files import encode_json, seal, unseal

STEP_FOLDER = re.compile(r"step-(\d+)")
MANIFEST = "manifest.json"
MODEL = "model.safetensors"
CONFIG, STATE = "config.json", "state.json"


def save(
    root: Path,
    step: int,
    tensors: Tensors,
    state: dict[str, Any],
    *,
    config: ModelConfig,
    keep: int,
    ranks: Ranks | None = None,
    values: Tensors | None = None,
    group: Any = None,
    planner: shards.Planner | None = None,
    before: Callable[[], None] = lambda: None,
) -> Path:
    """Write `root/step-N`, then drop all but the newest `keep`. A failed write leaves what was there as it was.

    Several ranks write side by side into the same scratch folder; the main one renames it when all have succeeded.
    `values` are copies of the tensors' local data, taken earlier; `group` connects the ranks if they save beside their
    work; `planner` is one that has served earlier saves; `before` is what must be on the disk before the checkpoint is.
    """
    ranks = ranks or Ranks()
    final = place(root, step)
    scratch = root / f".tmp-{final.name}"

    def prepare() -> None:
        before()
        sweep(root)
        scratch.mkdir(parents=True)

    def commit(index: dict[str, Any], hashes: Hashes) -> None:
        texts = {shards.INDEX: index, CONFIG: config.to_dict(), STATE: {"step": step, **state}}
        _commit(scratch, final, step, texts, hashes)
        for old in checkpoints(root)[:-keep]:
            _remove(old)

    # Alone, a process writes files without a number.
    writer = shards.Writer(scratch, "" if ranks.alone else f"-{ranks.rank:05d}", prepare, commit)
    values = values or {name: local(tensor) for name, tensor in tensors.items()}
    try:
        shards.write(
            tensors, values, writer, planner or shards.Planner(), alone=ranks.alone, group=group
        )
    # What was there before is untouched: the old checkpoint goes after the new one has its name.
    except OSError as error:
        if ranks.main:
            shutil.rmtree(scratch, ignore_errors=True)
        raise UserError(
            f"could not write the checkpoint {final}: {error.strerror or error}. {last_good(root)} "
            f"Make room (or pass a smaller {spell('train.keep')}), then go on with "
            f"{spell('resume')}"
        ) from None
    return final


def place(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint's name says; None for a folder of another name, such as a copy."""
    match = STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def _commit(scratch: Path, final: Path, step: int, texts: dict[str, Any], hashes: Hashes) -> None:
    """The manifest is written last and the rename follows it: a checkpoint has both, or it is none."""
    for name, text in texts.items():
        # The index may have thousands of entries.
        indent = None if name == shards.INDEX else 1
        content = encode_json(text, indent)
        hashes = {**hashes, name: shards.write_file(scratch / name, [content])}
    # With its seal, a manifest vouches for itself.
    shards.write_file(scratch / MANIFEST, [seal({"step": step, "sha256": hashes})])
    sync(scratch)
    _put_in_place(scratch, final)


def load(
    folder: Path, model: nn.Module, optimizers: Optimizers, ranks: Ranks | None = None
) -> dict[str, Any]:
    """Fill model and optimizers from a checkpoint that has passed `verify`, whatever the layout it was saved under;
    returns its state.json. Each rank reads what it holds."""
    alone = ranks is None or ranks.alone
    fill(shards.Reader(folder), model, optimizers, alone=alone)
    return read_state(folder)


def _instead(folder: Path) -> str:
    """Guess what a folder without a checkpoint was given for."""
    if (folder / "adapter_config.json").is_file():
        return "it holds an adapter of PEFT; load it on its model, and save what merge_and_unload() gives"
    # A study or a comparison holds runs; one of them may be meant.
    runs = [run for run in sorted(folder.glob("runs/*")) if newest(run / "checkpoints")]
    if runs:
        return f"it holds {len(runs)} runs; give one of them, such as {runs[0]}"
    ended = [folder / "summary.json", *folder.glob("runs/*/summary.json")]
    if any(path.is_file() for path in ended):
        return (
            "what has ended here has lost its weights, as the runs of a study do; with keep_weights = true in its "
            f"recipe, and another {spell('out')}, it keeps them"
        )
    return "give the folder of a run that has saved one, or of a checkpoint"


def load_model(folder: Path, device: str = "cpu") -> tuple[Decoder, Tokenizer]:
    """The model of a run (its newest checkpoint), of one checkpoint, or of a folder that `Decoder.save` wrote."""
    # A checkpoint, else a model that was saved by itself, else a run.
    if (folder / STATE).is_file() or (folder / MANIFEST).is_file():
        return _load_checkpoint(folder, device)
    if (folder / MODEL).is_file():
        with user_values():
            return Decoder.load(folder, device), load_tokenizer(folder)
    while chosen := newest(folder / "checkpoints"):
        try:
            return _load_checkpoint(chosen, device)
        except (UserError, OSError):
            # A run that is under way may have dropped this checkpoint meanwhile, for a newer one.
            if chosen.exists():
                raise
    raise UserError(f"no checkpoint in {folder}: {_instead(folder)}")


def _load_checkpoint(folder: Path, device: str) -> tuple[Decoder, Tokenizer]:
    verify(folder)
    state = read_state(folder)
    with user_values():  # a residual of a module that is not imported
        model = Decoder(ModelConfig.from_dict(read_json(folder / CONFIG)))
    fill_model(shards.Reader(folder), model)
    run = folder.parent.parent
    # The tokenizer lies in the run's folder, where a file may have been exchanged.
    tokenizer = load_tokenizer(run)
    if hash_of(tokenizer) != state["config"]["corpus"]["tokenizer_hash"]:
        raise UserError(
            f"{run / TOKENIZER} is not the tokenizer that {folder} was trained with, so its tokens would stand for "
            f"other text: restore the file, or go on with {spell('resume')}, which writes it again"
        )
    return model.to(device), tokenizer


def read_state(folder: Path) -> dict[str, Any]:
    return read_json(folder / STATE)


def refuse_other(folder: Path, asked: dict[str, Any]) -> None:
    """A run continues only under the configuration, and on the tokens, that it began with."""
    differing = differences(read_state(folder)["config"], asked)
    if not differing:
        return
    listing = "\n  ".join(differing)
    other, cure = "belongs to another configuration", "Resume with the settings it was made with"
    # A file may have changed under its name, or lie under another name, by which it is held out or not.
    if all(line.startswith(("corpus.", "data.source:")) for line in differing):
        other = "was trained on other text"
        cure = f"Name with {spell('data.source')} the text that it began with, in files of the same names"
    anew = f"start a new run in another {spell('out')}"
    weights = f"with its weights by {spell('train.init_from')} {quote(str(folder))}"
    raise UserError(f"the checkpoint {folder} {other}:\n  {listing}\n{cure}, or {anew}, {weights}")


def checkpoints(root: Path) -> list[Path]:
    """Committed checkpoints, by the number of their step."""
    steps = {}
    for path in root.glob("step-*"):
        step = step_of(path)
        if step is not None and path.is_dir():
            steps[path] = step
    return sorted(steps, key=steps.__getitem__)


def newest(root: Path) -> Path | None:
    """The checkpoint to resume from, once it has passed `verify`. A damaged one is never skipped in silence: the user
    decides what to lose."""
    return next(reversed(checkpoints(root)), None)


def damage(folder: Path, share: slice = slice(None)) -> str | None:
    """Say what is wrong with a checkpoint, or None. Of its files, only a share may be looked at."""
    try:
        manifest = unseal((folder / MANIFEST).read_bytes())
    except OSError:
        return f"{MANIFEST} is missing or unreadable"
    if manifest is None or not isinstance(manifest.get("sha256"), dict):
        return f"{MANIFEST} is not what was written"
    if step_of(folder) not in (None, manifest.get("step")):
        return f"{MANIFEST} is of step {manifest.get('step')}, and the folder is called otherwise"
    # Ranks divide these files among them.
    hashes: dict[str, str] = manifest["sha256"]
    for name, expected in list(hashes.items())[share]:
        try:
            intact = hash_file(folder / name) == expected
        except FileNotFoundError:
            return f"{name} is missing"
        if not intact:
            return f"{name} is not what was written (its hash differs)"
    return None


def verify(folder: Path, ranks: Ranks | None = None) -> None:
    """Every byte is checked before one is used; several ranks divide the files among them and agree."""
    ranks = ranks or Ranks()
    # Each rank hashes its share of the files.
    problems = ranks.all_gather_object(damage(folder, slice(ranks.rank, None, ranks.world)))
    problem = next(filter(None, problems), None)
    if not problem:
        return
    intact = ranks.broadcast_object(good(folder.parent) if ranks.main else None)
    advice = f"Start again in another {spell('out')}"
    if intact:
        remove = f"delete the damaged folder (rm -r {quote(str(folder))})"
        advice = f"To go on from there, {remove} and go on with {spell('resume')}"
    raise UserError(f"the checkpoint {folder} is damaged: {problem}. {_named(intact)} {advice}")


def sweep(root: Path) -> None:
    """Remove what a killed process left half written or half deleted."""
    for stale in root.glob(".tmp-*"):
        shutil.rmtree(stale)


def good(root: Path) -> Path | None:
    """The newest checkpoint that is whole."""
    # Newest first, since the newest good one is what can be gone on from.
    for path in reversed(checkpoints(root)):
        if damage(path) is None:
            return path
    return None


def last_good(root: Path) -> str:
    return _named(good(root))


def _named(path: Path | None) -> str:
    return f"The last good checkpoint is {path}." if path else "There is no good checkpoint."


def _put_in_place(scratch: Path, final: Path) -> None:
    if final.exists():  # a step taken again, after its damaged checkpoint was left behind
        _remove(final)
    scratch.rename(final)
    sync(final.parent)


def _remove(folder: Path) -> None:
    """Rename first: a deletion cut short must not look like a damaged checkpoint."""
    doomed = folder.with_name(f".tmp-old-{folder.name}")
    folder.rename(doomed)
    shutil.rmtree(doomed)
