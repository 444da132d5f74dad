"""What a conversion will do, worked out and checked before anything is changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from headwater.errors import UserError, user_values
from headwater.residuals import parse

from .find import Found, check_parallel, find, find_sites, split_inputs
from .layers import Site
from .layouts import Layout
from .start import Start, measure_start


@dataclass(frozen=True)
class Plan:
    """`settings` is what a config keeps of it: the residual, and by what each read is multiplied."""

    found: Found
    groups: list[tuple[Site, ...]]  # the sublayers of each layer
    settings: dict[str, Any]
    start: Start
    split: list[tuple[int, nn.Module]]  # projections that take the query, key or value input of their own

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(site.kind for group in self.groups for site in group)


def new_plan(model: nn.Module, residual: str, layout: Layout | None, exact: bool, options: Mapping[str, Any]) -> Plan:
    found = find(model, layout)
    groups = find_sites(found)
    with user_values():
        spec = spell(residual, options)
        check_parallel(spec, found, groups)
        start = _start(spec, found, groups)
    scales = list(start.scales) if exact else [1.0] * len(start.scales)
    return _plan(found, groups, {"residual": spec, "scales": scales}, start)


def saved_plan(model: nn.Module, settings: Mapping[str, Any]) -> Plan:
    """As a saved config or delta file says: the same residual at the same scales."""
    found = find(model, None)
    groups = find_sites(found)
    if settings.get("architecture", found.model_type) != found.model_type:
        raise UserError(f"made for the architecture '{settings['architecture']}', and this is '{found.model_type}'")
    count = sum(len(group) for group in groups)
    if len(settings["scales"]) != count + 1:
        raise UserError(
            f"made for {len(settings['scales']) - 1} sublayers, and this {type(found.head).__name__} has {count}"
        )
    with user_values():
        start = _start(settings["residual"], found, groups)
    return _plan(found, groups, {name: settings[name] for name in ("residual", "scales")}, start)


def _start(spec: str, found: Found, groups: list[tuple[Site, ...]]) -> Start:
    kinds = tuple(site.kind for group in groups for site in group)
    return measure_start(spec, found.body.config.hidden_size, len(kinds), kinds)


def _plan(found: Found, groups: list[tuple[Site, ...]], settings: dict[str, Any], start: Start) -> Plan:
    return Plan(found, groups, settings, start, split_inputs(found, groups, start.triples, settings["residual"]))


def spell(residual: str, options: Mapping[str, Any]) -> str:
    """'attnres-block' and block=4 to 'attnres-block:block=4', checked."""
    words = [f"{key}={_word(value)}" for key, value in options.items()]
    name, _, given = residual.partition(":")
    spec = ":".join(filter(None, (name, ",".join(filter(None, (given, *words))))))
    parse(spec)
    return spec


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
