"""The interface: how a network's depth is connected.

    state = residual.begin(x)                            # the embedding becomes the first source
    for i, (norm, sublayer) in enumerate(sublayers):
        x, state = residual.read(state, i, norm=norm)    # what sublayer i sees
        state = residual.write(state, i, sublayer(x))    # absorb what it produced
    x = residual.end(state, norm=final_norm)

The state is a flat tuple of tensors, owned by the caller; nothing of a forward pass lives in
`self`. What the tuple holds before each read and each write is a table (`layouts`), which every
verb checks. Outside torch.compile a state also knows its place, so that a write whose result was
dropped, or an early end, is an error.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from itertools import chain
from typing import Any, Literal, Self, overload

import torch
from torch import Tensor, nn

from headwater.ops.routing import Backend

from .one_token import OneToken

State = tuple[Tensor, ...]
# What a sublayer sees: one input, or (query, key, value) inputs.
Read = Tensor | tuple[Tensor, Tensor, Tensor]
Norm = Callable[[Tensor], Tensor]
Layout = tuple[str, ...]  # the names of a state's tensors, in order
Next = Literal["read", "write"]


class Placed(tuple[Tensor, ...]):
    """A state that knows its place: before read or write `i`.

    A plain tuple of as many tensors is taken as well: what crossed a pipeline stage, activation
    checkpointing or the compiler is a plain tuple.
    """

    place: tuple[Next, int]
    # Shape of what was read: the sublayer's output has the same.
    shape: torch.Size | None = None

    def __new__(cls, tensors: State, place: tuple[Next, int] | None = None) -> Any:
        # Others, such as FSDP, rebuild a state as `type(state)(tensors)` to move or cast it.
        if place is None:
            return tuple(tensors)
        placed = super().__new__(cls, tensors)
        placed.place = place
        return placed

    def __getnewargs__(self) -> tuple[State, tuple[Next, int]]:
        return tuple(self), self.place


class Residual(nn.Module, ABC):
    """A way to connect a network's depth: one object per network, or per pipeline stage.

    Callers use `begin`, `read`, `write`, `end` and `weights`. A subclass writes `_begin`, `_read`,
    `_write`, `_end` and `_weights` with the same arguments, and says in `layout` what its states
    hold. Parameters of sublayer i live in a ModuleDict or ParameterDict under the key
    `self.keys[i]`, which is str(i), so that a pipeline stage keeps its own by name. (A method takes
    the key from that tuple: torch.compile cannot make text of a number that varies.)

    Arguments of the constructor: `dim`, the width D of the stream; `sublayers`, how many sublayers
    read and write.
    """

    # Against the plain residual at initialisation: "exact", "scaled" or "different".
    at_start: str
    # A source enters a read times one "scalar" per token, one per "channel", or an "operator".
    mixes: str = "scalar"
    # False: a read looks at earlier tokens of the stream; `resume` and `past` carry those.
    token_local: bool = True
    # Options whose default depends on the network; a saved spec names their values.
    derived: tuple[str, ...] = ()
    # Kinds of the sublayers, if `build` was told.
    kinds: tuple[str, ...] = ()
    # A model multiplies value, MLP and output weights by this at initialisation.
    weight_gain: float = 1.0
    # True: reads and writes are kernels, or next to nothing, so that compiling them gains little.
    fused: bool = False
    # False: outputs of zero have no gradient that one could use; a model starts none there.
    takes_zero: bool = True
    # Reads whose results are in memory together.
    reads_at_once: int = 1
    # Arguments of the constructor.
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __init__(self, dim: int, sublayers: int) -> None:
        super().__init__()
        self.dim = dim
        self.sublayers = sublayers
        self.spec = type(self).__name__
        self.keys = tuple(str(i) for i in range(sublayers + 1))

    def __new__(cls, *sizes: Any, **options: Any) -> Self:
        """Keep the arguments of the constructor, for `reset_parameters`."""
        # Behind nn.Module's back, whose __init__ has not run yet.
        residual = super().__new__(cls)
        residual.__dict__["_arguments"] = (sizes, options)
        return residual

    def reset_parameters(self) -> None:
        """Give every parameter and buffer the value that it starts with.

        For a model that is built on the meta device, after `to_empty`. Random starts draw from
        torch's generator of the device, in the order of the constructor.
        """
        parameter = next(self.parameters(), None)
        if parameter is None:
            return
        sizes, options = self._arguments
        with parameter.device:
            start = type(self)(*sizes, **options)
        # Built on the same device, so that the draws are those of its generator.
        values = dict(chain(start.named_parameters(), start.named_buffers()))
        # The tensors of this residual decide: a pipeline stage has those of its sublayers only.
        with torch.no_grad():
            for name, tensor in chain(self.named_parameters(), self.named_buffers()):
                tensor.copy_(_distribute_like(tensor, values[name]))

    def begin(self, x: Tensor) -> State:
        """Return the state before the first read; `x` is the token embedding, (..., D).

        Raises ValueError for another width.
        """
        if torch.compiler.is_compiling():
            return self._begin(x)
        self._check_tensor(x, "begin")
        watcher = _watcher_of(self)
        return Placed(watcher.begin(self, x), ("read", 0))

    def resume(self, x: Tensor, past: State) -> State:
        """Begin with tokens that continue earlier tokens.

        `past` is what `past` returned for the earlier tokens, () before the first.
        """
        return self.begin(x)

    def past(self, state: State) -> State:
        """Return what later tokens look back at, from a resumed state before `end`.

        It is empty if reads are token-local.
        """
        return ()

    def read(self, state: State, i: int, norm: Norm | None = None) -> tuple[Read, State]:
        """Return what sublayer `i` sees, and the state to write to.

        Arguments:
            state: what `begin`, or the write before, returned.
            i: the sublayer, 0 to sublayers - 1.
            norm: the sublayer's pre-norm; applied here, because a kernel may fold it into the read.

        Returns (..., D), or three of them for query, key and value where the residual routes them
            apart; and a state.
        Raises ValueError if the state is not one that read `i` takes.
        """
        if torch.compiler.is_compiling():
            x, state = self._read(state, i, norm)
            # A new tuple: the residual may return its argument, which knows an earlier place.
            return x, (*state,)
        # The state before `end` has the layout of a read, but there is no such sublayer.
        if i == self.sublayers:
            raise self._no_such(i)
        self.check(state, "read", i)
        watcher = _watcher_of(self)
        x, state = watcher.read(self, state, i, norm)
        placed = Placed(state, ("write", i))
        placed.shape = x.shape if isinstance(x, Tensor) else x[0].shape
        return x, placed

    def write(self, state: State, i: int, y: Tensor) -> State:
        """Return the state after sublayer `i` produced `y`, (..., D).

        Raises ValueError if the state is not the one that read `i` returned, or if `y` has not the
        shape of what was read.
        """
        if torch.compiler.is_compiling():
            return self._write(state, i, y)
        self.check(state, "write", i)
        # PyTorch would add a tensor of another shape all the same, once for many tokens.
        self._check_tensor(y, f"write {i}", getattr(state, "shape", None))
        watcher = _watcher_of(self)
        return Placed(watcher.write(self, state, i, y), ("read", i + 1))

    def end(self, state: State, norm: Norm | None = None) -> Tensor:
        """Return what the output head sees, (..., D), after the last write; `norm` is the final
        norm."""
        if torch.compiler.is_compiling():
            return self._end(state, norm)
        self.check(state, "read", self.sublayers)
        return _watcher_of(self).end(self, state, norm)

    def weights(self, state: State, i: int) -> Tensor:
        """Return the depth weights of read `i` over what the state holds, (N, ..., H).

        `i == sublayers` is the final read.
        """
        if not torch.compiler.is_compiling():
            self.check(state, "read", i)
        return self._weights(state, i)

    def settle(self, state: State, i: int) -> State:
        """Return the state before read `i` in its shortest form, which any later read can continue.

        This form is sent to another device or pipeline stage. Tensors that are part of both states
        are handed on as they are. A schedule that detaches what it sends in place, as zero-bubble
        pipelines do, copies them first: only the stage knows its schedule, and everybody else would
        pay a copy of each source.
        """
        return state

    def folds_norm(self, state: State, i: int) -> bool:
        """Return whether read `i` of this state applies a norm inside a kernel.

        If not, a caller may as well apply it afterwards.
        """
        return False

    def adopt(self, state: State, i: int) -> State:
        """Return a settled state before read `i`, where a pipeline stage begins, in the form that
        this residual reads on fastest."""
        return state

    def one_token(self, stream: Tensor, backend: Backend) -> OneToken | None:
        """Return this residual for one token of every row, streams (B, D), as a decoding step of
        fused launches takes it; None where it has no such form."""
        return None

    def may_cut(self, i: int) -> bool:
        """Return whether a pipeline may be cut before sublayer `i`.

        It may not where two stages would need the same parameter.
        """
        return True

    def keep_only(self, start: int, stop: int) -> None:
        """Drop the parameters of all sublayers but [start, stop), as a pipeline stage does.

        The final read's, under the key `sublayers`, stay with the last stage.
        """
        indices = range(start, stop + (stop == self.sublayers))
        for name, table in self.named_children():
            if not isinstance(table, nn.ModuleDict | nn.ParameterDict):
                raise TypeError(
                    f"'{self.spec}' keeps '{name}' outside of a dict keyed by sublayer: "
                    "override keep_only"
                )
            for key in list(table):
                if int(key) not in indices:
                    del table[key]

    @abstractmethod
    def _begin(self, x: Tensor) -> State: ...

    @abstractmethod
    def _read(self, state: State, i: int, norm: Norm | None) -> tuple[Read, State]: ...

    @abstractmethod
    def _write(self, state: State, i: int, y: Tensor) -> State: ...

    @abstractmethod
    def _end(self, state: State, norm: Norm | None) -> Tensor: ...

    @abstractmethod
    def _weights(self, state: State, i: int) -> Tensor: ...

    @abstractmethod
    def layout(self, i: int) -> Layout:
        """Name the tensors in a state before read `i`, 0 to sublayers (the final read)."""

    def layouts_at(self, verb: Next, i: int) -> Sequence[Layout]:
        """List the layouts that a state may have before read or write `i`.

        Most residuals have one, the same for both.
        """
        # A read and a write of most residuals leave the tensors' number as it is.
        return (self.layout(i),)

    def forget_layouts(self) -> None:
        """Make the table again after a change of what states hold."""
        self.__dict__.pop("layouts", None)
        self.__dict__.pop("_lengths", None)

    @cached_property
    def layouts(self) -> dict[tuple[Next, int], Sequence[Layout]]:
        """The layouts that states are checked against, by verb and sublayer."""
        table: dict[tuple[Next, int], Sequence[Layout]] = {}
        for i in range(self.sublayers):
            table["read", i] = self.layouts_at("read", i)
            table["write", i] = self.layouts_at("write", i)
        table["read", self.sublayers] = self.layouts_at("read", self.sublayers)
        return table

    @cached_property
    def _lengths(self) -> dict[tuple[Next, int], frozenset[int]]:
        lengths = {}
        for place, layouts in self.layouts.items():
            lengths[place] = frozenset(map(len, layouts))
        return lengths

    def check(self, state: State, verb: Next, i: int) -> None:
        """Raise ValueError unless `state` may stand before read or write `i`. Never compiled."""
        place = (verb, i)
        if place not in self._lengths:
            raise self._no_such(i)
        if isinstance(state, Placed):
            fits = state.place == place
        else:
            # A plain tuple has lost its place: its tensors are counted.
            fits = _is_state(state) and len(state) in self._lengths[place]
        if fits:
            return
        layouts = [f"{len(names)} tensors ({', '.join(names)})" for names in self.layouts[place]]
        raise ValueError(
            f"{self._name(place)} of '{self.spec}' takes the state that the verb before it "
            f"returned, {' or '.join(layouts)}; got {self._describe(state)}"
        )

    def _describe(self, state: State) -> str:
        """Say what came in the place of a state."""
        if isinstance(state, Placed):
            return f"the state for {self._name(state.place)}"
        if not _is_state(state):
            return f"a {type(state).__name__} that is no tuple of tensors"
        return f"{len(state)}: {', '.join(str(tuple(tensor.shape)) for tensor in state)}"

    def _check_tensor(self, x: Tensor, name: str, shape: torch.Size | None = None) -> None:
        """Raise ValueError unless `x` is as wide as the stream, and has the `shape`, if it is
        given."""
        description: object = f"a {type(x).__name__}"
        if isinstance(x, Tensor):
            description = tuple(x.shape)
            if x.shape[-1:] == (self.dim,) and shape in (None, x.shape):
                return
        expected = f"(..., {self.dim})" if shape is None else tuple(shape)
        raise ValueError(f"{name} of '{self.spec}' takes one tensor {expected}; got {description}")

    def _no_such(self, i: int) -> ValueError:
        last = self.sublayers - 1
        return ValueError(
            f"'{self.spec}' connects {self.sublayers} sublayers, 0 to {last}; got {i!r}"
        )

    def _name(self, place: tuple[Next, int]) -> str:
        verb, i = place
        return "end" if i == self.sublayers else f"{verb} {i}"

    @property
    def scalar_mixing(self) -> bool:
        """Return whether one number says how a source enters a read; else the mixing matrix is the
        average over channels."""
        return self.mixes == "scalar"

    def flops_per_token(self) -> int:
        """Count the operations of depth mixing in one forward pass, two per multiply-add."""
        # The sum of every output and the stream.
        return 2 * self.dim * self.sublayers

    def extra_repr(self) -> str:
        return self.spec


def _distribute_like(tensor: Tensor, value: Tensor) -> Tensor:
    """Divide a value over ranks as a parameter is, under FSDP2; the value of the first rank
    counts."""
    # Here, because it takes a second to import.
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, tensor.placements)


def _is_state(state: State) -> bool:
    return isinstance(state, tuple | list) and all(isinstance(t, Tensor) for t in state)


def even_weights(x: Tensor, count: int = 1) -> Tensor:
    """Return weights of one for `count` sources and every token of x (..., D), (count, ..., 1)."""
    return torch.ones(count, *x.shape[:-1], 1, device=x.device)


def sublayer_of(name: str) -> int | None:
    """Return the read that a parameter of a residual belongs to, by the parameter's name.

    Parameters of sublayer i lie under the key i, those of the final read under the next. None: no
    single read.
    """
    for part in name.split("."):
        if part.isdigit():
            return int(part)
    return None


@overload
def apply_norm(norm: Norm | None, x: Tensor) -> Tensor: ...
@overload
def apply_norm(norm: Norm | None, x: Read) -> Read: ...
def apply_norm(norm: Norm | None, x: Read) -> Read:
    """Return `norm` of what a sublayer sees, `x`, or of each of its three inputs; None is no
    norm."""
    if norm is None:
        return x
    if isinstance(x, tuple):
        return norm(x[0]), norm(x[1]), norm(x[2])
    return norm(x)


class Watcher:
    """Stands between the callers of a residual and its verbs inside `watched`.

    This class passes everything on; a subclass looks, or changes what is returned.
    """

    def begin(self, residual: Residual, x: Tensor) -> State:
        return residual._begin(x)

    def read(
        self, residual: Residual, state: State, i: int, norm: Norm | None
    ) -> tuple[Read, State]:
        return residual._read(state, i, norm)

    def write(self, residual: Residual, state: State, i: int, y: Tensor) -> State:
        return residual._write(state, i, y)

    def end(self, residual: Residual, state: State, norm: Norm | None) -> Tensor:
        return residual._end(state, norm)


# Each thread, or asynchronous task, has its own value; nothing is assigned to the residual.
_watchers: ContextVar[tuple[tuple[Residual, Watcher], ...]] = ContextVar("watchers", default=())
_held: ContextVar[bool] = ContextVar("held", default=False)
_NOBODY = Watcher()


@contextmanager
def watched(residual: Residual, watcher: Watcher) -> Iterator[None]:
    """Inside, eager calls of the verbs of `residual` go through `watcher`, and return what it
    returns."""
    with _set(_watchers, (*_watchers.get(), (residual, watcher))):
        yield


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, no watcher sees a call: what a diagnostic replays is not what it looks at."""
    with _set(_watchers, ()):
        yield


def _watcher_of(residual: Residual) -> Watcher:
    # The innermost context counts.
    for owner, watcher in reversed(_watchers.get()):
        if owner is residual:
            return watcher
    return _NOBODY


@contextmanager
def hold_weights() -> Iterator[None]:
    """Inside, `hold` cuts gradients: every residual becomes linear in its sources, which is how
    `mixing` reads it."""
    with _set(_held, True):
        yield


def hold(weights: Tensor) -> Tensor:
    """Return `weights`, without their gradient while a mixing matrix is being read off.

    Every weight or gate that a residual computes from its state passes through here.
    """
    return weights.detach() if weights_held() else weights


def weights_held() -> bool:
    """Return whether the caller is inside `hold_weights`, which is never compiled."""
    return not torch.compiler.is_compiling() and _held.get()


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    # The value before comes back, also after an error.
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
