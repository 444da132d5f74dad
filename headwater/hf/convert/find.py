"""Find what a conversion would touch, and refuse, before anything is touched, what does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from headwater.errors import UserError
from headwater.residuals import entry, parse

from .layers import Site, sites_of
from .layouts import PREFIX, Layout, layout_of


@dataclass(frozen=True)
class Found:
    """The parts of a model that a conversion touches."""

    model_type: str
    layout: Layout
    head: PreTrainedModel  # the outermost transformers model
    body: PreTrainedModel  # the one that loops over layers
    prefix: str  # the body's path inside the head, with a dot at its end; empty where they are the same
    layers: list[nn.Module]
    norm: nn.Module


def find(model: nn.Module, layout: Layout | None) -> Found:
    head = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if head is None:
        raise UserError(f"convert takes a transformers model; a {type(model).__name__} holds none")
    for module in head.modules():
        if "_conversion" in module.__dict__:
            spec = module.__dict__["_conversion"].depth.residual.spec
            raise UserError(f"this model is already converted, to '{spec}'; headwater.revert it first")
    model_type = head.config.model_type.removeprefix(PREFIX)
    layout = layout_of(model_type) if layout is None else layout
    for name, module in head.named_modules():
        layers, norm = getattr(module, layout.layers, None), getattr(module, layout.final_norm, None)
        if isinstance(module, PreTrainedModel) and isinstance(layers, nn.ModuleList) and isinstance(norm, nn.Module):
            _check_body(head, module, model_type)
            return Found(model_type, layout, head, module, f"{name}." if name else "", list(layers), norm)
    raise UserError(
        f"{type(head).__name__}: no part of it has decoder layers '{layout.layers}' and a final norm "
        f"'{layout.final_norm}', as the layout of '{model_type}' says"
    )


def _check_body(head: PreTrainedModel, body: PreTrainedModel, model_type: str) -> None:
    if body.config is not head.config:
        raise UserError(
            f"{type(head).__name__} holds a {type(body).__name__} with a config of its own: convert a text model alone"
        )
    if "residual" in dict(body.named_children()):
        raise UserError(
            f"{type(body).__name__} already has a module named 'residual'; '{model_type}' cannot be converted"
        )


def find_sites(found: Found) -> list[tuple[Site, ...]]:
    """The sublayers of each layer, numbered through the network."""
    groups: list[tuple[Site, ...]] = []
    for layer in found.layers:
        own = [name for name, _ in layer.named_children()] + [name for name, _ in layer.named_parameters(recurse=False)]
        surplus = sorted(set(own) - found.layout.parts())
        if surplus:
            raise UserError(
                f"{type(layer).__name__} of '{found.model_type}' has modules or parameters that its layout does "
                f"not know: {', '.join(surplus)}. Its layout in headwater/hf/convert/layouts.py names every part"
            )
        first = groups[-1][-1].sublayer + 1 if groups else 0
        try:
            groups.append(sites_of(layer, found.layout, first))
        except LookupError as error:
            raise UserError(f"the layout of '{found.model_type}' does not fit: {error.args[0]}") from None
        _check_names(layer, groups[-1], found)
    return groups


def _check_names(layer: nn.Module, group: Sequence[Site], found: Found) -> None:
    for site in group:
        for part in (site, *([site.second] if site.second else [])):
            for name in (part.norm, *part.out):
                if name is not None and not isinstance(getattr(layer, name, None), nn.Module):
                    raise UserError(
                        f"the layout of '{found.model_type}' does not fit: "
                        f"a {type(layer).__name__} has no module '{name}'"
                    )


def check_parallel(spec: str, found: Found, groups: Sequence[Sequence[Site]]) -> None:
    if entry(parse(spec)[0]).takes_kinds and any(site.second for group in groups for site in group):
        raise UserError(
            f"residual '{spec}' tells attention from MLP sublayers, and '{found.model_type}' runs both at once on one "
            "read: choose a residual that treats all sublayers alike, such as attnres-block"
        )


def split_inputs(
    found: Found, groups: Sequence[Sequence[Site]], triples: Sequence[int], spec: str
) -> list[tuple[int, nn.Module]]:
    """The projections that take their own input where a read gives three, with which of the three."""
    split: list[tuple[int, nn.Module]] = []
    for layer, group in zip(found.layers, groups, strict=True):
        attention = getattr(layer, group[0].body)
        if group[0].sublayer not in triples:
            continue
        for which, name in enumerate(found.layout.inputs):
            projection = getattr(attention, name, None)
            if not isinstance(projection, nn.Module):
                raise UserError(
                    f"residual '{spec}' gives query, key and value inputs of their own, and {type(attention).__name__} "
                    f"has no '{name}' to give one to"
                )
            split.append((which, projection))
    return split
