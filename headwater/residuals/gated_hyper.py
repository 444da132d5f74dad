"""Gated Hyper-Connections: a sublayer reads the mean of normed streams, each channel of which has a
gate, and writes to all."""

from collections.abc import Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.ops.routing import Backend
from headwater.ops.streams import write_streams

from .base import Layout, Next, Norm, Residual, State, apply_norm, hold, weights_held
from .numerics import project, rms_scale, wide
from .options import check_range
from .registry import register
from .streams import unmixed


class Gates(nn.Module):
    """Parameters of one read, and of the write that follows it unless it is the final read."""

    def __init__(self, dim: int, streams: int, rank: int, writes: bool, random: bool) -> None:
        super().__init__()
        width = streams * dim
        # The weight is one plus this, as in the release.
        self.norm = nn.Parameter(torch.zeros(streams, dim))
        self.down = nn.Parameter(torch.zeros(rank, width))
        self.up = nn.Parameter(0.02 * torch.randn(width, rank))
        self.inject = nn.Parameter(torch.zeros(streams, width)) if writes else None
        if random:
            nn.init.normal_(self.down, std=0.02)
            if self.inject is not None:
                nn.init.normal_(self.inject, std=0.02)


@register("gated-hc")
class GatedHyperResidual(Residual):
    """x = sum_j G_j U_j;  X'_j = X_j + 2 sigmoid(w_j U) f(x);  U_j = RMSNorm(X_j) / n;  G = sigmoid(A SiLU(B U)).

    G has a gate for each channel of each stream. A, B, w and the norm's weight are the sublayer's,
    and the head has a read of its own. A read is made of normed streams: in the release no pre-norm
    and no final norm follow.
    `streams`: n, the number of streams.
    `rank`: rows of B, by default an eighth of the width.
    `start`: identity has B = 0 and w = 0, and normal draws both from N(0, 0.02) (transformers);
        A is from N(0, 0.02) in either case, which lets the streams part.
    `eps`: of the norms.
    `backend`: writes run as in `headwater.depth_attention`, by the kernel of mhc; reads have none.
    At initialisation: with start=identity a read is half the normed stream, and a write adds the
    output to every stream, so it is the plain residual up to a scale.
    Cost: n D (2 r + 1 + n) parameters per sublayer; the state holds n D. Qwen4Exp, in transformers
    5.23.
    """

    mixes = "channel"
    derived = ("rank",)

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        streams: int = 4,
        rank: int | None = None,
        start: Literal["identity", "normal"] = "identity",
        eps: float = 1e-6,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(dim, sublayers)
        check_range("streams", streams, 2)
        rank = max(1, dim // 8) if rank is None else rank
        check_range("rank", rank, 1)
        self.at_start = "scaled" if start == "identity" else "different"
        self.streams = streams
        self.rank = rank
        self.eps = eps
        self.backend: Backend = backend
        self.gates = nn.ModuleDict()
        for i in range(sublayers + 1):
            sizes = dim, streams, rank
            self.gates[str(i)] = Gates(*sizes, writes=i < sublayers, random=start == "normal")

    def layout(self, i: int) -> Layout:
        return ("streams",)

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        return (("streams",) if verb == "read" else ("streams", "post"),)

    def _begin(self, x: Tensor) -> State:
        return (x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, self.dim),)

    def coefficients(self, x: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        """Return what read i multiplies each number of the streams (..., n, D) by, and the factors
        of the write behind it, (..., n), in fp32."""
        gates, n = cast(Gates, self.gates[self.keys[i]]), self.streams
        norm = (1 + wide(gates.norm)) * rms_scale(x, self.eps)
        normed = (wide(x) * norm).flatten(-2)
        # Matrices as large as a sublayer's are multiplied in the dtype of the sublayers.
        low = normed.to(x.dtype)
        hidden = F.silu(F.linear(low, gates.down.to(x.dtype)) / n)
        gate = wide(F.linear(hidden, gates.up.to(x.dtype))).sigmoid()
        pre = gate.unflatten(-1, (n, self.dim)) * norm / n
        if gates.inject is None:
            return pre, None
        return pre, 2 * (project(normed, gates.inject) / n).sigmoid()

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        (x,) = state
        pre, post = self.coefficients(x, i)
        return self._mixed(x, pre, norm), (x, hold(cast(Tensor, post)))

    def _mixed(self, x: Tensor, pre: Tensor, norm: Norm | None) -> Tensor:
        h = (hold(pre) * wide(x)).sum(-2).to(x.dtype)
        return apply_norm(norm, h)

    def _write(self, state: State, i: int, y: Tensor) -> State:
        x, post = state
        backend: Backend = "reference" if weights_held() else self.backend
        return (write_streams(x, y, post, unmixed(post), backend=backend),)

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        (x,) = state
        return self._mixed(x, self.coefficients(x, self.sublayers)[0], norm)

    def _weights(self, state: State, i: int) -> Tensor:
        """Weigh the channels of the streams, (n, ..., D)."""
        return self.coefficients(state[0], i)[0].movedim(-2, 0)

    def flops_per_token(self) -> int:
        width = self.streams * self.dim
        # Of each read the norm, its weight, the gate and the sum; of each write the sum.
        matrices = sum(parameter.numel() for parameter in self.gates.parameters())
        norms = width * (self.sublayers + 1)
        return 2 * (matrices - norms) + 5 * norms + 2 * width * self.sublayers
