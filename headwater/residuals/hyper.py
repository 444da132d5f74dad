"""Hyper-Connections: n streams with learned reads, writes and mixing, constant or computed from the
streams."""

from typing import Literal, cast

import torch
from torch import Tensor, nn

from headwater.ops.routing import Backend

from .numerics import wide
from .options import check_range
from .registry import register
from .streams import StreamsResidual


class Connection(nn.Module):
    """Columns of `dynamic` and `width`: post, pre, res."""

    def __init__(self, dim: int, streams: int, read_from: int, dynamic: bool) -> None:
        super().__init__()
        self.post = nn.Parameter(torch.ones(streams))
        # A one-hot read, writes to all streams, and no mixing.
        self.pre = nn.Parameter(torch.eye(streams)[read_from].clone())
        self.res = nn.Parameter(torch.eye(streams))
        self.dynamic = nn.Parameter(torch.zeros(streams + 2, dim)) if dynamic else None
        self.post_scale = nn.Parameter(torch.full((1,), 0.01)) if dynamic else None
        self.mix_scale = nn.Parameter(torch.full((1,), 0.01)) if dynamic else None


@register("hyper-connections")
class HyperConnectionsResidual(StreamsResidual):
    """x = sum_j p_j X_j;  X'_j = sum_i R_ij X_i + b_j f(x): n streams, each coefficient learned.

    `streams`: n, the number of streams.
    `form`: with static, coefficients are constants, and with dynamic each is a constant plus s
        tanh(W RMSNorm(X_j)), where s starts at 0.01.
    `backend`: reads and writes run as in `headwater.depth_attention`.
    At initialisation: p is one-hot on stream i mod n, b = 1, R = I, W = 0: every stream is the
    plain residual, and the sum of n equal streams is it up to the scale n that the final norm
    cancels.
    Left out: the paper's sqrt(n) on output projections, whose direction is ambiguous, and a norm
    weight, which W absorbs.
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
        check_range("streams", streams, 1)
        dynamic = {"dynamic": True, "static": False}[form]
        self.at_start = "exact" if streams == 1 else "scaled"
        self.connections = nn.ModuleDict()
        for i in range(sublayers):
            self.connections[str(i)] = Connection(dim, streams, i % streams, dynamic)

    def projection(self, i: int) -> tuple[Tensor, float] | None:
        weight = cast(Connection, self.connections[self.keys[i]]).dynamic
        return None if weight is None else (weight, 1e-6)

    def gates(self, z: Tensor | None, x: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        connection = cast(Connection, self.connections[self.keys[i]])
        dtype = wide(x).dtype
        post = connection.post.to(dtype)
        pre = connection.pre.to(dtype)
        res = connection.res.mT.to(dtype)
        # Constants are the same for every token.
        if z is None or connection.post_scale is None or connection.mix_scale is None:
            tokens = x.shape[:-2]
            pre = pre.expand(*tokens, -1)
            post = post.expand(*tokens, -1)
            return pre, post, res.expand(*tokens, -1, -1)
        # Each stream adds coefficients of its own.
        sizes = (1, 1, self.streams)
        of_post, of_pre, of_res = z.tanh().split(sizes, dim=-1)
        post_scale = connection.post_scale.to(dtype)
        mix_scale = connection.mix_scale.to(dtype)
        post = post + post_scale * of_post.squeeze(-1)
        pre = pre + mix_scale * of_pre.squeeze(-1)
        return pre, post, res + mix_scale * of_res.mT

    def coefficient_products(self) -> int:
        # Every stream makes its own.
        matrices = dict(self.connections.named_parameters())
        dynamic = [matrix for name, matrix in matrices.items() if name.endswith("dynamic")]
        return self.streams * sum(matrix.numel() for matrix in dynamic)
