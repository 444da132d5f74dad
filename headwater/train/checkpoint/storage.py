"""Tensors in a checkpoint, through torch.distributed.checkpoint (DCP): safetensors files and a JSON index.

DCP's planners decide which rank writes which piece of which tensor, so that copies are written once, and which pieces
make up what a rank of any other layout needs. This file is the storage under them. DCP's own keeps its metadata as a
pickle, which runs code when it is opened; here it is index.json. Alone, a process writes model.safetensors and
optimizer.safetensors, which anything that knows safetensors reads; several ranks write one pair each.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from headwater.folders import write_file
from headwater.runs.files import read_json

INDEX = "index.json"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Tensors = Mapping[str, Tensor]  # by "model/parameter" and "optimizer/kind/parameter/slot"
Hashes = dict[str, str]  # sha256 by file

warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)


@dataclasses.dataclass(frozen=True)
class Piece:
    """The file that one piece of a tensor went to."""

    file: str
    sha256: str


class Planner(DefaultSavePlanner):
    """Plans for `tensors` by shape and placement; their data are `values`, this rank's part or an earlier copy of it.

    It brings the tensors itself: DCP spends milliseconds on every hundred entries of a state dict that it is given. And
    it may serve many saves: plans are made anew only for tensors that have changed in more than their data.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.layout: dict[str, Any] = {}
        self.own: SavePlan | None = None
        self.of_all: tuple[list[SavePlan], tuple[list[SavePlan], Metadata]] | None = None

    def bring(self, tensors: Tensors, values: Tensors) -> None:
        self.tensors, self.values = tensors, values
        # A plan depends on names, shapes, types and division, not on data.
        layout = {name: _division(tensor) for name, tensor in tensors.items()}
        if layout != self.layout:
            self.layout, self.own, self.of_all = layout, None, None

    def release_tensors(self) -> None:
        """Plans outlive a save, tensors do not."""
        self.tensors, self.values, self.state_dict = {}, {}, {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(dict(self.tensors), storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """A rank that holds no rows of a small tensor has nothing to write."""
        # A plan of an earlier save serves as long as the layout does.
        if self.own is None:
            plan = super().create_local_plan()
            items = []
            for item in plan.items:
                if item.tensor_data and item.tensor_data.chunk.sizes.numel():
                    items.append(item)
            self.own = dataclasses.replace(plan, items=items)
        return self.own

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # The main rank's plan for all ranks, with what they asked for.
        if self.of_all is None or self.of_all[0] != all_plans:
            self.of_all = all_plans, super().create_global_plan(all_plans)
        return self.of_all[1]

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.values[index.fqn]


def _division(tensor: Tensor) -> tuple[Any, ...]:
    among = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else ()
    return tensor.shape, tensor.dtype, *among


class Targets(DefaultLoadPlanner):
    """Plans for tensors that it brings itself: DCP wants equal keys on all ranks, and those of a pipeline differ."""

    def __init__(self, targets: Tensors) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.targets = targets

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(dict(self.targets), metadata, is_coordinator)


class Writer(dcp.StorageWriter):
    """Every rank writes its files into `scratch`; the main one makes it before them, and commits it after them."""

    def __init__(
        self,
        scratch: Path,
        suffix: str,
        prepare: Callable[[], None],
        commit: Callable[[dict[str, Any], Hashes], None],
    ) -> None:
        self.scratch, self.suffix, self.prepare, self.commit = scratch, suffix, prepare, commit

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.prepare()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        # One file of the model's tensors, and one of the optimizer's.
        for kind, items in groupby(plan.items, key=lambda item: item.index.fqn.partition("/")[0]):
            file = f"{kind}{self.suffix}.safetensors"
            sizes, tensors = {}, {}
            for item in items:
                sizes[item.index] = item.tensor_storage_size() or 0
                name = item.index.fqn.partition("/")[2]
                tensors[name] = cast(Tensor, planner.resolve_data(item))
            piece = Piece(file, write_file(self.scratch / file, encode(tensors)))
            results += [WriteResult(index, size, piece) for index, size in sizes.items()]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # What all ranks have written, by tensor and corner.
        pieces: dict[MetadataIndex, Piece] = {}
        for rank in results:
            pieces |= {result.index: result.storage_data for result in rank}
        hashes = {piece.file: piece.sha256 for piece in pieces.values()}
        self.commit(to_json(metadata, pieces), hashes)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(dcp.StorageReader):
    """The tensors of a checkpoint; its bytes must have been verified."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = from_json(read_json(folder / INDEX))
        self.opened: dict[str, Any] = {}

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of a kind, by name."""
        shapes = {}
        for name, entry in self.metadata.state_dict_metadata.items():
            if name.startswith(f"{kind}/"):
                size = cast(TensorStorageMetadata, entry).size
                shapes[name.removeprefix(f"{kind}/")] = tuple(size)
        return shapes

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any
    ) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            file = self.metadata.storage_data[item.storage_index]
            name = item.storage_index.fqn.partition("/")[2]
            # The part of this file that this rank needs, into the place where it goes.
            target = planner.resolve_tensor(item)
            target.copy_(self._read(file, name, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, file: str, name: str, corner: Iterable[int], shape: Iterable[int]) -> Tensor:
        # A file is opened once, and mapped rather than read.
        if file not in self.opened:
            self.opened[file] = safe_open(self.folder / file, "pt")
        tensors = self.opened[file]
        part = tuple(slice(first, first + length) for first, length in zip(corner, shape))
        # A tensor without axes has no slices.
        return tensors.get_slice(name)[part] if part else tensors.get_tensor(name)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def to_json(metadata: Metadata, pieces: Mapping[MetadataIndex, Piece]) -> dict[str, Any]:
    """DCP's metadata: type and shape of each tensor, and the file, corner and shape of each of its pieces."""
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), name
        places = []
        for chunk in entry.chunks:
            file = pieces[MetadataIndex(name, chunk.offsets)].file
            places.append([file, list(chunk.offsets), list(chunk.sizes)])
        tensors[name] = {
            "dtype": DTYPES[entry.properties.dtype],
            "shape": list(entry.size),
            "pieces": places,
        }
    return {"tensors": tensors}


def from_json(index: dict[str, Any]) -> Metadata:
    """Read what `to_json` wrote."""
    dtypes = {text: dtype for dtype, text in DTYPES.items()}
    # DCP looks pieces up by name and corner.
    entries, files = {}, {}
    for name, entry in index["tensors"].items():
        chunks = []
        for file, corner, shape in entry["pieces"]:
            chunks.append(ChunkStorageMetadata(torch.Size(corner), torch.Size(shape)))
            files[MetadataIndex(name, corner)] = file
        properties = TensorProperties(dtype=dtypes[entry["dtype"]])
        size = torch.Size(entry["shape"])
        entries[name] = TensorStorageMetadata(properties=properties, size=size, chunks=chunks)
    return Metadata(cast(Any, entries), storage_data=files)


def write(
    tensors: Tensors,
    values: Tensors,
    writer: Writer,
    planner: Planner,
    *,
    alone: bool,
    group: Any = None,
) -> None:
    """Save on all ranks of the group together; an error on one of them is raised on all."""
    planner.bring(tensors, values)
    try:
        with unwrapped():
            dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
    finally:
        planner.release_tensors()


def read(reader: Reader, targets: Tensors, *, alone: bool) -> None:
    """Fill tensors that are divided in any way."""
    with unwrapped():
        dcp.load({}, storage_reader=reader, planner=Targets(targets), no_dist=alone)


@contextmanager
def unwrapped() -> Iterator[None]:
    """DCP collects the errors of all ranks in one that derives from BaseException; the first of them says enough."""
    try:
        yield
    except dcp.CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise first from None


def in_file_order(tensors: Tensors) -> list[tuple[str, Tensor]]:
    """Wide types come first, which keeps every tensor of a file aligned."""

    def place(entry: tuple[str, Tensor]) -> tuple[int, str]:
        name, tensor = entry
        return -tensor.dtype.itemsize, name

    return sorted(tensors.items(), key=place)


def encode(tensors: Tensors) -> Iterator[bytes | memoryview]:
    """A safetensors file piece by piece, so that no second copy of the model is made."""
    ordered = dict(in_file_order(tensors))
    # The header says where each tensor's bytes lie, and is filled up to a multiple of eight.
    header, end = {}, 0
    for name, tensor in ordered.items():
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # safetensors wants data to begin at a multiple of eight.
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    yield from neighbours_joined(ordered.values())


def neighbours_joined(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of tensors in a row; of those that follow one another in one piece of host memory, as one."""
    # One write for neighbours in memory: thousands of small ones take the interpreter.
    region: Tensor | None = None
    for tensor in tensors:
        if region is not None:
            if tensor.is_cpu and tensor.is_contiguous() and follows(tensor, region):
                region = region.as_strided((len(region) + tensor.nbytes,), (1,))
                continue
            yield region.numpy().data
            region = None  # before another copy is made
        # Bytes of the tensor, copied only if it is not on the host or not in one piece.
        region = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    if region is not None:
        yield region.numpy().data


def follows(tensor: Tensor, region: Tensor) -> bool:
    """Tell whether a tensor's bytes begin where a region of the same memory ends."""
    together = tensor.untyped_storage().data_ptr() == region.untyped_storage().data_ptr()
    first_byte = tensor.storage_offset() * tensor.itemsize
    return together and first_byte == region.storage_offset() + len(region)
