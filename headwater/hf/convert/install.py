"""Put a residual into a transformers model, on its instances alone; and take it out again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from headwater.errors import UserError
from headwater.residuals import Residual, pinned

from .arguments import Takes, positional_names, takes
from .depth import RESIDUAL, Depth, mark_filled
from .devices import execution_device, place
from .find import Found, layout_for
from .layers import Site, converted_layer, converted_model, converted_norm, part_of, take_input
from .layouts import PREFIX, Layout
from .norms import ScaledNorm, foldable
from .plan import Plan
from .report import Report, describe
from .start import new_residual


@dataclass
class Conversion:
    """The record that `revert` needs; kept on the model that owns the layers."""

    report: Report
    depth: Depth
    layout: Layout  # of the whole model
    classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)
    attributes: list[tuple[nn.Module, dict[str, Any]]] = field(
        default_factory=list
    )  # instance attributes replaced
    hooks: list[RemovableHandle] = field(default_factory=list)
    configs: dict[int, tuple[PreTrainedConfig, PreTrainedConfig]] = field(
        default_factory=dict
    )  # converted, plain


def install(
    plan: Plan, *, head: type[Any], config: type[PreTrainedConfig], unchecked: str
) -> Report:
    """From here on the model changes. `head` and `config` are the classes that the whole model and its config get;
    `unchecked` says why nobody has compared it with what it was before."""
    found = plan.found
    residual = _residual(plan)
    found.body.add_module(RESIDUAL, residual)
    depth = Depth(found.body, plan.kinds, tuple(plan.settings["scales"]))
    depth.norms.update(_foldable_norms(found, plan.groups, depth.scales))
    conversion = Conversion(describe(plan, residual, unchecked), depth, found.layout)
    replace_config(found, conversion, {**plan.settings, "residual": residual.spec}, config)
    for layer, group in zip(found.layers, plan.groups, strict=True):
        layout = layout_for(layer, found)
        marks = {
            "_depth_sites": group,
            "_depth_arguments": positional_names(layer),
            "_depth_multiplier": layout.multiplier,
            "_depth_returns": layout.returned,
            "_depth_fp32": bool(layout.fp32 and getattr(layer, layout.fp32)),
            "_depth_takes": takes_of(layer, group),
        }
        replace_class(conversion, layer, type(layer), converted_layer(type(layer)), marks)
    replace_class(conversion, found.norm, type(found.norm), converted_norm(type(found.norm)))
    if found.body is not found.head:
        replace_class(conversion, found.body, type(found.body), converted_model(type(found.body)))
    replace_class(
        conversion, found.head, head.plain, head, {"_depth_loops": found.body is found.head}
    )
    for which, projection in plan.split:
        conversion.hooks.append(projection.register_forward_pre_hook(partial(take_input, which)))
    found.body.__dict__["_conversion"] = conversion
    return conversion.report


def _residual(plan: Plan) -> Residual:
    """With its start values, each sublayer's parameters on the device of its layer; on meta, without values."""
    found = plan.found
    like = next(found.norm.parameters(), next(found.body.parameters()))
    device = execution_device(found.layers[0], like.device)
    drawn = (
        device if device.type == "meta" else torch.device("cpu")
    )  # from one seed the same start on any device
    with drawn:
        kinds, dim = plan.kinds, found.body.config.hidden_size
        residual = new_residual(plan.settings["residual"], dim, len(kinds), kinds)
    residual = residual.to(device, like.dtype)
    residual.spec = pinned(residual)
    layers = zip(found.layers, plan.groups, strict=True)
    devices = {
        site.sublayer: execution_device(layer, device) for layer, group in layers for site in group
    }
    place(residual, {**devices, len(plan.kinds): execution_device(found.norm, device)})
    if device.type != "meta":
        mark_filled(residual)
    return residual


def takes_of(layer: nn.Module, group: Sequence[Site]) -> dict[str, Takes]:
    """For every module that a sublayer calls after its norm. An MLP, and what follows a body, gets what it names."""
    return {
        name: takes(module, layer, everything=name == site.body and site.kind != "mlp")
        for site in group
        for name in site.bodies
        if isinstance(module := part_of(layer, name), nn.Module)
    }


def _foldable_norms(
    found: Found, groups: list[tuple[Site, ...]], scales: Sequence[float]
) -> dict[int, ScaledNorm]:
    norms = {
        site.sublayer: part_of(layer, site.norm)
        for layer, group in zip(found.layers, groups, strict=True)
        for site in group
        if site.norm is not None and site.second is None
    }
    norms[len(scales) - 1] = found.norm
    return {i: made for i, norm in norms.items() if (made := foldable(norm, scales[i])) is not None}


def revert(model: nn.Module) -> None:
    """Undo `convert` on a `model`, in place: what was added is dropped, and every instance is of its own class again.

    What training did to the other weights stays. Raises `headwater.errors.UserError` if the model is not converted.
    """
    conversion, body = conversion_of(model)
    head = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    for handle in conversion.hooks:
        handle.remove()
    for module, original in conversion.classes:
        module.__class__ = original
        for name in [name for name in module.__dict__ if name.startswith("_depth")]:
            del module.__dict__[name]
    for module, attributes in conversion.attributes:
        module.__dict__.update(attributes)
    restore_configs(conversion, head)
    delattr(body, RESIDUAL)
    del body.__dict__["_conversion"]


def conversion_of(model: nn.Module) -> tuple[Conversion, PreTrainedModel]:
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel) and "_conversion" in module.__dict__:
            return module.__dict__["_conversion"], module
    raise UserError(
        f"this {type(model).__name__} is not a model that headwater.convert has converted"
    )


def replace_class(
    conversion: Conversion,
    module: nn.Module,
    original: type[nn.Module],
    made: type[nn.Module],
    marks: dict[str, Any] | None = None,
) -> None:
    """`original` is what `revert` gives back: a head that was built from a config is of its converted class already."""
    conversion.classes.append((module, original))
    module.__class__ = made
    module.__dict__.update({"_depth": conversion.depth, **(marks or {})})
    for name in (
        "_old_forward",
        "forward",
    ):  # accelerate keeps the bound forward it wraps, and puts it back
        bound = module.__dict__.get(name)
        if isinstance(bound, MethodType) and bound.__func__ is original.forward:
            conversion.attributes.append((module, {name: bound}))
            module.__dict__[name] = MethodType(made.forward, module)


def replace_config(
    found: Found, conversion: Conversion, settings: dict[str, Any], made: type[PreTrainedConfig]
) -> None:
    """Models may share a config object, so the converted one gets its own, everywhere the old one was; and so for the
    configs inside it, of the parts of a vision-language model."""
    old = found.head.config
    copies: dict[int, Any] = {}
    copied = copy.deepcopy(old, copies)
    loaded = old.model_type.startswith(PREFIX)
    if loaded:
        _retype(copied, type(old).__mro__[1])
        del copied.headwater
    else:
        _retype(copied, made)
    (old if loaded else copied).headwater = {**settings, "loads_after": "import headwater.hf"}
    for module in found.head.modules():
        before = module.__dict__.get("config")
        other = copies.get(id(before))
        if isinstance(before, PreTrainedConfig) and other is not None:
            plain, new = (other, before) if loaded else (before, other)
            conversion.configs[id(new)] = (new, plain)
            module.__dict__["config"] = new
    if not conversion.depth.residual.token_local:
        found.body.config.use_cache = (
            False  # it looks at earlier tokens of the stream, which a KV cache does not keep
        )


def restore_configs(conversion: Conversion, head: PreTrainedModel) -> None:
    """The plain configs come back, with what was changed since in the converted ones (a vocabulary was resized)."""
    restored: dict[int, PreTrainedConfig] = {}
    for number, (new, plain) in conversion.configs.items():
        changed = _changed(
            new, plain, () if conversion.depth.residual.token_local else ("use_cache",)
        )
        restored[number] = plain
        if changed:
            restored[number] = copy.copy(plain)
            restored[number].__dict__.update(changed)
    for number, (new, plain) in conversion.configs.items():
        for name, inner in new.__dict__.items():
            if restored.get(id(inner)) is not None and restored[
                id(inner)
            ] is not plain.__dict__.get(name):
                restored[number] = (
                    copy.copy(plain) if restored[number] is plain else restored[number]
                )
                restored[number].__dict__[name] = restored[id(inner)]
    for module in head.modules():
        config = module.__dict__.get("config")
        if id(config) in restored:
            module.__dict__["config"] = restored[id(config)]


def _changed(new: PreTrainedConfig, plain: PreTrainedConfig, ours: Sequence[str]) -> dict[str, Any]:
    """Besides what a conversion, or saving, has set."""
    skipped = {"headwater", "model_type", "transformers_version", "architectures", "dtype", *ours}
    return {
        name: value
        for name, value in new.__dict__.items()
        if name not in skipped
        and not isinstance(value, PreTrainedConfig)
        and value != plain.__dict__.get(name)
    }


def _retype(config: PreTrainedConfig, cls: type[PreTrainedConfig]) -> None:
    config.__class__ = cls
    config.__dict__.pop(
        "model_type", None
    )  # a config read from a file has the type on the instance too
