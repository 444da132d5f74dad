"""Swap the residual of a transformers model in place, on its instances alone; and take it back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from headwater.errors import UserError, user_values
from headwater.residuals import build, pinned

from .classes import PREFIX, Converted, config_class, head_class
from .devices import execution_device, place
from .find import Found, check_parallel, find, find_sites, spell, split_inputs
from .layers import (
    Depth,
    Site,
    accepted,
    converted_layer,
    converted_model,
    converted_norm,
    positional_names,
    take_input,
)
from .layouts import Layout
from .norms import ScaledNorm, foldable
from .report import Report, describe
from .start import Start, measure_start

RESIDUAL = "residual"  # the attribute, and so the prefix of every added parameter


@dataclass
class Conversion:
    """What `revert` needs; kept on the model that owns the layers."""

    report: Report
    depth: Depth
    classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)
    attributes: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)  # instance attributes replaced


def convert(
    model: nn.Module,
    residual: str = "attnres-block",
    *,
    layout: Layout | None = None,
    exact: bool = True,
    **options: Any,
) -> Report:
    """Replace the plain residual of `model`, in place, by the one `residual` names; `options` are the residual's.

    Nothing is renamed; the added parameters live under `residual.` of the model that owns the layers, on its device
    (also meta) and in its dtype. exact=False leaves reads at the residual's own scale, as a model trained from scratch
    has them, and relies on the norms to cancel it.
    """
    found = find(model, layout)
    groups = find_sites(found)
    with user_values():
        spec = spell(residual, options)
        check_parallel(spec, found, groups)
        kinds = tuple(site.kind for group in groups for site in group)
        start = measure_start(spec, found.body.config.hidden_size, len(kinds), kinds)
    settings = {"residual": spec, "scales": list(start.scales) if exact else [1.0] * len(start.scales)}
    return install(found, groups, settings, start)


def convert_with(model: nn.Module, settings: Mapping[str, Any]) -> Report:
    """Convert as a saved config or delta file says: the same residual at the same scales."""
    found = find(model, None)
    groups = find_sites(found)
    if settings.get("architecture", found.model_type) != found.model_type:
        raise UserError(f"made for the architecture '{settings['architecture']}', and this is '{found.model_type}'")
    kinds = tuple(site.kind for group in groups for site in group)
    if len(settings["scales"]) != len(kinds) + 1:
        raise UserError(
            f"made for {len(settings['scales']) - 1} sublayers, and this {type(found.head).__name__} has {len(kinds)}"
        )
    with user_values():
        start = measure_start(settings["residual"], found.body.config.hidden_size, len(kinds), kinds)
    kept = {name: settings[name] for name in ("residual", "scales")}
    return install(found, groups, kept, start)


def install(found: Found, groups: list[tuple[Site, ...]], settings: dict[str, Any], start: Start) -> Report:
    """Everything that could fail has been checked by the caller: from here on the model changes."""
    split = split_inputs(found, groups, start.triples, settings["residual"])
    kinds = tuple(site.kind for group in groups for site in group)
    like = next(found.norm.parameters(), next(found.body.parameters()))
    device = execution_device(found.layers[0], like.device)
    drawn = device if device.type == "meta" else torch.device("cpu")  # from one seed the same start on any device
    with drawn, torch.random.fork_rng(devices=[]):
        residual = build(settings["residual"], found.body.config.hidden_size, len(kinds), kinds)
    residual = residual.to(device, like.dtype)
    residual.spec = pinned(residual)
    layers = zip(found.layers, groups, strict=True)
    devices = {site.sublayer: execution_device(layer, device) for layer, group in layers for site in group}
    place(residual, {**devices, len(kinds): execution_device(found.norm, device)})
    if device.type != "meta":
        for tensor in (*residual.parameters(), *residual.buffers()):
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark: it has its value
    depth = Depth(residual, kinds, tuple(settings["scales"]))
    depth.norms.update(_foldable_norms(found, groups, depth.scales))
    conversion = Conversion(describe(found, groups, residual, start, depth.scales), depth)
    replace_config(found, conversion, {**settings, "residual": residual.spec})
    found.body.add_module(RESIDUAL, residual)
    for layer, group in zip(found.layers, groups, strict=True):
        marks = {
            "_depth_sites": group,
            "_depth_arguments": positional_names(layer),
            "_depth_multiplier": found.layout.multiplier,
            "_depth_accepts": accepted(getattr(layer, group[0].body)),
        }
        replace_class(conversion, layer, converted_layer(type(layer)), marks)
    replace_class(conversion, found.norm, converted_norm(type(found.norm)))
    body, head = found.body, found.head
    if body is head:
        replace_class(conversion, head, head_class(converted_model(plain_class(head))))
    else:
        replace_class(conversion, body, converted_model(type(body)))
        replace_class(conversion, head, head_class(plain_class(head)))
    for which, projection in split:
        projection.register_forward_pre_hook(partial(take_input, which))
    body.__dict__["_conversion"] = conversion
    return conversion.report


def _foldable_norms(found: Found, groups: list[tuple[Site, ...]], scales: Sequence[float]) -> dict[int, ScaledNorm]:
    norms = {
        site.sublayer: getattr(layer, site.norm)
        for layer, group in zip(found.layers, groups, strict=True)
        for site in group
        if site.norm is not None and site.second is None
    }
    norms[len(scales) - 1] = found.norm
    return {i: made for i, norm in norms.items() if (made := foldable(norm, scales[i])) is not None}


def revert(model: nn.Module) -> None:
    """Undo `convert`: the added parameters are dropped, and every instance is of its own class again."""
    conversion, body = conversion_of(model)
    for module in body.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, partial) and hook.func is take_input:
                del module._forward_pre_hooks[key]
    for module, original in conversion.classes:
        module.__class__ = original
        for name in [name for name in module.__dict__ if name.startswith("_depth")]:
            del module.__dict__[name]
    for module, attributes in conversion.attributes:
        module.__dict__.update(attributes)
    del body._modules[RESIDUAL]
    del body.__dict__["_conversion"]


def load_added(model: nn.Module, module: nn.Module, weights: Mapping[str, Tensor], what: str) -> None:
    """Load `module` of a model just converted; weights that do not fit leave the model as it was before."""
    try:
        check_fit(module, weights, what)
    except UserError:
        revert(model)
        raise
    module.load_state_dict(weights)


def check_fit(module: nn.Module, weights: Mapping[str, Tensor], what: str) -> None:
    """Every tensor of `module` is among `weights` in its shape, and nothing else is."""
    own = module.state_dict()
    missing, surplus = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or surplus:
        raise UserError(f"{what}: missing {missing[:5]}, surplus {surplus[:5]}")
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            raise UserError(f"{what}: {name} is {tuple(tensor.shape)} here and {tuple(weights[name].shape)} there")


def conversion_of(model: nn.Module) -> tuple[Conversion, PreTrainedModel]:
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and "_conversion" in module.__dict__:
            return module.__dict__["_conversion"], module
    raise UserError(f"this {type(model).__name__} is not a model that headwater.convert has converted")


def replace_class(
    conversion: Conversion, module: nn.Module, made: type[nn.Module], marks: dict[str, Any] | None = None
) -> None:
    original = plain_class(module)
    conversion.classes.append((module, original))
    module.__class__ = made
    module.__dict__.update({"_depth": conversion.depth, **(marks or {})})
    for name in ("_old_forward", "forward"):  # accelerate keeps the bound forward it wraps, and puts it back
        bound = module.__dict__.get(name)
        if isinstance(bound, MethodType) and bound.__func__ is original.forward:
            conversion.attributes.append((module, {name: bound}))
            module.__dict__[name] = MethodType(made.forward, module)


def plain_class(module: nn.Module) -> Any:
    """A head built from a converted config is of the converted class before its conversion."""
    return type(module).plain if isinstance(module, Converted) else type(module)


def replace_config(found: Found, conversion: Conversion, settings: dict[str, Any]) -> None:
    """Models may share a config object, so the converted one gets its own, everywhere the old one was."""
    old = found.head.config
    if old.model_type.startswith(PREFIX):
        plain, new = copy.deepcopy(old), old
        _retype(plain, type(old).__mro__[1])
        del plain.headwater
    else:
        plain, new = old, copy.deepcopy(old)
        _retype(new, config_class(type(old)))
    new.headwater = settings
    if not conversion.depth.residual.token_local:
        new.use_cache = False  # it looks at earlier tokens of the stream, which a KV cache does not keep
    for module in found.head.modules():
        if module.__dict__.get("config") is old:
            conversion.attributes.append((module, {"config": plain}))
            module.__dict__["config"] = new


def _retype(config: PreTrainedConfig, cls: type[PreTrainedConfig]) -> None:
    config.__class__ = cls
    config.__dict__.pop("model_type", None)  # a config read from a file has the type on the instance too
