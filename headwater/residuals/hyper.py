"""Hyper-Connections: n streams with learned reads, writes and mixing, constant or computed from the streams."""

from typing import Literal, cast

import torch
from torch import Tensor, nn

from headwater.ops.routing import Backend

from .numerics import wide
from .registry import register
from .streams import StreamsResidual


class Connection(nn.Module):
    """Columns of `dynamic` and `width`: post, pre, res."""

    def __init__(self, dim: int, streams: int, read_from: int, dynamic: bool) -> None:
        super().__init__()
        self.post = nn.Parameter(torch.ones(streams))
        self.pre = nn.Parameter(torch.eye(streams)[read_from].clone())
        self.res = nn.Parameter(torch.eye(streams))
        self.dynamic = nn.Parameter(torch.zeros(streams + 2, dim)) if dynamic else None
        self.post_scale = nn.Parameter(torch.full((1,), 0.01)) if dynamic else None
        self.mix_scale = nn.Parameter(torch.full((1,), 0.01)) if dynamic else None


@register("hyper-connections")
class HyperConnectionsResidual(StreamsResidual):
    """x = sum_j p_j X_j;  X'_j = sum_i R_ij X_i + b_j f(x): n streams, each coefficient learned.

    `streams`: n, the number of streams.
    `form`: with static, coefficients are constants, and with dynamic each is a constant plus s tanh(W RMSNorm(X_j)),
        where s starts at 0.01.
    `backend`: reads and writes run as in `headwater.depth_attention`.
    At initialisation: p is one-hot on stream i mod n, b = 1, R = I, W = 0: every stream is the plain residual, and the
    sum of n equal streams is it up to the scale n that the final norm cancels.
    Left out: the paper's sqrt(n) on output projections, whose direction is ambiguous, and a norm weight, which W
    absorbs.
    Cost: n(n + 2) parameters per sublayer, and D(n + 2) + 2 when dynamic; the state holds n D.
    Hyper-Connections, arXiv 2409.19606.
    """

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        streams: int = 4,
        form: Literal["dynamic", "static"] = "dynamic",
        backend: Backend = "auto",
    ) -> None:
        super().__init__(dim, sublayers, streams=streams, backend=backend)
        if streams < 1:
            raise ValueError(f"streams must be at least 1, got {streams}")
        self.at_start = "exact" if streams == 1 else "scaled"
        self.connections = nn.ModuleDict(
            {
                str(i): Connection(dim, streams, i % streams, form == "dynamic")
                for i in range(sublayers)
            }
        )

    def projection(self, i: int) -> tuple[Tensor, float] | None:
        weight = cast(Connection, self.connections[self.keys[i]]).dynamic
        return None if weight is None else (weight, 1e-6)

    def gates(self, z: Tensor | None, x: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        connection = cast(Connection, self.connections[self.keys[i]])
        shape = x.shape[:-2]
        dtype = wide(x).dtype
        post, pre, res = (p.to(dtype) for p in (connection.post, connection.pre, connection.res.mT))
        if z is None or connection.post_scale is None or connection.mix_scale is None:
            return pre.expand(*shape, -1), post.expand(*shape, -1), res.expand(*shape, -1, -1)
        dynamic_post, dynamic_pre, dynamic_res = z.tanh().split((1, 1, self.streams), dim=-1)
        post = post + connection.post_scale.to(dtype) * dynamic_post.squeeze(-1)
        pre = pre + connection.mix_scale.to(dtype) * dynamic_pre.squeeze(-1)
        return pre, post, res + connection.mix_scale.to(dtype) * dynamic_res.mT

    def coefficient_products(self) -> int:
        """Every stream makes its own."""
        matrices = (
            cast(Connection, connection).dynamic for connection in self.connections.values()
        )
        return self.streams * sum(matrix.numel() for matrix in matrices if matrix is not None)
