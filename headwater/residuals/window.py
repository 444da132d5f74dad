"""Attention over a window of depth, with queries, keys and values made from the stream's own
states."""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from .base import Layout, Next, Norm, Residual, State, apply_norm, even_weights, hold
from .numerics import combine, project, project_normed, rms_scale
from .options import check_range
from .registry import register


class WindowRead(nn.Module):
    """The parameters of a read; `for_others`: later reads use its keys."""

    def __init__(self, dim: int, width: int, sources: int, for_others: bool) -> None:
        super().__init__()
        # One source leaves no choice, and nothing to score.
        chooses = sources > 1
        self.query = self._matrix(width, dim) if chooses else None
        self.key = self._matrix(width, dim) if chooses or for_others else None
        self.value = self._matrix(width, dim)
        self.output = nn.Parameter(torch.zeros(dim, width))

    def _matrix(self, width: int, dim: int) -> nn.Parameter:
        return nn.Parameter(dim**-0.5 * torch.randn(width, dim))


def window_weights(query: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Compute softmax(<query, key_n> / sqrt(W)) over N keys (..., W), (N, ..., 1)."""
    products = [(query * key).sum(-1, keepdim=True) for key in keys]
    logits = torch.stack(products)
    return (logits / query.shape[-1] ** 0.5).softmax(0)


@register("depth-window")
class DepthWindowResidual(Residual):
    """x_i = h_i + O_i sum_j softmax_j(<Q_i n_i, K_j n_j> / sqrt(W)) V_j n_j;  h_{i+1} = x_i + f_i(x_i).

    n_j = RMSNorm(h_j).
    `window`: j runs over this many of the last states, the current one included, by default 4 at
        most.
    `width`: W, the width of queries, keys and values, D / 4 unless given.
    `maps`: with state, state j makes its key and value once, by its own matrices, for all reads,
        with reader, read i makes them by its own, K_i n_j and V_i n_j, as the paper writes it, and
        with shared, one Q, K, V and O serve all depths, which is exactly short attention along the
        depth.
    The paper leaves open how the read enters and how it starts; here it is added to the stream
    through O.
    At initialisation: O = 0, the plain residual exactly. The first read has one source and no query
    of its own.
    Cost: 4 W D parameters per sublayer (in all, if shared); the state holds the stream and K keys
    and values of width W;
    for reader, whose matrices see K states each, K states of width D. Shared maps cannot be cut
    into pipeline stages. Residual Stream Duality, arXiv 2603.16039.
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
        width = max(1, dim // 4) if width is None else width
        check_range("window", window, 2, max(2, sublayers))
        check_range("width", width, 1)
        self.window = window
        self.width = width
        self.maps = maps
        self.reads = nn.ModuleDict()
        for i in range(1 if maps == "shared" else sublayers):
            # Shared maps serve the widest window.
            states = min(sublayers if maps == "shared" else i + 1, window)
            self.reads[str(i)] = WindowRead(dim, width, states, maps != "reader")

    def layout(self, i: int) -> Layout:
        # A reader makes keys and values itself: the states are kept.
        kinds = ("state",) if self.maps == "reader" else ("key", "value")
        names = ["stream"]
        for kind in kinds:
            names += [f"{kind} {n}" for n in range(self.held(i))]
        return tuple(names)

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        return (self.layout(i if verb == "read" else i + 1),)

    def held(self, i: int) -> int:
        """Count the states that are kept before read i: their keys and values, or themselves."""
        return min(i, self.window - 1 if self.maps == "reader" else self.window)

    def may_cut(self, i: int) -> bool:
        return self.maps != "shared"

    def _begin(self, x: Tensor) -> State:
        return (x,)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        h, read = state[0], self._parameters_of(i)
        keys, values, window = self._window(state, i)
        # A single state is its own mixture.
        mixed = values[0]
        if read.query is not None and len(values) > 1:
            query = project(h, read.query) * hold(rms_scale(h))
            weights = hold(window_weights(query, keys))
            mixed = combine(values, weights.unbind(0))
        x = (h + project(mixed, read.output)).to(h.dtype)
        return apply_norm(norm, x), (x, *window)

    def _write(self, state: State, i: int, y: Tensor) -> State:
        return (state[0] + y, *state[1:])

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        return apply_norm(norm, state[0])

    def _weights(self, state: State, i: int) -> Tensor:
        """Weigh the states in the window, oldest first; the final read is the stream alone."""
        h = state[0]
        if i == 0 or i == self.sublayers:
            return even_weights(h)
        query = cast(Tensor, self._parameters_of(i).query)
        return window_weights(project_normed(h, query), self._window(state, i)[0])

    def flops_per_token(self) -> int:
        # Each read has a query, but for the first, and an output map.
        reads = sum(min(i + 1, self.window) for i in range(self.sublayers))
        maps = 2 * self.sublayers - 1
        maps += 2 * reads - 1 if self.maps == "reader" else 2 * self.sublayers
        products = 2 * self.width * self.dim * maps
        return products + 4 * self.width * reads + 2 * self.dim * self.sublayers

    def _window(self, state: State, i: int) -> tuple[State, State, State]:
        """Return keys and values of the states that read i sees, the current one last; and what the
        state keeps after the read."""
        h, read, count = state[0], self._parameters_of(i), self.held(i)
        if self.maps == "reader":
            states = (*state[1:], h)
            scales = [hold(rms_scale(x)) for x in states]
            keys = () if read.key is None else self._project(states, scales, read.key)
            values = self._project(states, scales, read.value)
            return keys, values, states[len(states) - self.held(i + 1) :]
        # Each state made its key and value once; the oldest leave a window that is full.
        older = min(count, self.window - 1)
        scales = [hold(rms_scale(h))]
        (key,) = self._project((h,), scales, cast(Tensor, read.key))
        (value,) = self._project((h,), scales, read.value)
        keys = (*state[1 + count - older : 1 + count], key)
        values = (*state[1 + 2 * count - older :], value)
        return keys, values, (*keys, *values)

    def _project(self, states: State, scales: Sequence[Tensor], matrix: Tensor) -> State:
        """Project the normed states; the norms' scales are applied to the narrow projections."""
        return tuple(project(x, matrix) * scale for x, scale in zip(states, scales))

    def _parameters_of(self, i: int) -> WindowRead:
        key = "0" if self.maps == "shared" else self.keys[i]
        return cast(WindowRead, self.reads[key])
