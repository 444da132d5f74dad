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

    names: tuple[tuple[str, str], ...]  # the module's name of an argument, and the layer's
    constant: tuple[tuple[str, Any], ...]
    without: frozenset[str] | None  # of all others, those it does not get; None: it gets no others

    def given(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Choose for a call of the module from the arguments that the layer was called with."""
        arguments = {name: kwargs[key] for name, key in self.names if key in kwargs}
        # What the module would add itself is added by the residual.
        arguments.update(self.constant)
        if self.without is not None:
            arguments |= {name: kwargs[name] for name in kwargs if name not in self.without}
        return arguments


def takes(
    module: nn.Module, layer: nn.Module, everything: bool, renames: Mapping[str, str]
) -> Takes:
    """Match a module's arguments with those of its layer.

    `renames`: the layer's names of arguments that the module calls otherwise.

    `everything`: pass also what the module does not name, if it has **kwargs, as attention hands them
    to its kernel.
    """
    names, of_layer = _parameters(module)[1:], _parameters(layer)
    pairs: tuple[tuple[str, str], ...] = ()
    for name in names:
        if name not in NOTHING:
            pairs += ((name, renames.get(name) or _in_layer(name, of_layer)),)
    constant = tuple((name, NOTHING[name]) for name in names if name in NOTHING)
    # An MLP gets no mask that it does not ask for.
    if not everything or not _takes_any(module):
        return Takes(pairs, constant, None)
    without = {key for _, key in pairs}
    # A module with a state of its own gets the arguments that it names, and those that are not in
    # the layer's signature.
    if any(name != key for name, key in pairs):
        without |= {*of_layer}
    return Takes(pairs, constant, frozenset(without))


def unknown(module: nn.Module, layer: nn.Module) -> list[str]:
    """Arguments of `module` that a layer of this kind cannot give it: it would run without them, or not at all."""
    if _takes_any(layer):
        return []  # they may come among the others
    of_layer = _parameters(layer)
    names = [name for name in _parameters(module)[1:] if name not in NOTHING]
    return [name for name in names if _in_layer(name, of_layer) not in of_layer]


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """The cache that a layer was called with, under whichever name."""
    return next((kwargs[name] for name in CACHE if kwargs.get(name) is not None), None)


def _in_layer(name: str, of_layer: list[str]) -> str:
    """The layer's name for an argument: a cache has several."""
    # Arguments have one name everywhere, but for the cache.
    if name in of_layer or name not in CACHE:
        return name
    return next((other for other in CACHE if other in of_layer), name)


def positional_names(layer: nn.Module) -> tuple[str, ...]:
    """Names of the layer's positional arguments after the hidden state."""
    return tuple(_parameters(layer)[1:])


def _parameters(module: nn.Module) -> list[str]:
    """Names without `self`, *args and **kwargs. Of a layer that is converted already: as it was."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _takes_any(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)
