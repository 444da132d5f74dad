"""Every layer counts: a learned static softmax over the outputs of earlier layers replaces the
identity path."""

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


class StaticMixture(LayerwiseResidual):
    """Residuals whose layers read a softmax over the outputs before them, the same for all tokens."""

    logits: nn.ParameterDict

    def new_logits(self, last: int) -> nn.ParameterDict:
        """Make logits of zero for the reads of layers 1 to `last`; layer 0 reads the embedding."""
        return nn.ParameterDict({self.key(m): torch.zeros(m + 1) for m in range(1, last + 1)})

    def shares(self, m: int) -> Tensor:
        return wide(self.logits[self.key(m)]).softmax(0)

    def static_weights(self, bank: State, m: int) -> Tensor:
        """Return weights (N, ..., 1) of a bank: one on the newest where layer m has no logits."""
        if self.key(m) in self.logits:
            return spread(self.shares(m), bank[0])
        newest = torch.zeros(len(bank), device=bank[0].device)
        newest[-1] = 1.0
        return spread(newest, bank[0])


@register("elc-bert")
class EveryLayerCountsResidual(StaticMixture):
    """x_m = sum_j softmax(a_m)_j u_j;  t = attention(x_m);  u_{m+1} = t + MLP(x_m + t): the input is not in the output.

    u_0 is the embedding.
    `variant`: zero has a_m = 0 at the start, base has a_m = 1 on the newest output there and an MLP
        that reads only t, normalized is zero with every layer output RMS-normalised, and
        weighted-output is zero with a softmax over all outputs for the final read, which is
        otherwise the last output.
    `backend`: the sums run as in `headwater.depth_attention`.
    At initialisation: different from the plain residual. Where there is one source there is no
    parameter.
    Cost: D(D + 1) / 2 scalars for D layers; the state holds every layer output. ELC-BERT, arXiv
    2311.02265 (equations from its code; its post-norms and relative positions belong to its
    sublayers, not to the residual).
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
        # To norm an output of zero gives no gradient that one could use.
        self.takes_zero = not self.normalized
        # The last layer whose read has weights.
        self.last = self.layers if variant == "weighted-output" else self.layers - 1
        self.logits = self.new_logits(self.last)
        if variant == "base":
            for logits in self.logits.values():
                logits.data[-1] = 1.0

    def mix(self, bank: State, m: int) -> tuple[Tensor, Tensor, State]:
        if self.key(m) not in self.logits:
            return bank[-1], bank[-1], bank
        weights = self.shares(m).unsqueeze(0)
        # Gradients of sources are threaded from each sum to the next.
        thread = m < self.last
        (x,), bank = mix_bank(bank, weights, thread=thread, backend=self._now())
        return x, x, bank

    def store(self, bank: State, output: Tensor, m: int) -> State:
        # The norm of a layer's output is a part of this layer.
        if self.normalized:
            output = (output * hold(rms_scale(output))).to(output.dtype)
        return (*bank, output)

    def bank_weights(self, bank: State, m: int) -> Tensor:
        return self.static_weights(bank, m)

    def flops_per_token(self) -> int:
        weights = sum(logits.numel() for logits in self.logits.values())
        return 2 * self.dim * (self.sublayers + weights)


@register("vertical-attention")
class VerticalAttentionResidual(StaticMixture):
    """x_m = sum_j softmax(a_m)_j RMSNorm(u_j);  u_{m+1} = x_m + attention + MLP of layer m.

    A documented stand-in: the paper's equations were never public beyond its abstract and reviews,
    which describe input-independent softmax weights over normalised hidden vectors at the start of
    a layer. That a layer keeps its own skip, and zero logits at start, are our choices; the final
    read is the last output.
    At initialisation: different from the plain residual. Cost: D(D + 1) / 2 scalars for D layers;
    the state holds every layer output. Vertical Attention, OpenReview A6uabXKiXc.
    """

    at_start = "different"

    def __init__(self, dim: int, sublayers: int, *, kinds: Sequence[str] | None = None) -> None:
        super().__init__(dim, sublayers, kinds)
        self.logits = self.new_logits(self.layers - 1)

    def mix(self, bank: State, m: int) -> tuple[Tensor, Tensor, State]:
        if self.key(m) not in self.logits:
            return bank[-1], bank[-1], bank
        # The norms' scales join the weights, so that no normed source is made.
        weights = []
        shares = self.shares(m).split(1)
        for share, u in zip(shares, bank, strict=True):
            weights.append(share * hold(rms_scale(u)))
        x = combine(bank, weights)
        return x, x, bank

    def bank_weights(self, bank: State, m: int) -> Tensor:
        weights = self.static_weights(bank, m)
        if self.key(m) not in self.logits:
            return weights
        return weights * torch.stack([rms_scale(u) for u in bank])

    def flops_per_token(self) -> int:
        weights = sum(logits.numel() for logits in self.logits.values())
        return 2 * self.dim * (self.sublayers + 2 * weights)
