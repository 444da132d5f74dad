"""Many processes as one run: who holds what, and how numbers and tensors travel between them.

Started by torchrun, the ranks form a grid (pipeline, replicate, shard, tensor). A row of `pipeline` ranks divides the
depth; `tensor` ranks divide each window's tokens, and inside attention and MLP the channels; `shard` ranks divide each
parameter (FSDP2) and `replicate` copies do not, both see other windows of the batch. A single process is the grid of
one, whose methods do nothing, so that the training loop is written once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headwater._torch import norms_of
from headwater.errors import UserError, spell
from headwater.runs.settings import ParallelSettings
from headwater.train.distributed import rendezvous as attempts
from headwater.train.distributed.parts import copies, counted_elsewhere, local

DIFFERENCES = 20  # of which a message tells
GRID = ("pipeline", "replicate", "shard", "tensor")
TOKENS = ("pipeline", "replicate", "tokens")  # the same ranks, with shard and tensor as one axis


class Ranks:
    """This process among the others. Built without arguments, it is alone. `tokens`: the grid with the axes TOKENS."""

    def __init__(self, mesh: DeviceMesh | None = None, tokens: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.tokens_mesh = tokens
        self.rank = 0 if mesh is None else dist.get_rank()
        self.world = 1 if mesh is None else dist.get_world_size()
        place: Sequence[int] = (0, 0, 0, 0)
        grid: Sequence[int] = (1, 1, 1, 1)
        if mesh is not None:
            place, grid = cast(list[int], mesh.get_coordinate()), mesh.shape
        self.pipeline_rank, replica, part, self.tensor_rank = place
        _, self.replicas, self.shards, self.tensor = grid
        # Ranks that see other windows of the batch
        self.data_rank = replica * self.shards + part
        self.data_world = self.replicas * self.shards
        # Ranks of one stage, each with tokens of its own
        self.token_world = self.data_world * self.tensor

    @property
    def alone(self) -> bool:
        return self.mesh is None

    @property
    def first_of_stage(self) -> bool:
        """Tell whether this is the first of the ranks that hold the same depth."""
        return self.data_rank == 0 and self.tensor_rank == 0

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, value: float) -> float:
        """Over all ranks, in double precision; every rank gets the same bits."""
        return self.sums([value])[0]

    def sums(self, values: list[float]) -> list[float]:
        if self.alone:
            return values
        # On the host: the numbers are few, and the GPU is not waited for.
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def max(self, value: int) -> int:
        if self.alone:
            return value
        top = torch.tensor(value)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        return int(top)

    def barrier(self) -> None:
        """Wait for all ranks, on the host: a barrier of NCCL would wait for the GPU's queue as well."""
        self.max(0)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather a value of every rank, in the order of ranks."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """The value of the main rank: two ranks may see different things in one folder of a network file system."""
        return self.all_gather_object(value)[0]

    def on_main(self, action: Callable[[], Any]) -> Any:
        """Run an action on the main rank alone. All ranks get its value, or raise its UserError."""
        value, problem = None, ""
        if self.main:
            try:
                value = action()
            except UserError as error:
                problem = str(error)
        value, problem = self.broadcast_object((value, problem))
        if problem:
            raise UserError(problem)
        return value

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main rank goes through the body alone; the others follow and find its work done."""
        if not self.main:
            self.barrier()
        yield
        if self.main:
            self.barrier()

    def own_tokens(self, windows: Tensor) -> Tensor:
        """Cut from windows (B, T + 1) the tokens that this rank embeds and, one later, is scored on."""
        share = (windows.shape[1] - 1) // self.tensor
        return windows[:, self.tensor_rank * share : (self.tensor_rank + 1) * share + 1]

    def gradient_norm(self, model: nn.Module) -> float:
        """Over the whole model, the same bits on every rank."""
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if self.alone:
            return torch.nn.utils.get_total_norm(list(gradients.values())).item()
        parts, counts = [], []
        for name, gradient in gradients.items():
            part = local(gradient)
            # A rank may hold nothing of a small gradient, and another rank accounts for what is shared.
            if part.numel() and name not in counted_elsewhere(model):
                parts.append(part)
                counts.append(copies(gradient)[0])
        square = 0.0
        if parts:
            norms = torch.stack(norms_of(parts)).double().cpu()  # the only wait for the GPU
            square = (norms.square() / torch.tensor(counts)).sum().item()
        return self.sum(square) ** 0.5


@contextmanager
def gathered(settings: ParallelSettings, device: torch.device) -> Iterator[Ranks]:
    """The ranks for the length of a run; connections that were made for it end with it."""
    # Whoever has connected the processes before keeps the connection.
    already = dist.is_initialized()
    ranks = join(settings, device)
    try:
        yield ranks
    finally:
        if not ranks.alone and not already:
            dist.destroy_process_group()


def join(settings: ParallelSettings, device: torch.device, *, alone: bool = True) -> Ranks:
    """Join the grid that torchrun's environment and the settings describe.

    One process is `alone`, unless a grid of one is asked for, to see what the wrapping costs by itself.
    """
    # torchrun says how many processes there are.
    world = int(os.environ.get("WORLD_SIZE", "1"))
    data = data_ranks(settings, world)
    if world == 1 and alone:
        return Ranks()
    shards = shards_of(settings, data)
    if not dist.is_initialized():
        connect("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    # Ranks that disagree on the grid would wait for one another for ever.
    refuse_unequal({f"parallel.{name}": value for name, value in asdict(settings).items()})
    outer, inner = (settings.pipeline, data // shards), (shards, settings.tensor)
    # Neighbours in the numbering share a window: they exchange most.
    mesh = init_device_mesh(device.type, (*outer, *inner), mesh_dim_names=GRID)
    if settings.tensor == 1:
        return Ranks(mesh)
    return Ranks(
        mesh, init_device_mesh(device.type, (*outer, math.prod(inner)), mesh_dim_names=TOKENS)
    )


def refuse_unequal(values: dict[str, Any]) -> None:
    """Compare what every rank was started with.

    Raises: `UserError` on every rank, naming what differs; a mixture would train without a sign of it.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    first = everyone[0]
    lines = []
    for rank, others in enumerate(everyone):
        for key in sorted(others.keys() | first.keys()):
            here, there = first.get(key), others.get(key)
            if here != there:
                lines.append(f"{key}: {here!r} on rank 0, {there!r} on rank {rank}")
    if lines:
        listing = "\n  ".join(lines[:DIFFERENCES])
        raise UserError(
            f"the ranks do not run the same:\n  {listing}\nStart all of them with the same settings, text, headwater "
            "and torch"
        )


def data_ranks(settings: ParallelSettings, world: int) -> int:
    """Ranks that see other windows: those that are neither in a row of the pipeline nor share a window."""
    row = settings.pipeline * settings.tensor
    if world % row:
        alone = f"{spell('parallel.pipeline')} 1 {spell('parallel.tensor')} 1"
        raise UserError(
            f"parallel.pipeline ({settings.pipeline}) times parallel.tensor ({settings.tensor}) must divide the number "
            f"of processes, {world}. Start them with: torchrun --nproc-per-node {row} -m headwater.cli train ... "
            f"A run resumed by one process needs {alone}"
        )
    return world // row


def shards_of(settings: ParallelSettings, data: int) -> int:
    """Ranks that divide each parameter, among the `data` that share the batch in each stage."""
    shards = settings.shard or data
    if data % shards:
        raise UserError(
            f"parallel.shard ({shards}) must divide the {data} ranks that share the batch in each stage"
        )
    return shards


def connect(backend: str) -> None:
    """Begin torch.distributed, in a corner of the store that no earlier attempt has used.

    Ranks wait for days: the main one may tokenise for hours. A step that hangs is ended by the watchdog.
    """
    # torchrun's store outlives the workers; a corner of it is this attempt's.
    store, rank, world = next(dist.rendezvous("env://"))
    store = attempts.rendezvous(store, rank, world)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(days=7)
    )
