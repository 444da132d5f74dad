"""Residuals with n parallel streams: a sublayer reads a mixture of them, writes to all, and the
streams mix."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.ops.numerics import full_precision
from headwater.ops.routing import Backend
from headwater.ops.streams import project_streams, read_streams, write_streams
from headwater.ops.streams.operators import MAX_STREAMS, Factors

from .base import (
    Layout,
    Next,
    Norm,
    Residual,
    State,
    apply_norm,
    even_weights,
    hold,
    weights_held,
)


def unmixed(post: Tensor) -> Tensor:
    """Return the res of streams that do not mix, the identity (..., n, n), for their `post`
    (..., n)."""
    n = post.shape[-1]
    return torch.eye(n, dtype=post.dtype, device=post.device).expand(*post.shape, n)


class StreamsResidual(Residual):
    """x = pre X;  X' = res X + post f(x), for X of n streams; the head sees the sum of the streams.

    State: one tensor (..., n, D). Streams sit beside the channels, not in the batch: a token's n D
    numbers are contiguous, so coefficients of all streams are one matrix product, and a batch can
    be split as it is. Between read and write, the state also holds the small `post` and `res`, so
    that they are computed once.
    `backend`: of reads, writes and what coefficients are made of, as in
        `headwater.depth_attention`.
    """

    def __init__(self, dim: int, sublayers: int, *, streams: int, backend: Backend) -> None:
        super().__init__(dim, sublayers)
        self.streams = streams
        self.backend: Backend = backend
        self.fused = backend != "reference" and streams <= MAX_STREAMS

    @abstractmethod
    def projection(self, i: int) -> tuple[Tensor, float] | None:
        """Return the weights that coefficients of sublayer i are made with, and the eps of the norm
        before them.

        They are (Q, n D) for a token's streams normed together, or (Q, D) for each stream normed by
        itself. None: the coefficients are constants.
        """

    @abstractmethod
    def gates(self, z: Tensor | None, x: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return pre (..., n), post (..., n) and res (..., n, n) of sublayer i in fp32.

        For x (..., n, D) and its products `z` with the weights of `projection`, (..., Q) or
        (..., n, Q).
        """

    def coefficients(self, x: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return pre, post and res of sublayer i."""
        return self.gates(self._project(x, i)[0], x, i)

    def _project(self, x: Tensor, i: int) -> tuple[Tensor | None, Tensor, Factors | None]:
        projection = self.projection(i)
        if projection is None:
            return None, x, None
        return project_streams(x, *projection, backend=self._now())

    def _now(self) -> Backend:
        # A mixing matrix is read off the references: kernels know of no held weights.
        return "reference" if weights_held() else self.backend

    def layout(self, i: int) -> Layout:
        return ("streams",)

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        if verb == "read":
            return (self.layout(i),)
        return (("streams", "post", "res"),)

    def _begin(self, x: Tensor) -> State:
        streams = x.unsqueeze(-2)
        return (streams.expand(*x.shape[:-1], self.streams, self.dim),)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        z, x, factors = self._project(state[0], i)
        pre, post, res = map(hold, self.gates(z, x, i))
        h = read_streams(x, pre, factors, backend=self._now())
        return apply_norm(norm, h), (x, post, res)

    def _write(self, state: State, i: int, y: Tensor) -> State:
        # The coefficients of the write were computed with those of the read.
        x, post, res = state
        return (write_streams(x, y, post, res, backend=self._now()),)

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        # Under autocast a sum would be in fp32, and all that follows it.
        with full_precision(state[0]):
            total = state[0].sum(-2)
        return apply_norm(norm, total)

    def _weights(self, state: State, i: int) -> Tensor:
        """Weigh the streams, (n, ..., 1)."""
        x = state[0]
        if i == self.sublayers:
            return even_weights(x[..., 0, :], self.streams)
        pre, _, _ = self.coefficients(x, i)
        return pre.movedim(-1, 0).unsqueeze(-1)

    @abstractmethod
    def coefficient_products(self) -> int:
        """Count the multiply-adds per token that make all coefficients of a pass."""

    def flops_per_token(self) -> int:
        n = self.streams
        # A read, a write, and the mixing of n by n.
        mixing = self.dim * n * (n + 2) * self.sublayers
        return 2 * (self.coefficient_products() + mixing)
