"""The state between the layers of a converted model, and what its sites share."""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwater.residuals import Norm, Read, Residual, State

from .devices import bring_back, call_on, hooked
from .norms import ScaledNorm
from .start import new_residual

RESIDUAL = "residual"  # the attribute of the owner, and so the prefix of every added parameter


class Record:
    """The record of one forward pass: depth weights of every read, and what each layer read. Filled at its end."""

    def __init__(self) -> None:
        self.weights: State = ()
        self.reads: State = ()


class _Asked(threading.local):
    """The record that the next pass of this thread fills. A model's own loop hands nothing of ours to its first layer,
    so it is left here; that layer takes it away, and from there on it travels in the state."""

    def __init__(self) -> None:
        self.record: Record | None = None


_asked = _Asked()


def watch(run: Callable[[], Any]) -> tuple[Any, Record]:
    """Run a forward pass, and what its layers saw. Of two around one pass, a head's and a body's, both see it."""
    record = _asked.record or Record()
    _asked.record = record
    try:
        outputs = run()
    finally:
        _asked.record = None
    return outputs, record


class DepthState:
    """The value between layers: the residual's state, before read `at`; and, if a record is to be filled, what was
    seen on the way."""

    __slots__ = ("at", "reads", "record", "tensors", "weights")

    def __init__(
        self,
        tensors: State,
        at: int,
        record: Record | None = None,
        weights: State = (),
        reads: State = (),
    ) -> None:
        self.tensors, self.at, self.record, self.weights, self.reads = (
            tensors,
            at,
            record,
            weights,
            reads,
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"between the layers of a converted model goes the residual's state, which has no '{name}': this model "
            "changes its stream there, by image features perhaps, and a conversion does not cover that"
        )

    def after(
        self, tensors: State, at: int, weights: State = (), reads: State = ()
    ) -> "DepthState":
        """The state one step on; `weights` and `reads` are what was seen in that step."""
        return DepthState(
            tensors, at, self.record, (*self.weights, *weights), (*self.reads, *reads)
        )

    def to(self, *args: Any, **kwargs: Any) -> "DepthState":
        """Device maps move what enters a module."""
        return self.after(tuple(tensor.to(*args, **kwargs) for tensor in self.tensors), self.at)


@dataclass
class Depth:
    """Data that the sites of one converted model share. Not a module: the residual's parameters are registered once.
    Nothing of a forward pass is kept here, so several may run at once.

    `scales[i]` multiplies read i so that, at the start, it is the plain residual's stream (see `start.py`).
    """

    owner: nn.Module  # the model that owns the loop over layers
    kinds: tuple[str, ...]
    scales: tuple[float, ...]
    norms: dict[int, ScaledNorm] = field(
        default_factory=dict
    )  # of the reads whose norm a kernel can fold in

    @property
    def residual(self) -> Residual:
        """Looked up where it is registered: an adapter may have put its own copy there."""
        return unwrapped(getattr(self.owner, RESIDUAL))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Depth":
        """With a copy of the whole model goes a copy of this; a copy of one of its modules stays part of the model."""
        if id(self.owner) not in memo:
            return self
        return Depth(memo[id(self.owner)], self.kinds, self.scales, copy.deepcopy(self.norms, memo))

    def begin(self, x: Tensor, layer: nn.Module) -> DepthState:
        if not torch.compiler.is_compiling():
            bring_back(self.residual)
        record, _asked.record = _asked.record, None
        if hooked(layer):
            return DepthState(call_on(x.device, self.residual, 0, "begin", x), 0, record)
        return DepthState(self.residual.begin(x), 0, record)

    def call(
        self, site: nn.Module, verb: str, state: State, i: int, *args: Any, **kwargs: Any
    ) -> Any:
        """`read`, `write` or `weights` of sublayer i for `site`, the module that asks: hooks may have moved it."""
        if hooked(site):
            return call_on(state[0].device, self.residual, i, verb, state, i, *args, **kwargs)
        return getattr(self.residual, verb)(state, i, *args, **kwargs)

    def read(self, site: nn.Module, state: State, i: int, norm: Norm | None) -> tuple[Read, State]:
        return self.call(site, "read", state, i, norm=self.scaled(norm, i))

    def scaled(self, norm: Norm | None, i: int) -> Norm | None:
        """The norm of read i behind the read's scale."""
        prepared = self.norms.get(i)
        # It is another where an adapter has wrapped it since, and has no weight to fold in while it is offloaded.
        if prepared is not None and prepared.norm is norm and not prepared.weight.is_meta:
            return prepared
        return norm if self.scales[i] == 1.0 else partial(_norm_scaled, norm, self.scales[i])

    def end(self, site: nn.Module, state: DepthState, norm: Norm) -> Tensor:
        """Compute what the head sees.

        Where the loop stopped early, as it does for the drafts of assisted decoding (`assistant_early_exit`), that is
        what the next layer would have read.
        """
        last = self.residual.sublayers
        if state.record is not None:
            state.record.weights = (
                *state.weights,
                self.call(site, "weights", state.tensors, state.at),
            )
            state.record.reads = state.reads
        if state.at < last:
            read, _ = self.read(site, state.tensors, state.at, norm)
            return read[0] if isinstance(read, tuple) else read
        prepared = self.norms.get(last)
        if prepared is None or prepared.norm is not site:  # an adapter trains a copy of it
            scaled: Norm = partial(_norm_scaled, norm, self.scales[last])
        else:
            scaled = prepared
        if hooked(site):
            return call_on(
                state.tensors[0].device, self.residual, last, "end", state.tensors, norm=scaled
            )
        return self.residual.end(state.tensors, norm=scaled)


def unwrapped(module: Any) -> Residual:
    """The residual that computes: where PEFT has wrapped it, that of the adapter in use, or the original."""
    if isinstance(module, Residual):
        return module
    names = (
        []
        if module.disable_adapters
        else [n for n in module.active_adapters if n in module.modules_to_save]
    )
    return module.modules_to_save[names[0]] if names else module.original_module


def _norm_scaled(norm: Norm | None, scale: float, x: Tensor) -> Tensor:
    x = x * scale
    return x if norm is None else norm(x)


def mark_filled(residual: Residual, filled: bool = True) -> None:
    """transformers' mark on a tensor that has its value, and that its own initialisation leaves alone."""
    for tensor in (*residual.parameters(), *residual.buffers()):
        tensor._is_hf_initialized = filled  # type: ignore[attr-defined]


@torch.no_grad()
def fill(depth: Depth) -> None:
    """Start values for what no checkpoint brought."""
    residual = depth.residual
    tensors = dict(residual.named_parameters()) | dict(residual.named_buffers())
    empty = {
        name: t
        for name, t in tensors.items()
        if not getattr(t, "_is_hf_initialized", False) and not t.is_meta
    }
    if not empty:
        return
    with torch.device("cpu"):
        fresh = new_residual(residual.spec, residual.dim, residual.sublayers, depth.kinds)
    start = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
    for name, tensor in empty.items():
        tensor.copy_(start[name])
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
