"""Tensors in a checkpoint: which rank writes which rows, and how any other layout reads them back.

Alone, a process writes model.safetensors and optimizer.safetensors. Several ranks write one pair of files each, with
the rows they hold under the names of the whole model, and index.json says where the rows of each tensor lie. Reading
asks for rows by name, so that the number of ranks and the cuts may differ between saving and loading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headwater.errors import UserError
from headwater.train.parallel import Ranks, counted_elsewhere, local, rows

INDEX = "index.json"
KINDS = ("model", "optimizer")
Optimizers = Mapping[str, torch.optim.Optimizer]
Index = dict[str, dict[str, dict[str, Any]]]  # kind, tensor, {"shape", "pieces": [[file, first row, last row], ...]}


def shards(model: nn.Module, optimizers: Optimizers, ranks: Ranks) -> tuple[dict[str, dict[str, Tensor]], Index]:
    """The files this rank writes, and its part of the index."""
    tensors: dict[str, Mapping[str, Tensor]]
    tensors = {"model": dict(model.named_parameters()), "optimizer": optimizer_tensors(model, optimizers)}
    if ranks.alone:
        return {f"{kind}.safetensors": _plain(tensors[kind]) for kind in KINDS}, {}
    files: dict[str, dict[str, Tensor]] = {}
    index: Index = {kind: {} for kind in KINDS}
    for kind in KINDS:
        file = f"{kind}-{ranks.rank:05d}.safetensors"
        own = {name: value for name, value in tensors[kind].items() if _is_written(name, value, model, ranks)}
        for name, value in own.items():
            first, last = rows(value) if isinstance(value, DTensor) else (0, value.shape[0] if value.ndim else 0)
            index[kind][name] = {"shape": list(value.shape), "pieces": [[file, first, last]]}
        if own:
            files[file] = _plain(own)
    return files, index


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: local(value.detach()).contiguous() for name, value in tensors.items()}


def _is_written(name: str, value: Tensor, model: nn.Module, ranks: Ranks) -> bool:
    """Of copies, one is written; a rank that holds no rows of a small tensor has nothing to write."""
    if any(shared in name for shared in counted_elsewhere(model)):
        return False
    if isinstance(value, DTensor):
        return ranks.writes and value.to_local().numel() > 0
    return ranks.data_rank == 0


def merge_indices(indices: list[Index]) -> Index:
    """One index of all ranks, pieces in the order of rows; empty where a process was alone."""
    merged: Index = {}
    for index in indices:
        for kind, entries in index.items():
            for name, entry in entries.items():
                known = merged.setdefault(kind, {}).setdefault(name, {"shape": entry["shape"], "pieces": []})
                known["pieces"] = sorted([*known["pieces"], *entry["pieces"]], key=lambda piece: piece[1])
    return merged


class Archive:
    """The tensors of one kind in a checkpoint, by name and rows."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        if (folder / INDEX).exists():
            self.entries = json.loads((folder / INDEX).read_text(encoding="utf-8")).get(kind, {})
            return
        file = f"{kind}.safetensors"
        opened = self._open(file)
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        self.entries = {
            name: {"shape": shape, "pieces": [[file, 0, shape[0] if shape else 0]]} for name, shape in shapes.items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name]["shape"])

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows [first, last) of a tensor; a scalar has none and is read as it is."""
        pieces = self.entries[name]["pieces"]
        if not self.shape(name):
            return self._open(pieces[0][0]).get_tensor(name)
        last = self.shape(name)[0] if last is None else last
        wanted = [
            self._open(file).get_slice(name)[max(first, start) - start : min(last, stop) - start]
            for file, start, stop in pieces
            if start < last and first < stop
        ]
        found = torch.cat(wanted) if wanted else torch.empty(0, *self.shape(name)[1:])
        if len(found) != last - first:
            raise ValueError(f"the checkpoint {self.folder} holds {len(found)} of the rows {first} to {last} of {name}")
        return found

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, "pt")
        except SafetensorError as error:
            raise UserError(f"{self.folder / file} is not a safetensors file ({error}): it is not read") from None


def fill_model(archive: Archive, model: nn.Module, *, whole: bool) -> None:
    """Each parameter from its rows. `whole`: the model has all names, so one that it lacks is an error too."""
    mine = dict(model.named_parameters())
    missing = sorted(mine.keys() - archive.entries.keys())
    surplus = sorted(archive.entries.keys() - mine.keys()) if whole else []
    if missing or surplus:
        raise ValueError(f"weights do not fit the model: missing {missing[:5]}, not expected {surplus[:5]}")
    for name, parameter in mine.items():
        if tuple(parameter.shape) != archive.shape(name):
            raise ValueError(f"{name} is {tuple(parameter.shape)} in the model and {archive.shape(name)} in the file")
        _fill(archive, name, parameter.data)


def _fill(archive: Archive, name: str, value: Tensor) -> None:
    first, last = rows(value) if isinstance(value, DTensor) else (0, None)
    local(value).copy_(archive.read(name, first, last))


def optimizer_tensors(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """Every slot of every parameter under "optimizer/parameter/slot"; learning rates come from the schedule instead."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{kind}/{names[id(parameter)]}/{slot}": value
        for kind, optimizer in optimizers.items()
        for parameter, slots in optimizer.state.items()
        for slot, value in slots.items()
    }


def fill_optimizers(archive: Archive, model: nn.Module, optimizers: Optimizers) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    slots: dict[str, list[str]] = {}
    for key in archive.entries:
        kind, name, slot = key.split("/")
        slots.setdefault(f"{kind}/{name}", []).append(slot)
    for kind, optimizer in optimizers.items():
        state = {}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for i, parameter in enumerate(parameters):
            prefix = f"{kind}/{names[id(parameter)]}"
            found = {slot: _slot(archive, f"{prefix}/{slot}", parameter) for slot in slots.get(prefix, [])}
            if found:
                state[i] = found
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _slot(archive: Archive, name: str, parameter: Tensor) -> Tensor:
    """A slot as large as its parameter is divided like it; a counter is read whole."""
    if archive.shape(name) != tuple(parameter.shape):
        return archive.read(name)
    value = torch.empty_like(parameter, requires_grad=False)
    _fill(archive, name, value)
    return value
