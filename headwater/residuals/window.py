"""Attention over a window of depth, with queries, keys and values made from the stream's own states."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from .base import Layout, Next, Norm, Residual, State, apply_norm, hold
from .numerics import combine, project, project_normed, rms_scale
from .registry import register


class WindowRead(nn.Module):
    def __init__(self, dim: int, width: int, sources: int) -> None:
        super().__init__()
        std = dim**-0.5
        self.query = nn.Parameter(std * torch.randn(width, dim)) if sources > 1 else None
        self.key = nn.Parameter(std * torch.randn(width, dim))
        self.value = nn.Parameter(std * torch.randn(width, dim))
        self.output = nn.Parameter(torch.zeros(dim, width))


def attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """One query over N sources of each token, all (..., W): softmax(<query, key_n> / sqrt(W)) over n, applied."""
    weights = hold(window_weights(query, keys))
    return combine(values, weights.unbind(0))


def window_weights(query: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """(N, ..., 1)"""
    logits = torch.stack([(query * key).sum(-1, keepdim=True) for key in keys])
    return (logits / query.shape[-1] ** 0.5).softmax(0)


@register("depth-window")
class DepthWindowResidual(Residual):
    """x_i = h_i + O_i sum_j softmax_j(<Q_i n_i, K_j n_j> / sqrt(W)) V_j n_j;  h_{i+1} = x_i + f_i(x_i).

    j runs over the last K = `window` states, the current one included; n_j = RMSNorm(h_j); W = `width` of queries, keys
    and values (D / 4 unless given). State j makes its key and value once, with its own matrices, for all reads.
    The paper leaves open how the read enters and how it starts; here it is added to the stream through O.
    At initialisation: O = 0, the plain residual exactly. The first read has one source and no query.
    Cost: 4 W D parameters a sublayer; the state holds the stream and K keys and values of width W.
    Residual Stream Duality, arXiv 2603.16039.
    """

    at_start = "exact"
    mixes = "operator"
    derived = ("window", "width")

    def __init__(self, dim: int, sublayers: int, *, window: int | None = None, width: int | None = None) -> None:
        super().__init__(dim, sublayers)
        window = max(2, min(4, sublayers)) if window is None else window
        if not 2 <= window <= max(2, sublayers):
            raise ValueError(
                f"window counts states, the current one included, and must lie between 2 and {sublayers}, got {window}"
            )
        width = max(1, dim // 4) if width is None else width
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        self.window, self.width = window, width
        self.reads = nn.ModuleDict({str(i): WindowRead(dim, width, min(i + 1, window)) for i in range(sublayers)})

    def layout(self, i: int) -> Layout:
        return self._layout(self.held(i))

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        return (self._layout(self.held(i if verb == "read" else i + 1)),)

    def held(self, i: int) -> int:
        """States whose keys and values are kept before read i."""
        return min(i, self.window)

    def _layout(self, held: int) -> Layout:
        return ("stream", *(f"key {n}" for n in range(held)), *(f"value {n}" for n in range(held)))

    def _begin(self, x: Tensor) -> State:
        return (x,)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        h = state[0]
        read = self._parameters_of(i)
        scale = hold(rms_scale(h))  # of the norm, applied to the narrow projections instead of h
        keys, values = self._window(state, i)
        keys, values = (*keys, project(h, read.key) * scale), (*values, project(h, read.value) * scale)
        mixed = values[0] if read.query is None else attend(project(h, read.query) * scale, keys, values)
        x = (h + project(mixed, read.output)).to(h.dtype)
        return apply_norm(norm, x), (x, *keys, *values)

    def _write(self, state: State, i: int, y: Tensor) -> State:
        return (state[0] + y, *state[1:])

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        return apply_norm(norm, state[0])

    def _weights(self, state: State, i: int) -> Tensor:
        """Over the states in the window, oldest first; the final read is the stream alone."""
        h = state[0]
        if i == self.sublayers or (read := self._parameters_of(i)).query is None:
            return torch.ones(1, *h.shape[:-1], 1, device=h.device)
        keys = (*self._window(state, i)[0], project_normed(h, read.key))
        return window_weights(project_normed(h, read.query), keys)

    def flops_per_token(self) -> int:
        matrices = sum(p.numel() for p in self.parameters())
        reads = sum(min(i + 1, self.window) for i in range(self.sublayers))
        return 2 * matrices + 4 * self.width * reads + 2 * self.dim * self.sublayers

    def _window(self, state: State, i: int) -> tuple[State, State]:
        """Keys and values of the earlier states that read i still sees."""
        count = self.held(i)
        kept = min(count, self.window - 1)
        return state[1 + count - kept : 1 + count], state[1 + 2 * count - kept :]

    def _parameters_of(self, i: int) -> WindowRead:
        return cast(WindowRead, self.reads[str(i)])
