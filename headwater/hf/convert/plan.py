"""The plan of a conversion, worked out and checked before anything is changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from headwater.errors import UserError, user_values
from headwater.residuals import parse

from .find import Parts, check_parallel, find, find_sites, split_inputs
from .layers import Site
from .layouts import Layout
from .opening import released_spec
from .start import Start, measure_start

SETTINGS = ("residual", "scales", "start", "layout")


@dataclass(frozen=True)
class Plan:
    """The changes that a conversion will make.

    `settings` is what a config keeps of it: the residual; by what each read is multiplied (`scales`);
    by what it would have to be to begin as the plain residual, where that is another number (`start`);
    and a layout that is not the table's.
    """

    parts: Parts
    groups: list[tuple[Site, ...]]  # the sublayers of each layer
    settings: dict[str, Any]
    start: Start
    # Projections that take the query, key or value input of their own
    split: list[tuple[int, nn.Module]]

    @property
    def kinds(self) -> tuple[str, ...]:
        return kinds_of(self.groups)

    @property
    def equal_at_start(self) -> bool:
        """True if the converted model, until it is trained, computes what the plain one does."""
        return self.start.plain and tuple(self.settings["scales"]) == self.start.scales

    def with_plain_residual(self) -> "Plan":
        reads = range(len(self.start.scales))
        scales = [self.parts.layout.scale(read) for read in reads]
        settings = {**self.settings, "residual": "standard", "scales": scales}
        start = Start(tuple(scales), error=0.0, triples=())
        return replace(self, settings=settings, start=start, split=[])


def kinds_of(groups: Sequence[Sequence[Site]]) -> tuple[str, ...]:
    return tuple(site.kind for sites in groups for site in sites)


def new_plan(
    model: nn.Module, residual: str, layout: Layout | None, exact: bool, options: Mapping[str, Any]
) -> Plan:
    """Plan a conversion to a residual, with its options; the other arguments are `convert`'s."""
    parts = find(model, layout)
    with user_values():
        spec = spell(residual, options)
    plan = _plan(parts, {"residual": spec})
    # The scales are written down, so that a later change of a default changes no saved model.
    settings, scales = plan.settings, list(plan.start.scales)
    settings["scales"] = scales
    # The config keeps what the scales would have been, to know the residual by.
    if not exact:
        settings |= {"scales": [1.0] * len(scales), "start": scales}
    if layout is not None:
        settings["layout"] = layout.to_dict()
    return plan


def opened_plan(model: nn.Module) -> Plan:
    """Plan to open a released model: its residual becomes ours, at the scale that it has."""
    parts = find(model, None, opening=True)
    if parts.release is None:
        raise UserError(
            f"'{parts.model_type}' has the plain residual: headwater.convert gives it another"
        )
    groups = find_sites(parts)
    reads = len(kinds_of(groups)) + 1
    spec = released_spec(parts.release, parts.body.config, reads - 1)
    settings = {"residual": spec, "scales": [1.0] * reads, "opened": True}
    # No norm follows a final read that is one itself.
    if parts.release.final == parts.layout.final_norm:
        parts = replace(parts, norm=nn.Identity())
    return Plan(parts, groups, settings, Start((1.0,) * reads, error=0.0, triples=()), split=[])


def saved_plan(model: nn.Module, settings: Mapping[str, Any]) -> Plan:
    """Plan a conversion as a saved config or delta file says: the same residual at the same scales."""
    layout, scales = settings.get("layout"), settings["scales"]
    if settings.get("opened"):
        return opened_plan(model)
    parts = find(model, None if layout is None else Layout.from_dict(layout))
    architecture = settings.get("architecture", parts.model_type)
    if architecture != parts.model_type:
        raise UserError(
            f"made for the architecture '{architecture}', and this is '{parts.model_type}'"
        )
    plan = _plan(parts, {name: settings[name] for name in SETTINGS if name in settings})
    spec, count = settings["residual"], len(plan.kinds)
    # Every sublayer has a read, and the head has one.
    if len(scales) != count + 1:
        raise UserError(
            f"residual '{spec}' was made for {len(scales) - 1} sublayers, and this {type(parts.head).__name__} has "
            f"{count}. To change the number of layers: headwater.revert, then convert"
        )
    # Parameters of blocks of 2 would load into blocks of 4 without a word, and compute something else.
    pairs = zip(settings.get("start", scales), plan.start.scales, strict=True)
    if any(abs(saved - measured) > 1e-6 for saved, measured in pairs):
        raise UserError(
            f"the config contradicts itself: its reads were made for other scales than those of the residual '{spec}', "
            f"{list(plan.start.scales)}. The residual or its options were changed by hand: a model is converted to "
            "another residual after headwater.revert"
        )
    return plan


def _plan(parts: Parts, settings: dict[str, Any]) -> Plan:
    spec, groups = settings["residual"], find_sites(parts)
    kinds = kinds_of(groups)
    with user_values():
        check_parallel(spec, parts, kinds)
        start = measure_start(spec, parts.body.config.hidden_size, len(kinds), kinds)
    # Some models shrink their stream as it grows.
    scales = [scale * parts.layout.scale(read) for read, scale in enumerate(start.scales)]
    start = replace(start, scales=tuple(scales))
    return Plan(parts, groups, settings, start, split_inputs(parts, groups, start.triples, spec))


def spell(residual: str, options: Mapping[str, Any]) -> str:
    """Join 'attnres-block' and block=4 to 'attnres-block:block=4'. Raises ValueError for what is no residual."""
    # An unknown name is refused before its options are.
    parse(residual)
    name, _, words = residual.partition(":")
    for key, value in options.items():
        word = str(value)
        if value is None or isinstance(value, bool):
            word = word.lower()
        words += f",{key}={word}" if words else f"{key}={word}"
    spec = f"{name}:{words}" if words else name
    parse(spec)
    return spec
