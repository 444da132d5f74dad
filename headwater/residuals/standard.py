"""Residuals that keep one running stream. The plain residual is one of them: the baseline runs
through the same interface."""

from torch import Tensor

from headwater.ops.routing import Backend

from .base import Layout, Norm, Residual, State, apply_norm, even_weights
from .one_token import PlainStream
from .registry import register


class StreamResidual(Residual):
    """Every read is the stream; a subclass says in `write` how a sublayer's output joins it."""

    def layout(self, i: int) -> Layout:
        return ("stream",)

    def _begin(self, x: Tensor) -> State:
        return (x,)

    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        return apply_norm(norm, state[0]), state

    def _end(self, state: State, norm: Norm | None) -> Tensor:
        return apply_norm(norm, state[0])

    def _weights(self, state: State, i: int) -> Tensor:
        return even_weights(state[0])


@register("standard")
class StandardResidual(StreamResidual):
    """h_{i+1} = h_i + f_i(h_i): every output, weight one.

    At initialisation: it is the plain residual. Cost: no parameters; 3 passes over the stream per
    sublayer.
    """

    at_start = "exact"
    fused = True

    def _write(self, state: State, i: int, y: Tensor) -> State:
        return (state[0] + y,)

    def one_token(self, stream: Tensor, backend: Backend) -> PlainStream | None:
        # A subclass may read or write otherwise.
        return PlainStream(stream, backend) if type(self) is StandardResidual else None
