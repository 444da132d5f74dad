"""Tensor parallelism with the sequence divided between the sublayers.

N ranks share each window. Between sublayers a rank has T / N of its tokens: activations, and everything a residual
keeps, are as short as that, and embedding, norms, depth reads and head work token by token, as if the N ranks saw
different data. Inside attention and MLP a rank has all T tokens and 1 / N of the heads or channels:

    gather:   (B, T / N, D) -> (B, T, D)    on the way into a body; backward sums over the ranks and divides the tokens
    scatter:  (B, T, D) -> (B, T / N, D)    on the way out: the sum over the ranks, of which each keeps its tokens

Each rank's loss is the mean over its own tokens, and the run's loss the mean of these. So a body, where the ranks meet,
sees 1 / N of each rank's gradient and hands back N times what it sums: outside, gradients belong to one rank's loss.
The model knows nothing of this; residuals and their kernels get plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from headwater._torch import all_gather, all_reduce, group_name, reduce_scatter
from headwater.errors import UserError
from headwater.models import Decoder, ModelConfig
from headwater.models.attention import Attention, Rotary
from headwater.models.kda import KDA, DecayGate
from headwater.models.mla import MLA
from headwater.models.mlp import SwiGLU
from headwater.models.moe import Experts, MoE, Router
from headwater.models.norm import RMSNorm
from headwater.models.part import Part
from headwater.models.sublayer import Sublayer
from headwater.residuals import build

# Linear layers divide their outputs among the ranks, but:
ROW_DIVIDED = frozenset({"output"})  # the layer that ends a body divides its inputs,
# All heads and experts share these,
WHOLE = frozenset({"down", "decay_down", "gate_down", "router"})
# A rank uses its heads' part of these.
SLICED = frozenset({"query_conv", "key_conv", "value_conv"})


def refuse_undivided(config: ModelConfig, size: int, shards: int) -> None:
    """Tensor parallelism over `size` ranks needs widths that divide, and residuals that look at one token at a time."""
    divided, beside = widths(config)
    for names, ranks, setting in ((divided, size, "tensor"), (beside, shards, "shard")):
        for name, width in names.items():
            if width % ranks:
                together = ", ".join(f"model.{other}" for other in names)
                raise UserError(
                    f"parallel.{setting} divides {together} among {ranks} ranks: it must divide model.{name}, {width}"
                )
    if config.value_residual:
        raise UserError(
            "model.value_residual shares values between layers, which parallel.tensor does not divide yet"
        )
    # A residual that looks at earlier tokens would need those of other ranks.
    with torch.device("meta"):
        residual = build(config.residual, config.dim, config.sublayers, config.kinds)
    if not residual.token_local:
        raise UserError(
            f"model.residual {config.residual!r} looks at earlier tokens of the stream, which parallel.tensor divides "
            "among the ranks: choose options that read one token at a time, or parallel.tensor 1"
        )


def widths(config: ModelConfig) -> tuple[dict[str, int], dict[str, int]]:
    """The widths that tensor parallelism divides, and those that FSDP2 cuts beside it, by the names of settings."""
    # Heads, channels, experts and tokens are divided among the ranks.
    divided = {name: getattr(config, name) for name in ("heads", "kv_heads", "mlp_dim", "context")}
    beside, kinds = {"dim": config.dim}, set(config.kinds)
    if "kda" in kinds:
        divided["kda_heads"] = config.kda_heads or config.heads
        beside["kda_head_dim"] = config.kda_width
    if "mla" in kinds:
        beside["mla_latent"] = config.mla_latent or 4 * config.head_dim
    if "moe" in kinds:
        divided["experts"] = config.experts
        beside["expert_dim"] = config.expert_width
        if config.shared_experts:
            divided["expert_dim"] = config.shared_experts * config.expert_width
    return divided, beside


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _all_gather(x, group, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _reduce_scatter(gradient, ctx.group, ctx.size) * ctx.size, None, None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: str, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _reduce_scatter(y, group, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_gather(gradient, ctx.group, ctx.size) / ctx.size, None, None


def _all_gather(x: Tensor, group: str, size: int) -> Tensor:
    """The operators of torch.distributed that the compiler knows; they work along the first axis."""
    ranks = all_gather(x.contiguous(), size, group)  # (N B, T / N, D)
    return ranks.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)  # (B, T, D)


def _reduce_scatter(y: Tensor, group: str, size: int) -> Tensor:
    ranks = y.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1).contiguous()  # (N B, T / N, D)
    return reduce_scatter(ranks, size, group)  # (B, T / N, D)


class Exchange:
    """Traffic between the ranks that share a window; outside the bodies nobody knows of it.

    `divides`: whether tokens are divided between the bodies. If not, every rank has all of them there, as when one
    token of a text is decoded: bodies take them as they are, and what leaves one is the sum on every rank.
    """

    divides = True

    def __init__(self, size: int, group: str, rank: int = 0) -> None:
        self.size, self.group, self.rank = size, group, rank

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that all ranks have, along its first axis."""
        return whole.chunk(self.size)[self.rank]

    def gather(self, x: Tensor) -> Tensor:
        return Gather.apply(x, self.group, self.size) if self.divides else x

    def scatter(self, y: Tensor) -> Tensor:
        if not self.divides:
            return all_reduce(y, self.group)
        return Scatter.apply(y, self.group, self.size)


class OnRank(Part):
    def here(self, weight: Tensor) -> Tensor:
        return here(weight)


class Divided(OnRank):
    """A body with its share of the heads or channels, between a gather and a scatter."""

    exchange: Exchange

    def forward(self, x: Any, *others: Any) -> Any:
        # Some residuals give queries, keys and values each an input.
        whole = tuple(map(self._enter, x)) if isinstance(x, tuple) else self._enter(x)
        y = super().forward(whole, *others)
        if isinstance(y, tuple):
            return self.exchange.scatter(y[0]), *y[1:]
        return self.exchange.scatter(y)

    def _enter(self, x: Tensor) -> Tensor:
        # The body's matrices would round to bf16 anyway: half the bytes travel.
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        return self.exchange.gather(x)


class DividedAttention(Divided, Attention): ...


class DividedSwiGLU(Divided, SwiGLU): ...


class DividedKDA(Divided, KDA):
    def here(self, weight: Tensor) -> Tensor:
        return self.exchange.own(here(weight))


class DividedMLA(Divided, MLA): ...


class DividedMoE(Divided, MoE):
    """All tokens, and a share of the experts: expert parallelism."""


class DividedRouter(OnRank, Router): ...


class DividedExperts(OnRank, Experts): ...


class DividedDecay(DecayGate):
    exchange: Exchange

    def here(self, weight: Tensor) -> Tensor:
        return self.exchange.own(here(weight))


class DividedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, here(self.weight))


class DividedNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.apply_weight(x, here(self.weight))


class DividedRotary(Rotary):
    """Asked by a rank for as many positions as its share has, it answers for the whole window."""

    exchange: Exchange

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        size = self.exchange.size if self.exchange.divides else 1
        return super().forward(start, length * size)


BODIES: dict[type[nn.Module], type[nn.Module]] = {
    Attention: DividedAttention,
    KDA: DividedKDA,
    MLA: DividedMLA,
    MoE: DividedMoE,
    SwiGLU: DividedSwiGLU,
    Rotary: DividedRotary,
}
INSIDE: dict[type[nn.Module], type[nn.Module]] = {
    DecayGate: DividedDecay,
    Experts: DividedExperts,
    Router: DividedRouter,
    nn.Linear: DividedLinear,
    RMSNorm: DividedNorm,
}


def parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    """Divide the bodies of a decoder (or of a stage of one) that has no weights yet, before anything else wraps it."""
    divide_parameters(model, lambda parameter, placement: _divided(parameter, mesh, placement))
    exchange = Exchange(mesh.size(), group_name(mesh.get_group()), mesh.get_local_rank())
    route(model, exchange)


def divide_parameters(model: Decoder, part: Callable[[Tensor, Placement], Tensor]) -> None:
    """Put in the place of each parameter of the bodies the part that a rank has of it."""
    for body in bodies(model):
        for name, parameter in list(body.named_parameters()):
            owner, _, own_name = name.rpartition(".")
            parameter_here = nn.Parameter(part(parameter.detach(), placement_of(name, parameter)))
            body.get_submodule(owner).register_parameter(own_name, parameter_here)


def placement_of(name: str, parameter: Tensor) -> Placement:
    """Place a body's parameter on the ranks: norms over one head are the same for all heads, hence on all ranks."""
    owner = name.split(".")[-2]
    if parameter.ndim == 1 or owner in WHOLE | SLICED:
        return Replicate()
    return Shard(1) if owner in ROW_DIVIDED else Shard(0)


def _divided(parameter: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(
        share(parameter, mesh.size(), placement), mesh, [placement], run_check=False
    )


def share(parameter: Tensor, size: int, placement: Placement) -> Tensor:
    """A tensor as large as one rank's part. Weights are filled in later, so that any part will do."""
    if not isinstance(placement, Shard):
        return parameter
    return parameter.chunk(size, placement.dim)[0].clone(memory_format=torch.contiguous_format)


def fsdp_placement(parameter: nn.Parameter) -> Shard | None:
    """FSDP2 cuts along the other axis than tensor parallelism did, so that what a rank holds is one rectangle."""
    if isinstance(parameter, DTensor) and parameter.placements == (Shard(0),):
        return Shard(1)
    return None


def route(model: Decoder, exchange: Exchange) -> None:
    """Let each body gather, work on its share with the weights it has here, and scatter.

    Modules change their class, as FSDP2 does it too: names stay, and the compiler meets the same code in every layer.
    """
    _divide(model.rotary, exchange)
    for body in bodies(model):
        _divide(body, exchange)
        for part in body.modules():
            # A rank has a part of the heads and of the experts.
            if isinstance(part, Attention):
                part.kv_heads //= exchange.size
            if isinstance(part, Attention | KDA | MLA | DecayGate):
                part.heads //= exchange.size
            if isinstance(part, Experts):
                part.first = exchange.rank * (part.total // exchange.size)
            if type(part) in INSIDE:
                part.__class__ = INSIDE[type(part)]
                part.exchange = exchange  # type: ignore[assignment]


def _divide(module: nn.Module, exchange: Exchange) -> None:
    module.__class__ = BODIES[type(module)]
    module.exchange = exchange  # type: ignore[assignment]


def bodies(model: Decoder) -> Iterator[nn.Module]:
    return (sublayer.body for sublayer in model.sublayers if isinstance(sublayer, Sublayer))


def here(weight: Tensor) -> Tensor:
    """This rank's part of a weight. One that all ranks have acts on each rank's heads: its gradients add up."""
    if not isinstance(weight, DTensor):
        return weight
    whole = weight.placements == (Replicate(),)
    return weight.to_local(grad_placements=[Partial()] if whole else None)
