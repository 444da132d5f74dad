"""Pass a layer's arguments on to the modules that it calls: masks, positions, and the state of a cache."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

CACHE = ("past_key_values", "cache_params", "layer_past")  # three names for one thing
NOTHING = {"residual": 0.0}  # modules that add the stream to their output themselves are given none


@dataclass(frozen=True)
class Takes:
    """The arguments of a module besides its input, which comes first."""

    named: tuple[tuple[str, str], ...]  # its own name, and the layer's
    constant: tuple[tuple[str, Any], ...]
    without: frozenset[str] | None  # of all others, those it does not get; None: it gets no others

    def given(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """For a call, from those that the layer was called with."""
        found = {own: kwargs[name] for own, name in self.named if name in kwargs}
        found.update(self.constant)
        if self.without is not None:
            found |= {name: value for name, value in kwargs.items() if name not in self.without}
        return found


def takes(module: nn.Module, layer: nn.Module, everything: bool) -> Takes:
    """`everything`: also what the module does not name, if it takes it, as attention hands such on to its kernel."""
    names, known = list(_parameters(module))[1:], _parameters(layer)
    named = tuple((name, _of_layer(name, known)) for name in names if name not in NOTHING)
    constant = tuple((name, NOTHING[name]) for name in names if name in NOTHING)
    if not everything or not _takes_any(module):
        return Takes(named, constant, None)
    renamed = any(own != theirs for own, theirs in named)
    # A module with a state of its own is given what it names, and what no layer names.
    without = {theirs for _, theirs in named} | (set(known) if renamed else set())
    return Takes(named, constant, frozenset(without))


def unknown(module: nn.Module, layer: nn.Module) -> list[str]:
    """Arguments of `module` that a layer of this kind cannot give it: it would run without them, or not at all."""
    if _takes_any(layer):
        return []  # it may come among those
    known = _parameters(layer)
    return [
        n
        for n in list(_parameters(module))[1:]
        if n not in NOTHING and _of_layer(n, known) not in known
    ]


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """The cache that a layer was called with, under whichever name."""
    return next((kwargs[name] for name in CACHE if kwargs.get(name) is not None), None)


def _of_layer(name: str, known: Mapping[str, Any]) -> str:
    if name in known or name not in CACHE:
        return name
    return next((other for other in CACHE if other in known), name)


def positional_names(layer: nn.Module) -> tuple[str, ...]:
    """Names of the layer's positional arguments after the hidden state."""
    return tuple(_parameters(layer))[1:]


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    """By name, without `self`, *args and **kwargs. Of a layer that is converted already: as it was."""
    found = _signature(module).parameters.values()
    return {p.name: p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _takes_any(module: nn.Module) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in _signature(module).parameters.values())


def _signature(module: nn.Module) -> inspect.Signature:
    return inspect.signature(module.forward)
