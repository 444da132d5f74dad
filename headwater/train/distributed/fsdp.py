"""FSDP2 from outside, and whole models to and from the parts that ranks hold."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headwater._torch import scale_all_
from headwater.models import Decoder
from headwater.models.decoder import saved_tensors
from headwater.models.kda import DecayGate
from headwater.models.moe import Router
from headwater.models.pattern import FEED_FORWARDS
from headwater.models.sublayer import Sublayer
from headwater.train.distributed.parts import copies, counted_elsewhere, local, part_of, saved_parts
from headwater.train.distributed.ranks import Ranks
from headwater.train.distributed.tensor_parallel import fsdp_placement


def shard(
    module: nn.Module, sublayers: Iterable[Sublayer], ranks: Ranks, *, recompute: bool
) -> None:
    """FSDP2 from outside: one group per layer, one for all that is left (norms, residual, embedding, head).

    The rest stays whole while a pass runs, since a residual may read its parameters at any depth. On a GPU the bodies
    travel and multiply in bf16; the rest keeps fp32, and gradients are summed in fp32. To the rest, which works token
    by token, ranks of tensor parallelism are ranks with other data: it is sharded over them as well, and so its
    gradients are averaged over them.
    """
    assert ranks.mesh is not None
    # Bodies are cast by FSDP2, the rest by autocast.
    half = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    policy = half if ranks.mesh.device_type == "cuda" else MixedPrecisionPolicy()
    # FSDP warns that a body returns a view, which an in-place operation would break; the decoder has none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = sharded_over(ranks, ranks.mesh, "shard")
    # Inside first: what computes in fp32 is fetched by itself.
    groups = fetched_together(sublayers, recompute)
    bodies = chain.from_iterable(groups)
    for part in chain.from_iterable(body.modules() for body in bodies):
        if computes_in_fp32(part):
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    for group in groups:
        fully_shard(group, mesh=mesh, mp_policy=policy, shard_placement_fn=fsdp_placement)
    fully_shard(
        module, mesh=mesh if ranks.tensor == 1 else sharded_over(ranks, ranks.tokens_mesh, "tokens")
    )


def computes_in_fp32(module: nn.Module) -> bool:
    """Routers and decays: few numbers, that bf16 would spoil. They are fetched by themselves."""
    return isinstance(module, Router | DecayGate)


def here_alone(held: Tensor, ranks: Ranks) -> bool:
    """Tell whether this rank counts, of those that hold the same part; a plain tensor is whole on all."""
    return copies(held)[1] and (isinstance(held, DTensor) or ranks.first_of_stage)


def fetched_together(sublayers: Iterable[Sublayer], recompute: bool) -> list[list[nn.Module]]:
    """The bodies of a layer, as far as they are here: FSDP2's hooks cost the host time by the group.

    Where forwards are recomputed, each body by itself: a backward then runs them one at a time, and in torch 2.10 (no
    longer in 2.13) a group that is left half done so passes for the root of the next forward, whose first weights
    would be fetched without waiting for the optimizer.
    """
    # A layer ends with its feed-forward.
    groups: list[list[nn.Module]] = [[]]
    for sublayer in sublayers:
        groups[-1].append(sublayer.body)
        if recompute or sublayer.kind in FEED_FORWARDS:
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
    # In fp32, as there
    scale = (torch.tensor(limit) / (torch.tensor(norm) + 1e-6)).clamp(max=1.0).item()
    scale_all_([local(p.grad) for p in model.parameters() if p.grad is not None], scale)


def reshard(module: nn.Module) -> None:
    """After a pass without a backward, return to shards: FSDP2 keeps its outermost parameters whole for one."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def fill(model: nn.Module, source: Decoder | None) -> None:
    """Parameters and buffers of a sharded, so far empty model, from the whole one that the main rank holds."""
    # A pipeline rank may hold a parameter of the whole in several stages.
    targets: dict[str, list[Tensor]] = defaultdict(list)
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        targets[name].append(value)
    # Every rank learns what comes, then takes its part of one tensor after the other.
    entries: list[Any] = [None]
    if source is not None:
        whole = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        entries = [[(name, tuple(value.shape), value.dtype) for name, value in whole.items()]]
    dist.broadcast_object_list(entries, 0)
    for name, shape, dtype in entries[0]:
        if source is None:
            value = torch.empty(shape, dtype=dtype)
        else:
            value = whole[name].detach().contiguous()
        dist.broadcast(value, 0)
        for target in targets[name]:
            local(target.data).copy_(part_of(value, target))


def gather(
    model: nn.Module, like: Decoder, ranks: Ranks, *, gradients: bool = False
) -> dict[str, Tensor]:
    """Whole fp32 parameters, or their gradients, on the CPU of the main rank, one after the other; nothing elsewhere.

    All ranks call it; `like` has the shapes.
    """
    parts: dict[str, Tensor | None]
    if gradients:
        parts = {name: p.grad for name, p in model.named_parameters()}
        shapes = {name: p.shape for name, p in like.named_parameters()}
    else:
        parts = {name: tensor.detach() for name, tensor in saved_parts(model).items()}
        shapes = {name: tensor.shape for name, tensor in saved_tensors(like).items()}
    skipped = counted_elsewhere(model)
    whole = {}
    for name, shape in shapes.items():
        # Parts lie in zeros, so that their sum is the whole. Of equal parts one rank's counts.
        value, part = torch.zeros(shape), parts.get(name)
        if part is not None and here_alone(part, ranks) and name not in skipped:
            part_of(value, part).copy_(local(part))
        dist.reduce(value, 0)
        if ranks.main:
            whole[name] = value
    return whole
