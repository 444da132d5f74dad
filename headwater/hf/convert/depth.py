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

from .devices import bring_back, call_on, hooked, tensors_of
from .norms import ScaledNorm
from .start import new_residual

RESIDUAL = "residual"  # the attribute of the owner, and so the prefix of every added parameter


class Record:
    """The record of one forward pass: depth weights of every read, and what each layer read. Filled at its end."""

    def __init__(self) -> None:
        self.weights: State = ()
        self.reads: State = ()


class _Pending(threading.local):
    """The record that the next pass of this thread fills.

    A model's own loop hands nothing of ours to its first layer, so the record waits here. That layer
    takes it away, and from there on it travels in the state.
    """

    record: Record | None = None


_pending = _Pending()


def watch(run: Callable[[], Any]) -> tuple[Any, Record]:
    """Run a forward pass, and record what its layers see.

    Of two calls around one pass, a head's and a body's, both get the same record.
    """
    record = _pending.record = _pending.record or Record()
    try:
        return run(), record
    finally:
        _pending.record = None


@dataclass(slots=True, eq=False)
class DepthState:
    """The value between layers: the residual's state, before read `at`.

    If a record is to be filled, also the depth weights and reads that were seen on the way.
    """

    tensors: State
    at: int
    record: Record | None = None
    weights: State = ()
    reads: State = ()

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
        tensors = [tensor.to(*args, **kwargs) for tensor in self.tensors]
        return self.after(tuple(tensors), self.at)


@dataclass
class Depth:
    """Data that the sites of one converted model share.

    It is no module: the residual's parameters are registered once. Nothing of a forward pass is kept
    here, so several may run at once.

    `scales[i]` multiplies read i so that, at the start, it is the plain residual's stream (see `start.py`).
    """

    owner: nn.Module  # the model that owns the loop over layers
    kinds: tuple[str, ...]
    scales: tuple[float, ...]
    # Of the reads whose norm a kernel can fold in
    norms: dict[int, ScaledNorm] = field(default_factory=dict)

    @property
    def residual(self) -> Residual:
        """The residual, where it is registered: an adapter may have put its own copy there."""
        return unwrapped(getattr(self.owner, RESIDUAL))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Depth":
        """Copy this with the whole model; a copy of one of its modules stays part of the model."""
        if id(self.owner) not in memo:
            return self
        norms = copy.deepcopy(self.norms, memo)
        return Depth(memo[id(self.owner)], self.kinds, self.scales, norms)

    def begin(self, x: Tensor, layer: nn.Module) -> DepthState:
        # An offloaded residual comes back before its first use.
        if not torch.compiler.is_compiling():
            bring_back(self.residual)
        record, _pending.record = _pending.record, None
        return DepthState(self._run(layer, x.device, 0, "begin", x), 0, record)

    def call(
        self, site: nn.Module, verb: str, state: State, i: int, *args: Any, **kwargs: Any
    ) -> Any:
        """`read`, `write` or `weights` of sublayer i for `site`, the module that asks."""
        return self._run(site, state[0].device, i, verb, state, i, *args, **kwargs)

    def _run(
        self, site: nn.Module, device: torch.device, i: int, verb: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method of the residual where hooks of `site` may have moved the state to."""
        if hooked(site):
            return call_on(device, self.residual, i, verb, *args, **kwargs)
        return getattr(self.residual, verb)(*args, **kwargs)

    def read(self, site: nn.Module, state: State, i: int, norm: Norm | None) -> tuple[Read, State]:
        return self.call(site, "read", state, i, norm=self._scaled(norm, i))

    def _scaled(self, norm: Norm | None, i: int) -> Norm | None:
        """The norm of read i behind the read's scale."""
        # A kernel multiplies and norms in the same pass as it reads.
        folded = self.norms.get(i)
        # It is another where an adapter has wrapped it since, and has no weight to fold in while it is offloaded.
        if folded is not None and folded.norm is norm and not folded.weight.is_meta:
            return folded
        return norm if self.scales[i] == 1.0 else partial(_norm_scaled, norm, self.scales[i])

    def end(self, site: nn.Module, state: DepthState, norm: Norm) -> Tensor:
        """Compute what the head sees.

        Where the loop stopped early, as it does for the drafts of assisted decoding (`assistant_early_exit`), that is
        what the next layer would have read.
        """
        last = self.residual.sublayers
        if state.record is not None:
            weights = self.call(site, "weights", state.tensors, state.at)
            state.record.weights = (*state.weights, weights)
            state.record.reads = state.reads
        # Drafts leave early: the head reads as the next layer would.
        if state.at < last:
            read, _ = self.read(site, state.tensors, state.at, norm)
            return read[0] if isinstance(read, tuple) else read
        # The final norm is a module with the model's own forward: it is called as such.
        scaled: Norm | None = self.norms.get(last)
        if scaled is None or self.norms[last].norm is not site:  # an adapter trains a copy of it
            scaled = partial(_norm_scaled, norm, self.scales[last])
        device = state.tensors[0].device
        return self._run(site, device, last, "end", state.tensors, norm=scaled)


def unwrapped(module: Any) -> Residual:
    """The residual that computes: where PEFT has wrapped it, that of the adapter in use, or the original."""
    # PEFT's wrapper holds a copy for each adapter.
    if isinstance(module, Residual):
        return module
    if not module.disable_adapters:
        # Adapters that do not train the residual leave it to the original.
        for name in module.active_adapters:
            if name in module.modules_to_save:
                return module.modules_to_save[name]
    return module.original_module


def _norm_scaled(norm: Norm | None, scale: float, x: Tensor) -> Tensor:
    x = x * scale
    return x if norm is None else norm(x)


def mark_filled(residual: Residual, filled: bool = True) -> None:
    """transformers' mark on a tensor that has its value, and that its own initialisation leaves alone."""
    for tensor in tensors_of(residual).values():
        tensor._is_hf_initialized = filled  # type: ignore[attr-defined]


@torch.no_grad()
def fill(depth: Depth) -> None:
    """Give start values to what no checkpoint brought."""
    residual = depth.residual
    empty: dict[str, Tensor] = {}
    for name, tensor in tensors_of(residual).items():
        if not tensor.is_meta and not getattr(tensor, "_is_hf_initialized", False):
            empty[name] = tensor
    if not empty:
        return
    # A fresh residual has the values that training would begin with.
    with torch.device("cpu"):
        fresh = new_residual(residual.spec, residual.dim, residual.sublayers, depth.kinds)
    start = tensors_of(fresh)
    for name, tensor in empty.items():
        tensor.copy_(start[name])
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
