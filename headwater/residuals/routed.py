"""Block Attention Residuals over normed sources, with reads of their own for query, key and value."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, cast

from torch import nn

from .attention import AttentionResidual, DepthRead, mix_by_weights
from .base import Norm, Read, State, apply_norm
from .layerwise import INPUTS, sublayer_kinds
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
                reads = (deepcopy(self.reads[str(i)]) for _ in range(3))
                self.reads[str(i)] = nn.ModuleList(reads)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Read, State]:
        if i not in self.routed:
            return super()._read(state, i, norm)
        reads = cast(nn.ModuleList, self.reads[self.keys[i]])
        query, key, value = (mix_by_weights(self, state, cast(DepthRead, read)) for read in reads)
        return apply_norm(norm, (query, key, value)), state

    def _parameters_of(self, i: int) -> DepthRead:
        """Return the parameters of read `i`, of three the query input's."""
        read = self.reads[self.keys[i]]
        return cast(DepthRead, read[0] if isinstance(read, nn.ModuleList) else read)

    def flops_per_token(self) -> int:
        # Two more reads for each that is routed.
        sources = sum(self.num_sources(i) for i in self.routed)
        return super().flops_per_token() + 12 * self.dim * sources
