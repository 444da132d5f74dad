"""Find what a conversion would touch, and refuse, before anything is touched, what does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headwater.errors import UserError
from headwater.residuals import entry, parse

from .arguments import unknown
from .layers import Site, part_of, sites_of
from .layouts import LAYOUTS, PREFIX, Layout
from .refusals import REFUSED, layout_of
from .releases import RELEASES, Release


@dataclass(frozen=True)
class Parts:
    """The parts of a model that a conversion touches."""

    model_type: str
    layout: Layout
    head: PreTrainedModel  # the outermost transformers model
    body: PreTrainedModel  # the one that loops over layers
    prefix: str  # the body's path inside the head, with a dot at its end; empty where they are one
    layers: list[nn.Module]
    norm: nn.Module
    release: Release | None = None  # whose residual is not the plain one


def find(model: nn.Module, layout: Layout | None, opening: bool = False) -> Parts:
    """Find the model that loops over decoder layers, alone or inside a head.

    Of a vision-language model that is its text part. `opening`: its residual is a released one.
    """
    head = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if head is None:
        raise UserError(f"convert takes a transformers model; a {type(model).__name__} holds none")
    _check_state(model, head)
    own_type = head.config.model_type.removeprefix(PREFIX)
    if layout is None and own_type in REFUSED and not opening:
        layout_of(own_type)  # whatever parts it has that would fit
    # The first part whose type has a layout and whose attributes fit it owns the loop.
    for name, body in head.named_modules():
        if not isinstance(body, PreTrainedModel):
            continue
        model_type = body.config.model_type.removeprefix(PREFIX)
        release = RELEASES.get(model_type) if opening else None
        candidate = release.layout if release else layout or LAYOUTS.get(model_type)
        if candidate is None:
            continue
        layers = getattr(body, candidate.layers, None)
        norm = getattr(body, candidate.final_norm, None)
        if isinstance(layers, nn.ModuleList) and len(layers) and isinstance(norm, nn.Module):
            _check_layers(body, layers)
            prefix = f"{name}." if name else ""
            return Parts(model_type, candidate, head, body, prefix, list(layers), norm, release)
    expected = layout or layout_of(own_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    raise UserError(
        f"{type(head).__name__}: no part of it has decoder layers '{expected.layers}' and a final norm "
        f"'{expected.final_norm}', as the layout of '{own_type}' says"
    )


def _check_state(model: nn.Module, head: PreTrainedModel) -> None:
    """Refuse a model that is converted already, by halves, or that ranks share."""
    for module in head.modules():
        if "_conversion" in module.__dict__:
            spec = module.__dict__["_conversion"].depth.residual.spec
            raise UserError(
                f"this model is already converted, to '{spec}'; headwater.revert it first"
            )
    config = head.config
    # A plain class that reads a converted folder leaves out what its weights were trained with.
    if config.model_type.startswith(PREFIX) and not type(config).model_type.startswith(PREFIX):
        spec = getattr(config, "headwater", {}).get("residual")
        raise UserError(
            f"{type(head).__name__}, a plain class, was loaded from a folder that is converted, to '{spec}', and "
            "leaves that residual out: load it with AutoModelForCausalLM after `import headwater.hf`. For the plain "
            "model there is the command headwater revert"
        )
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    # It takes a second to import, and is of no use to one process.
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, DistributedDataParallel | FSDPModule):
            raise UserError(
                f"the model is shared by ranks already, as a {type(module).__name__}, and each would train what is "
                "added by itself: convert it first, then wrap or shard it"
            )


def _check_layers(body: PreTrainedModel, layers: nn.ModuleList) -> None:
    """Refuse layers that do not run once each in their order: a residual reads them by their place."""
    problem = None
    if len({*layers}) < len(layers):
        problem = "runs a layer more than once"
    if dropped := getattr(body, "layerdrop", 0):
        problem = (
            f"skips layers at random while it trains (layerdrop={dropped}: load it with "
            "from_pretrained(..., layerdrop=0.0))"
        )
    if problem is not None:
        raise UserError(
            f"{type(body).__name__} {problem}, and a residual reads its layers by their place"
        )


def find_sites(parts: Parts) -> list[tuple[Site, ...]]:
    """The sublayers of each layer, numbered through the network."""
    groups: list[tuple[Site, ...]] = []
    first = 0
    for layer in parts.layers:
        sites = sites_of(layer, layout_for(layer, parts), first)
        first += len(sites)
        _check_arguments(layer, sites, parts)
        groups.append(sites)
    return groups


def layout_for(layer: nn.Module, parts: Parts) -> Layout:
    """The model's layout, or the first of those it may have instead, that fits this layer."""
    layout: Layout | None = parts.layout
    misfits: list[str] = []
    residual = {*parts.release.reads} if parts.release else set[str]()
    # Hybrid models have layers of several kinds.
    while layout is not None:
        misfit = _misfit(layer, layout, residual)
        if misfit is None:
            return layout
        misfits.append(misfit)
        layout = layout.otherwise
    reasons = "; or else ".join(misfits)
    raise UserError(
        f"the layout of '{parts.model_type}' does not fit a {type(layer).__name__}: {reasons}"
    )


def _misfit(layer: nn.Module, layout: Layout, known: set[str]) -> str | None:
    """The parts of a layer that a layout leaves out, or has too much."""
    try:
        sites = sites_of(layer, layout, 0)
    except (LookupError, AttributeError) as error:
        return str(error)
    names = set[str]().union(*(site.names for site in sites))
    dropouts = (*layout.attention_out, *layout.mlp_out, *layout.output)
    # Every name has to lead to a module, or to a dropout's number.
    for name in sorted(names):
        part = part_of(layer, name)
        number = name in dropouts and isinstance(part, int | float)
        if not number and not isinstance(part, nn.Module):
            return f"it has no module '{name}'"
    # What a layout leaves out would silently not be computed.
    surplus = ", ".join(sorted(_unused(layer, names | known, "")))
    return f"its layout does not know or use {surplus}" if surplus else None


def _unused(module: nn.Module, names: set[str], prefix: str) -> list[str]:
    """Paths of modules and parameters that are neither named nor inside or around what is."""
    paths = [prefix + name for name, _ in module.named_parameters(recurse=False)]
    for name, child in module.named_children():
        path = prefix + name
        # A module around a named one is looked into.
        if any(inner.startswith(f"{path}.") for inner in names):
            paths += _unused(child, names, f"{path}.")
        elif path not in names:
            paths.append(path)
    return paths


def _check_arguments(layer: nn.Module, sites: Sequence[Site], parts: Parts) -> None:
    """Refuse a layer with a module that takes arguments which the layer is not given."""
    for site in sites:
        for name in site.bodies:
            module = part_of(layer, name)
            lacking = unknown(module, layer) if isinstance(module, nn.Module) else []
            if lacking:
                raise UserError(
                    f"{type(module).__name__} of '{parts.model_type}' takes the arguments {', '.join(lacking)}, "
                    f"which a {type(layer).__name__} is not given: it cannot be converted"
                )


def check_parallel(spec: str, parts: Parts, kinds: Sequence[str]) -> None:
    """Refuse a residual that tells attention from MLP sublayers where a sublayer is neither."""
    if entry(parse(spec)[0]).takes_kinds and not {*kinds} <= {"attention", "mlp"}:
        how = (
            "runs both at once on one read" if "parallel" in kinds else "has layers of one sublayer"
        )
        raise UserError(
            f"residual '{spec}' tells attention from MLP sublayers, and '{parts.model_type}' {how}: choose a residual "
            "that treats all sublayers alike, such as attnres-block"
        )


def split_inputs(
    parts: Parts, groups: Sequence[Sequence[Site]], triples: Sequence[int], spec: str
) -> list[tuple[int, nn.Module]]:
    """The projections that take their own input where a read gives three, with which of the three."""
    split: list[tuple[int, nn.Module]] = []
    for layer, sites in zip(parts.layers, groups, strict=True):
        if sites[0].sublayer not in triples:
            continue
        # Only attention has such inputs.
        attention = part_of(layer, sites[0].body)
        for which, name in enumerate(parts.layout.inputs):
            projection = getattr(attention, name, None)
            if not isinstance(projection, nn.Module):
                raise UserError(
                    f"residual '{spec}' gives query, key and value inputs of their own, and {type(attention).__name__} "
                    f"has no '{name}' to give one to"
                )
            split.append((which, projection))
    return split
