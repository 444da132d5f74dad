"""Checkpoint folders without loading them: files of weights are linked under names of their own.

So nothing that saves into the new folder later names a file that the plain folder shares.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from headwater.errors import UserError
from headwater.folders import HASHES, read_hashes, write_hashes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADDED = "headwater.safetensors"
LINKED = "plain-"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json", "*.gguf")
# Written by headwater about the model beside it, and no other
ABOUT = ("report.html", "eval.json")
NOT_COPIED = (*WEIGHTS, *ABOUT, HASHES, "config.json", ".*")


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name. Empty: the folder has no safetensors files that are listed."""
    index = folder / INDEX
    try:
        if (folder / SINGLE).is_file():  # as transformers does, whatever an index beside it says
            with safe_open(folder / SINGLE, "pt") as file:
                return dict.fromkeys(file.keys(), SINGLE)
        if index.is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            # An index leads to no other folder: files there would be linked, or written over.
            listed = {name: Path(file).name for name, file in files.items()}
            size_of(folder, listed.values())  # the system names a file that is missing
            return listed
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: its weights cannot be listed: {error}") from None
    return {}


def size_of(folder: Path, files: Iterable[str] | None = None) -> int:
    """Bytes of some files of a folder; by default of those with its weights."""
    names = weight_map(folder).values() if files is None else files
    return sum((folder / name).stat().st_size for name in {*names})


def link_weights(source: Path, out: Path, added: Iterable[str] = (), removed: str = "") -> None:
    """Link the weights of `source` in the folder `out`.

    Arguments:
        added: names of the tensors in a file ADDED, which is in `out` already.
        removed: a prefix. Tensors whose names begin with it are left out: files that hold one are
            written again, one after the other. Empty: none are left out.
    """
    files: dict[str, str] = {}
    rewritten: set[str] = set()
    for name, file in weight_map(source).items():
        if removed and name.startswith(removed):
            rewritten.add(file)
        else:
            files[name] = file
    # Names of their own: what saves into the folder later writes over no linked file.
    names = {file: LINKED + file.removeprefix(LINKED) for file in {*files.values()} - rewritten}
    _link_files(source, out, names)
    # Files with tensors that go are written again without them.
    for file in sorted(rewritten & {*files.values()}):
        tensors = load_file(source / file)
        rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(removed)}
        save_file(rest, out / file, metadata={"format": "pt"})
    listed = {name: names.get(file, file) for name, file in files.items()}
    listed |= dict.fromkeys(added, ADDED)
    if {*listed.values()} != {SINGLE}:
        _write_index(out, listed)


def _write_index(out: Path, files: Mapping[str, str]) -> None:
    total = {"total_size": size_of(out, files.values())}
    index = {"metadata": total, "weight_map": dict(sorted(files.items()))}
    (out / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _link_files(source: Path, out: Path, names: Mapping[str, str]) -> None:
    """Link files under other names, or copy them where two file systems share none. Hashes go along."""
    # A linked file keeps the hash that it was written with.
    hashes = read_hashes(source)
    for file, name in sorted(names.items()):
        # A link costs no space and no time.
        try:
            os.link((source / file).resolve(), out / name)
        except OSError:
            shutil.copy2(source / file, out / name)
    write_hashes(out, {name: hashes[file] for file, name in names.items() if file in hashes})


def copy_companions(source: Path, out: Path) -> None:
    """Copy all besides weights, config and what is about that model alone: tokenizer, chat template."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in NOT_COPIED):
            shutil.copy2(path, out / path.name)
