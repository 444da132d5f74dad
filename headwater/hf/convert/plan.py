"""The plan of a conversion, worked out and checked before anything is changed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from headwater.errors import UserError, user_values
from headwater.residuals import parse

from .find import Found, check_parallel, find, find_sites, split_inputs
from .layers import Site
from .layouts import Layout
from .start import Start, measure_start

SETTINGS = ("residual", "scales", "start", "layout")


@dataclass(frozen=True)
class Plan:
    """`settings` is what a config keeps of it: the residual; by what each read is multiplied (`scales`); by what it
    would have to be to begin as the plain residual, where that is another number (`start`); and a layout that is not
    the table's."""

    found: Found
    groups: list[tuple[Site, ...]]  # the sublayers of each layer
    settings: dict[str, Any]
    start: Start
    split: list[
        tuple[int, nn.Module]
    ]  # projections that take the query, key or value input of their own

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(site.kind for group in self.groups for site in group)

    @property
    def equal_at_start(self) -> bool:
        """True if the converted model, until it is trained, computes what the plain one does."""
        return self.start.plain and tuple(self.settings["scales"]) == self.start.scales

    def with_plain_residual(self) -> "Plan":
        scales = tuple(self.found.layout.scale(read) for read in range(len(self.start.scales)))
        settings = {**self.settings, "residual": "standard", "scales": list(scales)}
        return Plan(self.found, self.groups, settings, Start(scales, 0.0, ()), [])


def new_plan(
    model: nn.Module, residual: str, layout: Layout | None, exact: bool, options: Mapping[str, Any]
) -> Plan:
    found = find(model, layout)
    groups = find_sites(found)
    with user_values():
        spec = spell(residual, options)
        check_parallel(spec, found, groups)
        start = _start(spec, found, groups)
    settings: dict[str, Any] = {"residual": spec, "scales": list(start.scales)}
    if not exact:
        settings |= {"scales": [1.0] * len(start.scales), "start": list(start.scales)}
    if layout is not None:
        settings["layout"] = layout.to_dict()
    return _plan(found, groups, settings, start)


def saved_plan(model: nn.Module, settings: Mapping[str, Any]) -> Plan:
    """As a saved config or delta file says: the same residual at the same scales."""
    given = settings.get("layout")
    found = find(model, None if given is None else Layout.from_dict(given))
    groups = find_sites(found)
    if settings.get("architecture", found.model_type) != found.model_type:
        raise UserError(
            f"made for the architecture '{settings['architecture']}', and this is '{found.model_type}'"
        )
    count = sum(len(group) for group in groups)
    if len(settings["scales"]) != count + 1:
        raise UserError(
            f"residual '{settings['residual']}' was made for {len(settings['scales']) - 1} sublayers, and this "
            f"{type(found.head).__name__} has {count}. To change the number of layers: headwater.revert, then convert"
        )
    with user_values():
        start = _start(settings["residual"], found, groups)
    _check_start(settings, start)
    return _plan(
        found, groups, {name: settings[name] for name in SETTINGS if name in settings}, start
    )


def _check_start(settings: Mapping[str, Any], start: Start) -> None:
    """Parameters of blocks of 2 would load into blocks of 4 without a word, and compute something else."""
    saved = settings.get("start", settings["scales"])
    if set(saved) == {1.0} and "start" not in settings:
        return  # left at the residual's own scale, in a file that does not yet say which that is
    if any(abs(one - other) > 1e-6 for one, other in zip(saved, start.scales, strict=True)):
        raise UserError(
            f"the config contradicts itself: its reads were made for the scales {saved}, and those of the residual "
            f"'{settings['residual']}' are {list(start.scales)}. The residual or its options were changed by hand: a "
            "model is converted to another residual after headwater.revert"
        )


def _start(spec: str, found: Found, groups: list[tuple[Site, ...]]) -> Start:
    kinds = tuple(site.kind for group in groups for site in group)
    start = measure_start(spec, found.body.config.hidden_size, len(kinds), kinds)
    return replace(
        start,
        scales=tuple(scale * found.layout.scale(read) for read, scale in enumerate(start.scales)),
    )


def _plan(
    found: Found, groups: list[tuple[Site, ...]], settings: dict[str, Any], start: Start
) -> Plan:
    return Plan(
        found,
        groups,
        settings,
        start,
        split_inputs(found, groups, start.triples, settings["residual"]),
    )


def spell(residual: str, options: Mapping[str, Any]) -> str:
    """'attnres-block' and block=4 to 'attnres-block:block=4', checked."""
    parse(residual)
    words = [f"{key}={_word(value)}" for key, value in options.items()]
    name, _, given = residual.partition(":")
    spec = ":".join(filter(None, (name, ",".join(filter(None, (given, *words))))))
    parse(spec)
    return spec


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
