"""Delta Attention Residuals: the plain residual stays, and a read over depth is added to what a
sublayer sees."""

from math import ceil
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwater.ops import depth_attention

from .base import Layout, Norm, Residual, State, apply_norm, even_weights, hold, weights_held
from .numerics import combine
from .options import check_range
from .registry import register


class AddedRead(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(dim))
        self.key_weight = nn.Parameter(torch.ones(dim))


@register("delta-attnres")
class DeltaAttentionResidual(Residual):
    """x_i = h_i + sum_n softmax_n(<q_i, RMSNorm(v_n)>) v_n;  h_{i+1} = h_i + f_i(x_i).

    The sources v are the embedding and the sublayer outputs; the head sees the stream h.
    `block`: this many outputs are summed to one source.
    At initialisation: queries are zero, so a read is the sum plus the mean of the same terms: with
    block=1, the plain residual up to a scale that the pre-norm cancels. With larger blocks the mean
    is of block sums, so it is too. The released block form subtracts only the previous block's
    state and the released queries start at N(0, 0.02); here a block's source is its own sum, and
    zero is what the paper's text says. A read of one source has no parameters. Cost: 2 D parameters
    a read; the state holds the stream and one tensor per source. Delta Attention Residuals, arXiv
    2605.18855.
    """

    at_start = "scaled"

    def __init__(self, dim: int, sublayers: int, *, block: int = 1, eps: float = 1e-6) -> None:
        super().__init__(dim, sublayers)
        check_range("block", block, 1, sublayers)
        self.block = block
        self.eps = eps
        # Read 0 has one source, and nothing to learn.
        self.reads = nn.ModuleDict()
        for i in range(1, sublayers):
            self.reads[str(i)] = AddedRead(dim)

    def num_sources(self, i: int) -> int:
        """Count the sources of read i: the embedding, and one per block begun before it."""
        return 1 + ceil(i / self.block)

    def layout(self, i: int) -> Layout:
        blocks = [f"block {n}" for n in range(self.num_sources(i) - 1)]
        return ("stream", "embedding", *blocks)

    def _begin(self, x: Tensor) -> State:
        return (x, x)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        stream, sources = state[0], state[1:]
        if i == 0:
            return apply_norm(norm, stream + sources[0]), state
        mixed, weights = self._attend(sources, i)
        # The operator does not know of held weights: the sum is made again.
        if weights_held():
            mixed = combine(sources, hold(weights).unbind(0))
        return apply_norm(norm, stream + mixed), state

    def _write(self, state: State, i: int, y: Tensor) -> State:
        stream = state[0] + y
        # Inside a block the output joins the block's sum, too.
        if i % self.block:
            return (stream, *state[1:-1], state[-1] + y)
        return (stream, *state[1:], y.to(stream.dtype))

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        return apply_norm(norm, state[0])

    def _weights(self, state: State, i: int) -> Tensor:
        """Weigh the stream, then the sources."""
        one = even_weights(state[0])
        if i == self.sublayers:
            return one
        if i == 0:
            return torch.cat((one, one))
        _, weights = self._attend(state[1:], i)
        return torch.cat((one, weights))

    def flops_per_token(self) -> int:
        # No final read; each read is added to the stream.
        sources = sum(self.num_sources(i) for i in range(1, self.sublayers))
        return 6 * self.dim * sources + 3 * self.dim * self.sublayers

    def _attend(self, sources: State, i: int) -> tuple[Tensor, Tensor]:
        read = cast(AddedRead, self.reads[self.keys[i]])
        options: dict[str, Any] = {"eps": self.eps, "return_weights": True}
        return depth_attention(sources, read.query, read.key_weight, **options)
