"""Checkpoint folders without loading them: files of weights are linked, what a conversion adds is one small file more.

Links have names of their own (`plain-...`), so that nothing which saves into the folder later names a file that the
plain folder shares; a test holds that it stays as it was.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwater.errors import UserError
from headwater.folders import HASHES, read_hashes, write_hashes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADDED = "headwater.safetensors"
LINKED = "plain-"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json", "*.gguf")
ABOUT = (
    "report.html",
    "matrix.html",
    "eval.json",
)  # written by headwater about the model beside it, and no other
NOT_COPIED = (*WEIGHTS, *ABOUT, HASHES, "config.json")


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name. Empty: the folder has no safetensors files that are listed."""
    index = folder / INDEX
    try:
        if (folder / SINGLE).is_file():  # as transformers does, whatever an index beside it says
            with safe_open(folder / SINGLE, "pt") as file:
                return dict.fromkeys(file.keys(), SINGLE)
        if index.is_file():
            listed = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            for name in listed.values():
                if Path(name).name != name:  # a file elsewhere would be linked, or written over
                    raise UserError(f"{index} lists {name!r}, which is not a file of this folder")
            lacking = sorted({name for name in listed.values() if not (folder / name).is_file()})
            if lacking:
                raise UserError(f"{index} lists files that are not there: {', '.join(lacking[:3])}")
            return listed
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: its weights cannot be listed: {error}") from None
    return {}


def size_of(folder: Path) -> int:
    """Bytes of its weights."""
    return sum((folder / name).stat().st_size for name in set(weight_map(folder).values()))


def link_weights(source: Path, out: Path, added: Mapping[str, Tensor]) -> None:
    """The weights of `source` and those of a conversion, as a checkpoint in `out`."""
    listed = weight_map(source)
    names = {
        name: name if name.startswith(LINKED) else LINKED + name
        for name in sorted(set(listed.values()))
    }
    link_files(source, out, names)
    save_file(
        {name: tensor.contiguous() for name, tensor in added.items()},
        out / ADDED,
        metadata={"format": "pt"},
    )
    write_index(
        out, {name: names[file] for name, file in listed.items()} | dict.fromkeys(added, ADDED)
    )


def unlink_weights(source: Path, out: Path, prefix: str | tuple[()]) -> None:
    """The weights of `source` without tensors whose name begins with `prefix`, or () for all of them. Files that need
    no change are linked; the others are written again, one after the other."""
    listed = weight_map(source)
    mixed = {file for name, file in listed.items() if name.startswith(prefix)}
    kept = {name: file for name, file in listed.items() if not name.startswith(prefix)}
    names = {
        file: file if file in mixed or file.startswith(LINKED) else LINKED + file
        for file in set(kept.values())
    }
    link_files(source, out, {file: name for file, name in names.items() if file not in mixed})
    for file in sorted(mixed & names.keys()):
        tensors = {
            key: value
            for key, value in load_file(source / file).items()
            if not key.startswith(prefix)
        }
        save_file(tensors, out / names[file], metadata={"format": "pt"})
    if set(names.values()) != {SINGLE}:
        write_index(out, {name: names[file] for name, file in kept.items()})


def write_index(out: Path, listed: Mapping[str, str]) -> None:
    total = sum((out / name).stat().st_size for name in set(listed.values()))
    text = json.dumps(
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(listed.items()))}, indent=1
    )
    (out / INDEX).write_text(text + "\n", encoding="utf-8")


def link_files(source: Path, out: Path, names: Mapping[str, str]) -> None:
    """Link files of a folder under other names, or copy them where two file systems share none. Hashes go along."""
    hashes = read_hashes(source)
    for file, name in sorted(names.items()):
        try:
            os.link((source / file).resolve(), out / name)
        except OSError:
            shutil.copy2(source / file, out / name)
    write_hashes(out, {name: hashes[file] for file, name in names.items() if file in hashes})


def copy_companions(source: Path, out: Path) -> None:
    """All files besides weights, config and what is about that model alone: tokenizer, processor, chat template."""
    for path in sorted(source.iterdir()):
        if (
            path.is_file()
            and not path.name.startswith(".")
            and not any(path.match(pattern) for pattern in NOT_COPIED)
        ):
            shutil.copy2(path, out / path.name)
