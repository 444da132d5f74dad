"""The interface: how a network's depth is connected.

    state = residual.begin(x)                            # the embedding becomes the first source
    for i, (norm, sublayer) in enumerate(sublayers):
        x, state = residual.read(state, i, norm=norm)    # what sublayer i sees
        state = residual.write(state, i, sublayer(x))    # absorb what it produced
    x = residual.end(state, norm=final_norm)

The state is a flat tuple of tensors, owned by the caller; nothing of a forward pass lives in `self`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import overload

from torch import Tensor, nn

State = tuple[Tensor, ...]
Read = Tensor | tuple[Tensor, Tensor, Tensor]  # what a sublayer sees: one input, or (query, key, value) inputs
Norm = Callable[[Tensor], Tensor]


class Residual(nn.Module, ABC):
    """One object per network (or pipeline stage). Parameters of sublayer i live under the key str(i)."""

    at_start: str  # against the plain residual at initialisation: "exact", "scaled" or "different"
    mixes: str = "scalar"  # a source enters a read times one "scalar" a token, one per "channel", or an "operator"
    token_local: bool = True  # False: a read looks at earlier tokens of the stream; `resume` and `past` carry those
    derived: tuple[str, ...] = ()  # options whose default depends on the network; a saved spec names their values
    weight_gain: float = 1.0  # by which a model scales value, MLP and output weights at initialisation

    def __init__(self, dim: int, sublayers: int) -> None:
        super().__init__()
        if dim < 1 or sublayers < 1:
            raise ValueError(f"dim and sublayers must be at least 1, got dim={dim}, sublayers={sublayers}")
        self.dim = dim
        self.sublayers = sublayers
        self.spec = type(self).__name__

    @abstractmethod
    def begin(self, x: Tensor) -> State:
        """The state before the first read; `x` is the token embedding, (..., D)."""

    def resume(self, x: Tensor, past: State) -> State:
        """`begin` for tokens that continue earlier ones: `past` is what those left behind, () before the first."""
        return self.begin(x)

    def past(self, state: State) -> State:
        """What later tokens will look back at, from a resumed state before `end`: nothing, if reads are token-local."""
        return ()

    @abstractmethod
    def read(self, state: State, i: int, norm: Norm | None = None) -> tuple[Read, State]:
        """What sublayer `i` sees, passed through its pre-norm if one is given, and the state to write to."""

    @abstractmethod
    def write(self, state: State, i: int, y: Tensor) -> State:
        """The state after sublayer `i` produced `y`."""

    @abstractmethod
    def end(self, state: State, norm: Norm | None = None) -> Tensor:
        """What the output head sees."""

    @abstractmethod
    def weights(self, state: State, i: int) -> Tensor:
        """Depth weights of read `i` over what the state holds, (N, ..., H); `i == sublayers` is the final read."""

    @property
    def scalar_mixing(self) -> bool:
        """Whether the mixing matrix says everything; otherwise it is a summary, the average over channels."""
        return self.mixes == "scalar"

    def flops_per_token(self) -> int:
        """Multiply-adds of depth mixing in one forward pass, counted as two operations each."""
        return 2 * self.dim * self.sublayers

    def extra_repr(self) -> str:
        return self.spec


@overload
def apply_norm(norm: Norm | None, x: Tensor) -> Tensor: ...
@overload
def apply_norm(norm: Norm | None, x: Read) -> Read: ...
def apply_norm(norm: Norm | None, x: Read) -> Read:
    if norm is None:
        return x
    return (norm(x[0]), norm(x[1]), norm(x[2])) if isinstance(x, tuple) else norm(x)


_held = False


@contextmanager
def hold_weights() -> Iterator[None]:
    """Inside, `hold` cuts gradients: every residual becomes linear in its sources, which is how `mixing` reads it."""
    global _held
    before, _held = _held, True
    try:
        yield
    finally:
        _held = before


def hold(weights: Tensor) -> Tensor:
    """Every weight or gate that a residual computes from its state passes through here."""
    return weights.detach() if _held else weights


def weights_held() -> bool:
    return _held
