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


@dataclass(frozen=True)
class Found:
    """The parts of a model that a conversion touches."""

    model_type: str
    layout: Layout
    head: PreTrainedModel  # the outermost transformers model
    body: PreTrainedModel  # the one that loops over layers
    prefix: (
        str  # the body's path inside the head, with a dot at its end; empty where they are the same
    )
    layers: list[nn.Module]
    norm: nn.Module


def find(model: nn.Module, layout: Layout | None) -> Found:
    """The model that loops over decoder layers, alone or inside a head: of a vision-language model, its text part."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"convert takes a transformers model, got a {type(model).__name__}: load one with "
            "AutoModelForCausalLM.from_pretrained. For a folder there is the command headwater convert"
        )
    head = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if head is None:
        raise UserError(f"convert takes a transformers model; a {type(model).__name__} holds none")
    for module in head.modules():
        if "_conversion" in module.__dict__:
            spec = module.__dict__["_conversion"].depth.residual.spec
            raise UserError(
                f"this model is already converted, to '{spec}'; headwater.revert it first"
            )
    _check_loaded(head)
    _check_unshared(model)
    if layout is None and head.config.model_type in REFUSED:
        layout_of(head.config.model_type)  # whatever parts it has that would fit
    inside = [
        (name, module)
        for name, module in head.named_modules()
        if isinstance(module, PreTrainedModel)
    ]
    for name, body in inside:
        model_type = body.config.model_type.removeprefix(PREFIX)
        known = LAYOUTS.get(model_type) if layout is None else layout
        if known is None:
            continue
        layers, norm = getattr(body, known.layers, None), getattr(body, known.final_norm, None)
        if isinstance(layers, nn.ModuleList) and len(layers) and isinstance(norm, nn.Module):
            _check_body(body, model_type, layers)
            return Found(
                model_type, known, head, body, f"{name}." if name else "", list(layers), norm
            )
    model_type = head.config.model_type.removeprefix(PREFIX)
    known = layout_of(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if layout is None else layout
    raise UserError(
        f"{type(head).__name__}: no part of it has decoder layers '{known.layers}' and a final norm "
        f"'{known.final_norm}', as the layout of '{model_type}' says"
    )


def _check_loaded(head: PreTrainedModel) -> None:
    """A plain class that reads a converted folder leaves out what its weights were trained with, and says so in a
    table of unexpected keys."""
    if head.config.model_type.startswith(PREFIX) and not type(head.config).model_type.startswith(
        PREFIX
    ):
        spec = getattr(head.config, "headwater", {}).get("residual")
        raise UserError(
            f"{type(head).__name__}, a plain class, was loaded from a folder that is converted, to '{spec}', and "
            "leaves that residual out: load it with AutoModelForCausalLM after `import headwater.hf`. For the plain "
            "model there is the command headwater revert"
        )


def _check_unshared(model: nn.Module) -> None:
    """Refuse a model that ranks share: nobody would average what is added, and each rank would train its own."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    from torch.distributed.fsdp import (
        FSDPModule,
    )  # which takes a second to import, and is of no use to one process

    shared = next(
        (type(m) for m in model.modules() if isinstance(m, DistributedDataParallel | FSDPModule)),
        None,
    )
    if shared is not None:
        raise UserError(
            f"the model is shared by ranks already, as a {shared.__name__}, and each would train what is added by "
            "itself: convert it first, then wrap or shard it"
        )


def _check_body(body: PreTrainedModel, model_type: str, layers: nn.ModuleList) -> None:
    if "residual" in dict(body.named_children()):
        raise UserError(
            f"{type(body).__name__} already has a module named 'residual'; '{model_type}' cannot be converted"
        )
    if len({*layers}) < len(layers):
        raise UserError(
            f"{type(body).__name__} runs a layer more than once, and a residual reads them by their place"
        )
    if dropped := getattr(body, "layerdrop", 0):
        raise UserError(
            f"{type(body).__name__} skips layers at random while it trains (layerdrop={dropped}), and a residual reads "
            "them by their place: load it with from_pretrained(..., layerdrop=0.0), or change its config.json"
        )


def find_sites(found: Found) -> list[tuple[Site, ...]]:
    """The sublayers of each layer, numbered through the network."""
    groups: list[tuple[Site, ...]] = []
    for layer in found.layers:
        first = groups[-1][-1].sublayer + 1 if groups else 0
        groups.append(sites_of(layer, layout_for(layer, found), first))
        _check_arguments(layer, groups[-1], found)
    return groups


def layout_for(layer: nn.Module, found: Found) -> Layout:
    """The model's layout, or the first of those it may have instead, that fits this layer."""
    layout: Layout | None = found.layout
    wrong: list[str] = []
    while layout is not None:
        misfit = _misfit(layer, layout)
        if misfit is None:
            return layout
        wrong.append(misfit)
        layout = layout.otherwise
    raise UserError(f"the layout of '{found.model_type}' does not fit: {'; or else '.join(wrong)}")


def _misfit(layer: nn.Module, layout: Layout) -> str | None:
    """The parts of a layer that a layout leaves out, or has too much."""
    what = f"a {type(layer).__name__}"
    try:
        names = set[str]().union(*(site.names for site in sites_of(layer, layout, 0)))
    except LookupError as error:
        return str(error.args[0])
    except AttributeError as error:
        return f"{what}: {error}"
    numbers = (*layout.attention_out, *layout.mlp_out, *layout.output)
    for name in sorted(names):
        part = part_of(layer, name)
        if not isinstance(part, nn.Module) and not (
            name in numbers and isinstance(part, int | float)
        ):
            return f"{what} has no module '{name}'"
    surplus = sorted(_unused(layer, names, ""))
    if surplus:
        return f"{what} has modules or parameters that its layout does not know or use: {', '.join(surplus)}"
    return None


def _unused(module: nn.Module, names: set[str], prefix: str) -> list[str]:
    """Paths of modules and parameters that are neither named nor inside or around what is."""
    found = [prefix + name for name, _ in module.named_parameters(recurse=False)]
    for name, child in module.named_children():
        path = prefix + name
        if path in names:
            continue
        inner = any(each.startswith(f"{path}.") for each in names)
        found += _unused(child, names, f"{path}.") if inner else [path]
    return found


def _check_arguments(layer: nn.Module, group: Sequence[Site], found: Found) -> None:
    for name in (name for site in group for name in site.bodies):
        module = part_of(layer, name)
        lacking = unknown(module, layer) if isinstance(module, nn.Module) else []
        if lacking:
            raise UserError(
                f"{type(module).__name__} of '{found.model_type}' takes the arguments {', '.join(lacking)}, "
                f"which a {type(layer).__name__} is not given: it cannot be converted"
            )


def check_parallel(spec: str, found: Found, groups: Sequence[Sequence[Site]]) -> None:
    kinds = {site.kind for group in groups for site in group} - {"attention", "mlp"}
    if entry(parse(spec)[0]).takes_kinds and kinds:
        how = (
            "runs both at once on one read"
            if kinds == {"parallel"}
            else "has layers of one sublayer"
        )
        raise UserError(
            f"residual '{spec}' tells attention from MLP sublayers, and '{found.model_type}' {how}: choose a residual "
            "that treats all sublayers alike, such as attnres-block"
        )


def split_inputs(
    found: Found, groups: Sequence[Sequence[Site]], triples: Sequence[int], spec: str
) -> list[tuple[int, nn.Module]]:
    """The projections that take their own input where a read gives three, with which of the three."""
    split: list[tuple[int, nn.Module]] = []
    for layer, group in zip(found.layers, groups, strict=True):
        attention = part_of(layer, group[0].body)
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
