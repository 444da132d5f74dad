"""Delta Attention Residuals: the plain residual stays, and a read over depth is added to what a sublayer sees."""

from math import ceil
from typing import cast

import torch
from torch import Tensor, nn

from headwater.ops import depth_attention

from .base import Layout, Norm, Residual, State, apply_norm, hold, weights_held
from .numerics import combine
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
    At initialisation: queries are zero, so a read is the sum plus the mean of the same terms: with block=1, the plain
    residual up to a scale that the pre-norm cancels. With larger blocks the mean is of block sums, so it is too.
    The released block form subtracts only the previous block's state and the released queries start at N(0, 0.02);
    here a block's source is its own sum, and zero is what the paper's text says. A read of one source has no
    parameters. Cost: 2 D parameters a read; the state holds the stream and one tensor per source.
    Delta Attention Residuals, arXiv 2605.18855.
    """

    at_start = "scaled"

    def __init__(self, dim: int, sublayers: int, *, block: int = 1, eps: float = 1e-6) -> None:
        super().__init__(dim, sublayers)
        if not 1 <= block <= sublayers:
            raise ValueError(
                f"block counts sublayers and must lie between 1 and {sublayers}, got {block}"
            )
        self.block, self.eps = block, eps
        self.reads = nn.ModuleDict({str(i): AddedRead(dim) for i in range(1, sublayers)})

    def num_sources(self, i: int) -> int:
        """The embedding, and one for each block begun before read i."""
        return 1 + ceil(i / self.block)

    def layout(self, i: int) -> Layout:
        return ("stream", "embedding", *(f"block {n}" for n in range(self.num_sources(i) - 1)))

    def _begin(self, x: Tensor) -> State:
        return (x, x)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        stream, sources = state[0], state[1:]
        if i == 0:
            return apply_norm(norm, stream + sources[0]), state
        mixed, weights = self._attend(sources, i)
        if weights_held():
            mixed = combine(sources, hold(weights).unbind(0))
        return apply_norm(norm, stream + mixed), state

    def _write(self, state: State, i: int, y: Tensor) -> State:
        stream = state[0] + y
        if i % self.block:
            return (stream, *state[1:-1], state[-1] + y)
        return (stream, *state[1:], y.to(stream.dtype))

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        return apply_norm(norm, state[0])

    def _weights(self, state: State, i: int) -> Tensor:
        """Over the stream, then the sources."""
        one = torch.ones(1, *state[0].shape[:-1], 1, device=state[0].device)
        if i == self.sublayers:
            return one
        return torch.cat((one, one if i == 0 else self._attend(state[1:], i)[1]))

    def flops_per_token(self) -> int:
        sources = sum(self.num_sources(i) for i in range(1, self.sublayers))
        return 6 * self.dim * sources + 3 * self.dim * self.sublayers

    def _attend(self, sources: State, i: int) -> tuple[Tensor, Tensor]:
        read = cast(AddedRead, self.reads[self.keys[i]])
        return depth_attention(
            sources, read.query, read.key_weight, eps=self.eps, return_weights=True
        )
