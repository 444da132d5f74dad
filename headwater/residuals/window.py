"""Attention over a window of depth, with queries, keys and values made from the stream's own states."""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from .base import Layout, Next, Norm, Residual, State, apply_norm, hold
from .numerics import combine, project, project_normed, rms_scale
from .registry import register


class WindowRead(nn.Module):
    """Parameters of a read. One source leaves no choice, hence no query; `for_others`: later reads use its keys."""

    def __init__(self, dim: int, width: int, sources: int, for_others: bool) -> None:
        super().__init__()
        std = dim**-0.5
        self.query = nn.Parameter(std * torch.randn(width, dim)) if sources > 1 else None
        self.key = (
            nn.Parameter(std * torch.randn(width, dim)) if sources > 1 or for_others else None
        )
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

    n_j = RMSNorm(h_j).
    `window`: j runs over this many of the last states, the current one included, by default 4 at most.
    `width`: W, the width of queries, keys and values, D / 4 unless given.
    `maps`: with state, state j makes its key and value once, by its own matrices, for all reads, with reader, read i
        makes them by its own, K_i n_j and V_i n_j, as the paper writes it, and with shared, one Q, K, V and O serve all
        depths, which is exactly short attention along the depth.
    The paper leaves open how the read enters and how it starts; here it is added to the stream through O.
    At initialisation: O = 0, the plain residual exactly. The first read has one source and no query of its own.
    Cost: 4 W D parameters per sublayer (in all, if shared); the state holds the stream and K keys and values of width
    W;
    for reader, whose matrices see K states each, K states of width D. Shared maps cannot be cut into pipeline stages.
    Residual Stream Duality, arXiv 2603.16039.
    """

    at_start = "exact"
    mixes = "operator"
    derived = ("window", "width")

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        window: int | None = None,
        width: int | None = None,
        maps: Literal["state", "reader", "shared"] = "state",
    ) -> None:
        super().__init__(dim, sublayers)
        window = max(2, min(4, sublayers)) if window is None else window
        if not 2 <= window <= max(2, sublayers):
            raise ValueError(
                f"window counts states, the current one included, and must lie between 2 and {sublayers}, got {window}"
            )
        width = max(1, dim // 4) if width is None else width
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        self.window, self.width, self.maps = window, width, maps
        counts_by_sublayer = {str(i): min(i + 1, window) for i in range(sublayers)}
        counts = {"0": min(window, sublayers)} if maps == "shared" else counts_by_sublayer
        self.reads = nn.ModuleDict(
            {key: WindowRead(dim, width, count, maps != "reader") for key, count in counts.items()}
        )

    def layout(self, i: int) -> Layout:
        kinds = ("state",) if self.maps == "reader" else ("key", "value")
        return ("stream", *(f"{name} {n}" for name in kinds for n in range(self.held(i))))

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        return (self.layout(i if verb == "read" else i + 1),)

    def held(self, i: int) -> int:
        """States that are kept before read i: their keys and values, or themselves."""
        return min(i, self.window - 1 if self.maps == "reader" else self.window)

    def may_cut(self, i: int) -> bool:
        return self.maps != "shared"

    def _begin(self, x: Tensor) -> State:
        return (x,)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        h, read = state[0], self._parameters_of(i)
        keys, values, window = self._window(state, i)
        mixed = values[0]
        if read.query is not None and len(values) > 1:
            mixed = attend(project(h, read.query) * hold(rms_scale(h)), keys, values)
        x = (h + project(mixed, read.output)).to(h.dtype)
        return apply_norm(norm, x), (x, *window)

    def _write(self, state: State, i: int, y: Tensor) -> State:
        return (state[0] + y, *state[1:])

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        return apply_norm(norm, state[0])

    def _weights(self, state: State, i: int) -> Tensor:
        """Over the states in the window, oldest first; the final read is the stream alone."""
        h = state[0]
        if i == 0 or i == self.sublayers:
            return torch.ones(1, *h.shape[:-1], 1, device=h.device)
        query = self._parameters_of(i).query
        assert query is not None
        return window_weights(project_normed(h, query), self._window(state, i)[0])

    def flops_per_token(self) -> int:
        reads = sum(min(i + 1, self.window) for i in range(self.sublayers))
        keys_and_values = 2 * reads - 1 if self.maps == "reader" else 2 * self.sublayers
        maps = (
            keys_and_values + 2 * self.sublayers - 1
        )  # queries, but for the first read, and outputs
        return (
            2 * self.width * self.dim * maps
            + 4 * self.width * reads
            + 2 * self.dim * self.sublayers
        )

    def _window(self, state: State, i: int) -> tuple[State, State, State]:
        """Keys and values of the states that read i sees, the current one last; and what the state keeps after it."""
        h, read, count = state[0], self._parameters_of(i), self.held(i)
        if self.maps == "reader":
            states = (*state[1:], h)
            scales = [
                hold(rms_scale(x)) for x in states
            ]  # of the norm, applied to the narrow projections instead
            keys, values = (
                tuple(project(x, m) * scale for x, scale in zip(states, scales, strict=True))
                if m is not None
                else ()
                for m in (read.key, read.value)
            )
            return keys, values, states[len(states) - self.held(i + 1) :]
        assert read.key is not None
        older = min(count, self.window - 1)
        scale = hold(rms_scale(h))
        keys = (*state[1 + count - older : 1 + count], project(h, read.key) * scale)
        values = (*state[1 + 2 * count - older :], project(h, read.value) * scale)
        return keys, values, (*keys, *values)

    def _parameters_of(self, i: int) -> WindowRead:
        return cast(WindowRead, self.reads["0" if self.maps == "shared" else self.keys[i]])
