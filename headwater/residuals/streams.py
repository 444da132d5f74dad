"""Residuals with n parallel streams: a sublayer reads a mixture of them, writes to all, and the streams mix."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.ops.numerics import full_precision

from .base import Layout, Next, Norm, Residual, State, apply_norm, hold
from .numerics import wide


def mix_streams(weights: Tensor, x: Tensor) -> Tensor:
    """weights (..., m, n) @ x (..., n, D), both fp32 or wider.

    On a GPU a batched product, one pass. PyTorch's batched product on a CPU calls a matrix product a token, and its
    compiler does not fuse it: a running sum over the n streams is several times faster there.
    """
    if x.is_cuda and not torch.compiler.is_compiling():
        with full_precision(x):
            return weights @ x
    columns, streams = weights.unsqueeze(-1).unbind(-2), x.unsqueeze(-3).unbind(-2)  # (..., m, 1), (..., 1, D)
    total = columns[0] * streams[0]
    for column, stream in zip(columns[1:], streams[1:], strict=True):
        total = torch.addcmul(total, column, stream)
    return total


class StreamsResidual(Residual):
    """x = pre X;  X' = res X + post f(x), for X of n streams; the head sees the sum of the streams.

    State: one tensor (..., n, D). Streams sit beside the channels, not in the batch: a token's n D numbers are
    contiguous, so coefficients of all streams are one matrix product, and a batch can be split as it is.
    Between read and write, the state also holds the small `post` and `res`, so that they are computed once.
    """

    def __init__(self, dim: int, sublayers: int, *, streams: int) -> None:
        super().__init__(dim, sublayers)
        self.streams = streams

    @abstractmethod
    def coefficients(self, x: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """pre (..., n), post (..., n) and res (..., n, n) of sublayer i in fp32, for x (..., n, D)."""

    def layout(self, i: int) -> Layout:
        return ("streams",)

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        return (self.layout(i),) if verb == "read" else (("streams", "post", "res"),)

    def _begin(self, x: Tensor) -> State:
        return (x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, self.dim),)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        (x,) = state
        pre, post, res = (hold(c) for c in self.coefficients(x, i))
        h = mix_streams(pre.unsqueeze(-2), wide(x)).squeeze(-2).to(x.dtype)
        return apply_norm(norm, h), (x, post, res)

    def _write(self, state: State, i: int, y: Tensor) -> State:
        x, post, res = state
        mixed = mix_streams(res, wide(x))
        return (torch.addcmul(mixed, post.unsqueeze(-1), wide(y).unsqueeze(-2)).to(x.dtype),)

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        return apply_norm(norm, state[0].sum(-2))

    def _weights(self, state: State, i: int) -> Tensor:
        """Over the streams, (n, ..., 1)."""
        x = state[0]
        if i == self.sublayers:
            return torch.ones(self.streams, *x.shape[:-2], 1, device=x.device)
        return self.coefficients(x, i)[0].movedim(-1, 0).unsqueeze(-1)

    @abstractmethod
    def coefficient_products(self) -> int:
        """Multiply-adds a token of making all coefficients of a pass."""

    def flops_per_token(self) -> int:
        n = self.streams
        return 2 * self.coefficient_products() + 2 * self.dim * n * (n + 2) * self.sublayers
