"""Hyper-Connections and Attention Residuals together: what a sublayer reads from the streams, and
from the depth."""

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from headwater.ops.routing import Backend

from .attention import AttentionResidual
from .base import Layout, Next, Norm, Residual, State, apply_norm
from .hyper import HyperConnectionsResidual
from .registry import register


@register("hyper-attnres")
class HyperAttentionResidual(Residual):
    """x = sum_j p_j X_j + sum_n softmax_n(<q_i, RMSNorm(b_n)>) b_n;  X'_j = sum_i R_ij X_i + b_j f(x).

    The streams X of `hyper-connections` and the sources of `attnres-block` beside them: both are
    kept as they are, a sublayer and the head read their sum, and both take in what it writes.
    `streams`: the number of streams.
    `form`: the coefficients of the streams are static or dynamic, as in `hyper-connections`.
    `block`: this many sublayers add their outputs to one source, where 1 is Full.
    `backend`: both parts run as in `headwater.depth_attention`.
    Nobody has published this; that the two reads are added, as Delta Attention Residuals adds its
    own to the plain stream, is our choice, and what makes the file small.
    At initialisation: the plain residual and the mean of its terms, so it is that up to a scale.
    Cost: the parameters, the state and the traffic of both.
    Hyper-Connections, arXiv 2409.19606; Attention Residuals, arXiv 2603.15031.
    """

    at_start = "scaled"
    derived = ("block",)

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        streams: int = 4,
        form: Literal["dynamic", "static"] = "dynamic",
        block: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(dim, sublayers)
        options: dict[str, Any] = {"streams": streams, "form": form, "backend": backend}
        self.stream_part = HyperConnectionsResidual(dim, sublayers, **options)
        self.depth_part = AttentionResidual(dim, sublayers, block=block, backend=backend)
        self.block = self.depth_part.block
        self.fused = self.stream_part.fused and self.depth_part.fused

    def layout(self, i: int) -> Layout:
        return (*self.stream_part.layout(i), *self.depth_part.layout(i))

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        (streams,) = self.stream_part.layouts_at(verb, i)
        return tuple((*streams, *depth) for depth in self.depth_part.layouts_at(verb, i))

    # The streams' tensors come first: their number is known.
    def _parts(self, state: State, verb: Next, i: int) -> tuple[State, State]:
        (streams,) = self.stream_part.layouts_at(verb, i)
        return state[: len(streams)], state[len(streams) :]

    def _begin(self, x: Tensor) -> State:
        return (*self.stream_part.begin(x), *self.depth_part.begin(x))

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        streams, depth = self._parts(state, "read", i)
        x, streams = self.stream_part.read(streams, i)
        y, depth = self.depth_part.read(depth, i)
        both = cast(Tensor, x) + cast(Tensor, y)
        return apply_norm(norm, both), (*streams, *depth)

    def _write(self, state: State, i: int, y: Tensor) -> State:
        streams, depth = self._parts(state, "write", i)
        streams = self.stream_part.write(streams, i, y)
        depth = self.depth_part.write(depth, i, y)
        return (*streams, *depth)

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        streams, depth = self._parts(state, "read", self.sublayers)
        return apply_norm(norm, self.stream_part.end(streams) + self.depth_part.end(depth))

    def _weights(self, state: State, i: int) -> Tensor:
        """Weigh the streams, then the sources."""
        streams, depth = self._parts(state, "read", i)
        weights = self.stream_part.weights(streams, i), self.depth_part.weights(depth, i)
        return torch.cat(weights)

    def settle(self, state: State, i: int) -> State:
        streams, depth = self._parts(state, "read", i)
        return (*streams, *self.depth_part.settle(depth, i))

    def adopt(self, state: State, i: int) -> State:
        streams, depth = self._parts(state, "read", i)
        return (*streams, *self.depth_part.adopt(depth, i))

    def keep_only(self, start: int, stop: int) -> None:
        self.stream_part.keep_only(start, stop)
        self.depth_part.keep_only(start, stop)
        self.forget_layouts()

    def flops_per_token(self) -> int:
        parts = self.stream_part.flops_per_token() + self.depth_part.flops_per_token()
        # And the sum of the two reads.
        return parts + self.dim * self.sublayers
