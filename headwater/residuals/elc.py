"""Every layer counts: a learned static softmax over the outputs of earlier layers replaces the identity path."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from headwater.ops.banks import mix_bank
from headwater.ops.routing import Backend

from .base import State, hold
from .layerwise import LayerwiseResidual, spread
from .numerics import combine, rms_scale, wide
from .registry import register


@register("elc-bert")
class EveryLayerCountsResidual(LayerwiseResidual):
    """x_m = sum_j softmax(a_m)_j u_j;  t = attention(x_m);  u_{m+1} = t + MLP(x_m + t): the input is not in the output.

    u_0 is the embedding.
    `variant`: zero has a_m = 0 at the start, base has a_m = 1 on the newest output there and an MLP that reads only t,
        normalized is zero with every layer output RMS-normalised, and weighted-output is zero with a softmax over all
        outputs for the final read, which is otherwise the last output.
    `backend`: the sums run as in `headwater.depth_attention`.
    At initialisation: different from the plain residual. Where there is one source there is no parameter.
    Cost: D(D + 1) / 2 scalars for D layers; the state holds every layer output. ELC-BERT, arXiv 2311.02265 (equations
    from its code; its post-norms and relative positions belong to its sublayers, not to the residual).
    """

    at_start = "different"
    keeps_input = False

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        variant: Literal["zero", "base", "normalized", "weighted-output"] = "zero",
        backend: Backend = "auto",
        kinds: Sequence[str] | None = None,
    ) -> None:
        super().__init__(dim, sublayers, kinds, backend)
        self.rereads_input = variant != "base"
        self.normalized = variant == "normalized"
        self.takes_zero = (
            not self.normalized
        )  # the length of nothing has no gradient that one could use
        self.last = (
            self.layers if variant == "weighted-output" else self.layers - 1
        )  # that has weights
        self.logits = nn.ParameterDict(
            {
                self.key(m): nn.Parameter(
                    torch.eye(m + 1)[-1].clone() if variant == "base" else torch.zeros(m + 1)
                )
                for m in range(1, self.last + 1)
            }
        )

    def mix(self, bank: State, m: int) -> tuple[Tensor, Tensor, State]:
        if self.key(m) not in self.logits:
            return bank[-1], bank[-1], bank
        weights, thread = wide(self.logits[self.key(m)]).softmax(0).unsqueeze(0), m < self.last
        (x,), bank = mix_bank(bank, weights, thread=thread, backend=self._now())
        return x, x, bank

    def store(self, bank: State, output: Tensor, m: int) -> State:
        if self.normalized:
            output = (output * hold(rms_scale(output))).to(output.dtype)
        return (*bank, output)

    def bank_weights(self, bank: State, m: int) -> Tensor:
        if self.key(m) in self.logits:
            return spread(wide(self.logits[self.key(m)]).softmax(0), bank[0])
        return spread(torch.eye(len(bank), device=bank[0].device)[-1], bank[0])

    def flops_per_token(self) -> int:
        return (
            2 * self.dim * (self.sublayers + sum(logits.numel() for logits in self.logits.values()))
        )


@register("vertical-attention")
class VerticalAttentionResidual(LayerwiseResidual):
    """x_m = sum_j softmax(a_m)_j RMSNorm(u_j);  u_{m+1} = x_m + attention + MLP of layer m.

    A documented stand-in: the paper's equations were never public beyond its abstract and reviews, which describe
    input-independent softmax weights over normalised hidden vectors at the start of a layer. That a layer keeps its
    own skip, and zero logits at start, are our choices; the final read is the last output.
    At initialisation: different from the plain residual. Cost: D(D + 1) / 2 scalars for D layers; the state holds
    every layer output. Vertical Attention, OpenReview A6uabXKiXc.
    """

    at_start = "different"

    def __init__(self, dim: int, sublayers: int, *, kinds: Sequence[str] | None = None) -> None:
        super().__init__(dim, sublayers, kinds)
        self.logits = nn.ParameterDict(
            {self.key(m): nn.Parameter(torch.zeros(m + 1)) for m in range(1, self.layers)}
        )

    def mix(self, bank: State, m: int) -> tuple[Tensor, Tensor, State]:
        if self.key(m) not in self.logits:
            return bank[-1], bank[-1], bank
        shares = wide(self.logits[self.key(m)]).softmax(0).split(1)
        x = combine(
            bank, [share * hold(rms_scale(u)) for share, u in zip(shares, bank, strict=True)]
        )
        return x, x, bank

    def bank_weights(self, bank: State, m: int) -> Tensor:
        if self.key(m) not in self.logits:
            return spread(torch.eye(len(bank), device=bank[0].device)[-1], bank[0])
        scales = torch.stack([rms_scale(u) for u in bank])
        return spread(wide(self.logits[self.key(m)]).softmax(0), bank[0]) * scales

    def flops_per_token(self) -> int:
        return (
            2
            * self.dim
            * (self.sublayers + 2 * sum(logits.numel() for logits in self.logits.values()))
        )
