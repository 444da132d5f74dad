"""Many processes as one run: who holds what, and how numbers and tensors travel between them.

Started by torchrun, the ranks form a grid (pipeline, replicate, shard, tensor). A row of `pipeline` ranks divides the
depth; `tensor` ranks divide each window's tokens, and inside attention and MLP the channels; `shard` ranks divide each
parameter (FSDP2) and `replicate` copies do not, both see other windows of the batch. A single process is the grid of
one, whose methods do nothing, so that the training loop is written once.
"""

from __future__ import annotations

import math
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
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from headwater.errors import UserError
from headwater.models import Decoder
from headwater.models.decoder import Sublayer
from headwater.train import attempts
from headwater.train.config import ParallelSettings
from headwater.train.tensor import fsdp_placement

GRID = ("pipeline", "replicate", "shard", "tensor")
TOKENS = ("pipeline", "replicate", "tokens")  # the same ranks, with shard and tensor as one axis


class Ranks:
    """This process among the others. Built without arguments, it is alone. `tokens`: the grid with the axes TOKENS."""

    def __init__(self, mesh: DeviceMesh | None = None, tokens: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.tokens_mesh = tokens
        self.rank = 0 if mesh is None else dist.get_rank()
        self.world = 1 if mesh is None else dist.get_world_size()
        coordinate = (0, 0, 0, 0) if mesh is None else cast(list[int], mesh.get_coordinate())
        self.pipeline_rank, replica, part, self.tensor_rank = coordinate
        self.pipeline_world, self.replicas, self.shards, self.tensor = (1, 1, 1, 1) if mesh is None else mesh.shape
        self.data_rank, self.data_world = replica * self.shards + part, self.replicas * self.shards
        self.token_world = self.data_world * self.tensor  # ranks of one stage, each with tokens of its own

    @property
    def alone(self) -> bool:
        return self.mesh is None

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
        """For all ranks, on the host: a barrier of NCCL would wait for the GPU's queue as well."""
        self.highest(0)

    def collect(self, value: Any) -> list[Any]:
        """What every rank has to say, in the order of ranks."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def told(self, value: Any) -> Any:
        """What the main rank has to say: two may see different things in one folder of a network file system."""
        return self.collect(value)[0]

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main rank goes through the body alone; the others follow and find its work done."""
        if not self.main:
            self.wait()
        yield
        if self.main:
            self.wait()

    def own_tokens(self, windows: Tensor) -> Tensor:
        """Of windows (B, T + 1), the tokens that this rank embeds and, one later, is scored on."""
        share = (windows.shape[1] - 1) // self.tensor
        return windows[:, self.tensor_rank * share : (self.tensor_rank + 1) * share + 1]

    def gradient_norm(self, model: nn.Module) -> float:
        """Over the whole model, the same bits on every rank."""
        if self.alone:
            return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
        skipped = counted_elsewhere(model)
        gradients = [p.grad for name, p in model.named_parameters() if name not in skipped and p.grad is not None]
        held = [(local(g), copies(g)[0]) for g in gradients if local(g).numel()]  # of a small one, a rank may have none
        if not held:
            return self.sum(0.0) ** 0.5
        norms = torch.stack(torch._foreach_norm([part for part, _ in held])).double().cpu()  # one wait for the GPU
        return self.sum((norms.square() / torch.tensor([count for _, count in held])).sum().item()) ** 0.5


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


def join(settings: ParallelSettings, device: torch.device, *, alone: bool = True) -> Ranks:
    """The grid that torchrun's environment and the settings describe. One process is `alone`, unless a grid of one is
    asked for, to see what the wrapping costs by itself."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    row = settings.pipeline * settings.tensor
    if world % row:
        raise UserError(
            f"parallel.pipeline ({settings.pipeline}) times parallel.tensor ({settings.tensor}) must divide the number "
            f"of processes, {world}. Start them with: torchrun --nproc-per-node {row} -m headwater.cli train ... "
            "A run resumed by one process needs --pipeline 1 --tensor 1"
        )
    if world == 1 and alone:
        return Ranks()
    data = world // row
    shards = settings.shard or data
    if data % shards:
        raise UserError(f"parallel.shard ({shards}) must divide the {data} ranks that share the batch in each stage")
    if not dist.is_initialized():
        connect("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    outer, inner = (settings.pipeline, data // shards), (shards, settings.tensor)
    mesh = init_device_mesh(device.type, (*outer, *inner), mesh_dim_names=GRID)
    if settings.tensor == 1:
        return Ranks(mesh)
    return Ranks(mesh, init_device_mesh(device.type, (*outer, math.prod(inner)), mesh_dim_names=TOKENS))


def connect(backend: str) -> None:
    """As torch.distributed does by itself, but for a corner of the store that no earlier attempt has used, and for
    patience: the main rank may tokenize for hours. A step that hangs is the watchdog's."""
    store, rank, world = next(dist.rendezvous("env://"))
    store = attempts.meet(store, rank, world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(days=7))


def shard(module: nn.Module, sublayers: Iterable[Sublayer], ranks: Ranks, *, recompute: bool) -> None:
    """FSDP2 from outside: one group per layer, one for all that is left (norms, residual, embedding, head).

    The rest stays whole while a pass runs, since a residual may read its parameters at any depth. On a GPU the bodies
    travel and multiply in bf16; the rest keeps fp32, and gradients are summed in fp32. To the rest, which works token
    by token, ranks of tensor parallelism are ranks with other data: it is sharded over them as well, and so its
    gradients are averaged over them.
    """
    assert ranks.mesh is not None
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = half if ranks.mesh.device_type == "cuda" else MixedPrecisionPolicy()
    # FSDP warns that a body returns a view, which an in-place operation would break; the decoder has none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = sharded_over(ranks, ranks.mesh, "shard")
    for bodies in fetched_together(sublayers, recompute):
        fully_shard(bodies, mesh=mesh, mp_policy=policy, shard_placement_fn=fsdp_placement)
    fully_shard(module, mesh=mesh if ranks.tensor == 1 else sharded_over(ranks, ranks.tokens_mesh, "tokens"))


def fetched_together(sublayers: Iterable[Sublayer], recompute: bool) -> list[list[nn.Module]]:
    """The bodies of a layer, as far as they are here: FSDP2's hooks cost the host time by the group.

    Where forwards are recomputed, each body by itself: a backward then runs them one at a time, and in torch 2.10 (no
    longer in 2.13) a group that is left half done so passes for the root of the next forward, whose first weights
    would be fetched without waiting for the optimizer.
    """
    groups: list[list[nn.Module]] = [[]]
    for sublayer in sublayers:
        groups[-1].append(sublayer.body)
        if recompute or sublayer.kind == "mlp":
            groups.append([])
    return [group for group in groups if group]


def sharded_over(ranks: Ranks, mesh: DeviceMesh | None, axis: str) -> DeviceMesh:
    """One axis; before it the copies where there are some."""
    assert mesh is not None
    return mesh[axis] if ranks.replicas == 1 else mesh["replicate", axis]


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
            local(target.data).copy_(part_of(value, target))


def gather(model: nn.Module, like: Decoder, ranks: Ranks, *, gradients: bool = False) -> dict[str, Tensor]:
    """Whole fp32 parameters, or their gradients, on the CPU of the main rank, one after the other; nothing elsewhere.
    All ranks call it; `like` has the shapes."""
    mine = {name: p.grad if gradients else p.detach() for name, p in model.named_parameters()}
    skipped = counted_elsewhere(model)
    whole = {}
    for name, shape in ((name, p.shape) for name, p in like.named_parameters()):
        value, held = torch.zeros(shape), mine.get(name)
        if held is not None and copies(held)[1] and name not in skipped:
            part_of(value, held).copy_(local(held))
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


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of `like`: one rectangle."""
    if not isinstance(like, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return whole[tuple(slice(first, first + size) for first, size in zip(offset, shape))]


def copies(value: Tensor) -> tuple[int, bool]:
    """How many ranks of its stage hold the same part of a tensor, and whether this one is the first of them."""
    if not isinstance(value, DTensor):
        return 1, True
    place = zip(value.placements, value.device_mesh.shape, cast(list[int], value.device_mesh.get_coordinate()))
    same = [(size, at) for placement, size, at in place if isinstance(placement, Replicate)]
    return math.prod(size for size, _ in same), not any(at for _, at in same)


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def squared_norm(gradient: Tensor | None) -> float:
    """This rank's share of it: over all ranks of a stage the shares add up."""
    return 0.0 if gradient is None else local(gradient).double().square().sum().item() / copies(gradient)[0]
