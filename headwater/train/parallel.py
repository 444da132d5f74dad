"""Many processes as one run: who holds what, and how numbers and tensors travel between them.

Started by torchrun, the ranks form a grid (pipeline, replicate, shard). A row of `pipeline` ranks divides the depth;
`shard` ranks divide each parameter by rows (FSDP2); `replicate` copies see other windows of the batch. A single process
is the grid of one, whose methods do nothing, so that the training loop is written once.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headwater.errors import UserError
from headwater.models import Decoder
from headwater.models.decoder import Sublayer
from headwater.train.config import ParallelSettings

GRID = ("pipeline", "replicate", "shard")


class Ranks:
    """This process among the others. Built without arguments, it is alone."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.rank = 0 if mesh is None else dist.get_rank()
        self.world = 1 if mesh is None else dist.get_world_size()
        self.pipeline_rank, replica, part = (0, 0, 0) if mesh is None else cast(list[int], mesh.get_coordinate())
        self.pipeline_world, self.replicas, self.shards = (1, 1, 1) if mesh is None else mesh.shape
        self.data_rank, self.data_world = replica * self.shards + part, self.replicas * self.shards
        self.writes = replica == 0  # of equal copies, the first one is saved

    @property
    def alone(self) -> bool:
        return self.world == 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, value: float) -> float:
        """Over all ranks, in double precision; every rank gets the same bits."""
        return self.sums([value])[0]

    def sums(self, values: list[float]) -> list[float]:
        if self.alone:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def highest(self, value: int) -> int:
        if self.alone:
            return value
        top = torch.tensor(value)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        return int(top)

    def wait(self) -> None:
        if not self.alone:
            dist.barrier()

    def collect(self, value: Any) -> list[Any]:
        """What every rank has to say, in the order of ranks."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main rank goes through the body alone; the others follow and find its work done."""
        if not self.main:
            self.wait()
        yield
        if self.main:
            self.wait()

    def gradient_norm(self, model: nn.Module) -> float:
        """Over the whole model, the same bits on every rank."""
        if self.alone:
            return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
        skipped = counted_elsewhere(model)
        squares = [squared_norm(p.grad) for name, p in model.named_parameters() if name not in skipped]
        return (self.sum(sum(squares)) / self.replicas) ** 0.5


@contextmanager
def gathered(settings: ParallelSettings, device: torch.device) -> Iterator[Ranks]:
    """The ranks for the length of a run; connections that were made for it end with it."""
    already = dist.is_initialized()
    ranks = join(settings, device)
    try:
        yield ranks
    finally:
        if not ranks.alone and not already:
            dist.destroy_process_group()


def join(settings: ParallelSettings, device: torch.device) -> Ranks:
    """The grid that torchrun's environment and the settings describe; alone if there is one process only."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if settings.pipeline > world or world % settings.pipeline:
        raise UserError(
            f"parallel.pipeline is {settings.pipeline}, which must divide the number of processes, {world}. "
            f"Start them with: torchrun --nproc-per-node {settings.pipeline} -m headwater.cli train ..."
        )
    if world == 1:
        return Ranks()
    data = world // settings.pipeline
    shards = settings.shard or data
    if data % shards:
        raise UserError(f"parallel.shard ({shards}) must divide the {data} ranks that each stage of depth has")
    if not dist.is_initialized():
        connect("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", settings.hang_timeout * 2 or 10**6)
    return Ranks(init_device_mesh(device.type, (settings.pipeline, data // shards, shards), mesh_dim_names=GRID))


def connect(backend: str, seconds: int) -> None:
    """As torch.distributed does by itself, but for a fresh corner of the store for each restart: torchrun keeps its
    store alive, and in it the addresses of workers that have died."""
    store, rank, world = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds))


def shard(module: nn.Module, sublayers: Iterable[Sublayer], ranks: Ranks) -> None:
    """FSDP2 from outside: one group per attention or MLP, one for all that is left (norms, residual, embedding, head).

    The rest stays whole while a pass runs, since a residual may read its parameters at any depth. On a GPU the bodies
    travel and multiply in bf16; the rest keeps fp32, and gradients are summed in fp32.
    """
    assert ranks.mesh is not None
    mesh = ranks.mesh["shard"] if ranks.replicas == 1 else ranks.mesh["replicate", "shard"]
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = half if mesh.device_type == "cuda" else MixedPrecisionPolicy()
    # FSDP warns that a body returns a view, which an in-place operation would break; the decoder has none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for sublayer in sublayers:
        fully_shard(sublayer.body, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh)


def defer_reduction(module: nn.Module, deferred: bool) -> None:
    """Between micro-batches of one step gradients add up where they are; the last one sums them over the ranks."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(not deferred)


def clip(model: nn.Module, norm: float, limit: float) -> None:
    """Scale gradients of a known norm down to `limit`, as torch.nn.utils.clip_grad_norm_ does."""
    scale = (torch.tensor(limit) / (torch.tensor(norm) + 1e-6)).clamp(max=1.0).item()  # in fp32, as there
    torch._foreach_mul_([local(p.grad) for p in model.parameters() if p.grad is not None], scale)


def let_go(module: nn.Module) -> None:
    """After a pass without a backward, return to shards: FSDP2 keeps its outermost parameters whole for one."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def fill(model: nn.Module, source: Decoder | None) -> None:
    """Parameters and buffers of a sharded, so far empty model, from the whole one that the main rank holds."""
    targets: dict[str, list[Tensor]] = defaultdict(list)
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        targets[name].append(value)
    names: list[Any] = [None]
    if source is not None:
        whole = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        names = [[(name, tuple(value.shape), value.dtype) for name, value in whole.items()]]
    dist.broadcast_object_list(names, 0)
    for name, shape, dtype in names[0]:
        value = torch.empty(shape, dtype=dtype) if source is None else whole[name].detach().contiguous()
        dist.broadcast(value, 0)
        for target in targets[name]:
            local(target.data).copy_(rows_of(value, target))


def gather(model: nn.Module, like: Decoder, ranks: Ranks, *, gradients: bool = False) -> dict[str, Tensor]:
    """Whole fp32 parameters, or their gradients, on the CPU of the main rank, one after the other; nothing elsewhere.
    All ranks call it; `like` has the shapes."""
    mine = {name: p.grad if gradients else p.detach() for name, p in model.named_parameters()}
    skipped = counted_elsewhere(model)
    whole = {}
    for name, shape in ((name, p.shape) for name, p in like.named_parameters()):
        value, held = torch.zeros(shape), mine.get(name)
        if held is not None and ranks.writes and name not in skipped:
            rows_of(value, held).copy_(local(held))
        dist.reduce(value, 0)
        if ranks.main:
            whole[name] = value
    return whole


class Parts(nn.Module):
    """The pruned decoders of a pipeline rank as one model, under the parameter names of the whole.

    `shared`: parameters that another rank has too and accounts for, in norms and in checkpoints.
    """

    def __init__(self, stages: Iterable[nn.Module], decoders: Iterable[Decoder], shared: frozenset[str]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.decoders = tuple(decoders)
        self.shared = shared

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for decoder in self.decoders:
            yield from decoder.named_parameters()

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Every stage has its own copy; the names repeat."""
        for decoder in self.decoders:
            yield from decoder.named_buffers()


def counted_elsewhere(model: nn.Module) -> frozenset[str]:
    return model.shared if isinstance(model, Parts) else frozenset()


def rows_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of `like`."""
    if not isinstance(like, DTensor):
        return whole
    first, last = rows(like)
    return whole[first:last]


def rows(value: DTensor) -> tuple[int, int]:
    """First and last row that this rank holds: FSDP2 deals out rows in equal shares, the last ones may be short."""
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    share = -(-value.shape[0] // value.device_mesh.shape[-1])
    first = min(coordinate[-1] * share, value.shape[0])
    last = min(first + share, value.shape[0])
    assert last - first == value.to_local().shape[0], "rows are not dealt out as FSDP2 does"
    return first, last


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def squared_norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else local(gradient).double().square().sum().item()
