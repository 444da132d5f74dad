"""Block Attention Residuals over normed sources, with reads of their own for query, key and value."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwater.ops import mix_sources
from headwater.ops.depth.reference import depth_weights, stack_wide

from .attention import AttentionResidual
from .base import Norm, Read, State, apply_norm, hold
from .layerwise import INPUTS, sublayer_kinds
from .numerics import rms_scale
from .registry import register


@register("attnres-routed")
class RoutedAttentionResidual(AttentionResidual):
    """h^c_i = sum_n softmax_n(<q^c_i, u_n> / sqrt(D)) u_n for query, key, value;  u_n = RMSNorm(b_n).

    The sources b_n are those of `attnres-block`. An attention has three reads, every other sublayer
    and the head have one. The first attention sees the embedding itself. Without reads of their own
    it is `attnres-block:values=normed,scale=root,key_weight=false`.
    `block`: this many sublayers add their outputs to one source, by default an eighth of them all
        and at least two.
    At initialisation: queries are zero, so a read is the mean of its normed sources, which is not
    the plain residual.
    Cost: D parameters per read, three reads per attention; the state holds one tensor per source.
    Kernels sum raw values, so PyTorch makes these reads. Inkling-2, in transformers 5.23.
    """

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        block: int | None = None,
        eps: float = 1e-6,
        kinds: Sequence[str] | None = None,
    ) -> None:
        options: Any = {"values": "normed", "scale": "root", "key_weight": False}
        super().__init__(dim, sublayers, block=block, eps=eps, **options)
        self.routed: set[int] = set()
        for i, kind in enumerate(sublayer_kinds(sublayers, kinds)):
            # Read 0 has no parameters.
            if kind in INPUTS and i > 0:
                self.routed.add(i)
                self._parameters_of(i).query = nn.Parameter(torch.zeros(3, dim))

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Read, State]:
        if i not in self.routed:
            return super()._read(state, i, norm)
        stack, weights = self._weights_of(state, i)
        weights = hold(weights * rms_scale(stack, self.eps))  # (N, ..., 3)
        query, key, value = (
            mix_sources(stack, of_input).to(state[0].dtype) for of_input in weights.split(1, -1)
        )
        return apply_norm(norm, (query, key, value)), state

    def _weights_of(self, sources: State, i: int) -> tuple[Tensor, Tensor]:
        """Return the sources as one tensor, and their weights: of inputs that are read apart,
        (N, ..., 3)."""
        if i not in self.routed:
            return super()._weights_of(sources, i)
        stack = stack_wide(sources)
        queries = self._parameters_of(i).scaled_query()
        weights = [depth_weights(stack, query, None, **self.weighing) for query in queries]
        return stack, torch.cat(weights, -1)

    def _weights(self, state: State, i: int) -> Tensor:
        """Weigh the sources, by the query input's weights where inputs are read apart."""
        return super()._weights(state, i)[..., :1]

    def flops_per_token(self) -> int:
        # Two more reads for each that is routed.
        sources = sum(self.num_sources(i) for i in self.routed)
        return super().flops_per_token() + 12 * self.dim * sources
