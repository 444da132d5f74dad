"""Put a residual into a transformers model, on its instances alone; and take it out again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
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
from .find import Parts, layout_for
from .layers import Site, converted_layer, converted_model, converted_norm, part_of, take_input
from .layouts import PREFIX, Layout
from .norms import ScaledNorm, foldable
from .opening import Taken, copy_weights, give_back, take_modules
from .plan import Plan
from .releases import Release
from .report import Report, describe
from .start import new_residual


@dataclass
class Conversion:
    """The record that `revert` needs; kept on the model that owns the layers."""

    report: Report
    depth: Depth
    layout: Layout  # of the whole model
    classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)
    # Attributes of instances that were replaced
    attributes: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)
    hooks: list[RemovableHandle] = field(default_factory=list)
    # Modules of a released residual, which ours stands for
    taken: list[Taken] = field(default_factory=list)
    release: Release | None = None
    # By the id of the converted config: that one, and the plain one
    configs: dict[int, tuple[PreTrainedConfig, PreTrainedConfig]] = field(default_factory=dict)


def install(
    plan: Plan, *, head: type[Any], config: type[PreTrainedConfig], unchecked: str
) -> Report:
    """Change the model as planned.

    Arguments:
        head, config: the classes that the whole model and its config get.
        unchecked: why nobody has compared the model with what it was before.
    """
    parts = plan.parts
    residual = _residual(plan)
    # The residual becomes a part of the body: saved, moved and trained with it.
    parts.body.add_module(RESIDUAL, residual)
    depth = Depth(parts.body, plan.kinds, tuple(plan.settings["scales"]))
    depth.norms.update(_foldable_norms(plan, depth.scales))
    # From here on `revert` can undo what is done.
    conversion = Conversion(describe(plan, residual, unchecked), depth, parts.layout)
    replace_config(parts, conversion, {**plan.settings, "residual": residual.spec}, config)
    # The marks tell a converted layer what its own class does not say.
    for layer, sites in zip(parts.layers, plan.groups, strict=True):
        layout = layout_for(layer, parts)
        marks = {
            "_depth_sites": sites,
            "_depth_arguments": positional_names(layer),
            "_depth_multiplier": layout.multiplier,
            "_depth_returns": layout.returns,
            "_depth_fp32": bool(layout.fp32 and getattr(layer, layout.fp32)),
            "_depth_takes": takes_of(layer, sites, layout),
        }
        replace_class(conversion, layer, type(layer), converted_layer(type(layer)), marks)
        for name in layout.switched_off:
            conversion.attributes.append((layer, {name: getattr(layer, name)}))
            setattr(layer, name, False)
    if parts.release is not None:
        conversion.release = parts.release
        conversion.taken = take_modules(parts.body, parts.layers, plan.groups, parts.release)
        if parts.release.final == parts.layout.final_norm:
            setattr(parts.body, parts.release.final, parts.norm)
        fp32 = parts.head._keep_in_fp32_modules_strict or ()
        copy_weights(conversion.taken, residual, parts.release, fp32)
    replace_class(conversion, parts.norm, type(parts.norm), converted_norm(type(parts.norm)))
    # A model without a head owns the loop itself.
    loops = parts.body is parts.head
    if not loops:
        replace_class(conversion, parts.body, type(parts.body), converted_model(type(parts.body)))
    # A head that was built from a config is of its converted class already.
    replace_class(conversion, parts.head, head.plain, head, {"_depth_loops": loops})
    # Reads of three lay their inputs side by side; each projection takes its third.
    for which, projection in plan.split:
        conversion.hooks.append(projection.register_forward_pre_hook(partial(take_input, which)))
    parts.body.__dict__["_conversion"] = conversion
    return conversion.report


def _residual(plan: Plan) -> Residual:
    """The residual with its start values, each sublayer's parameters on the device of its layer."""
    parts, kinds = plan.parts, plan.kinds
    # Norms are never quantised, so the residual takes their dtype.
    like = next(parts.norm.parameters(), next(parts.body.parameters()))
    device = execution_device(parts.layers[0], like.device)
    # Drawn on the CPU, the start is the same on any device. On meta there are no values.
    with torch.device("meta" if device.type == "meta" else "cpu"):
        dim = parts.body.config.hidden_size
        residual = new_residual(plan.settings["residual"], dim, len(kinds), kinds)
    # A released one takes the dtypes of the weights that it is given.
    residual = residual.to(device, like.dtype if parts.release is None else torch.float32)
    residual.spec = pinned(residual)
    # A sublayer's parameters go where its layer computes.
    devices: dict[int | None, torch.device] = {len(kinds): execution_device(parts.norm, device)}
    for layer, sites in zip(parts.layers, plan.groups, strict=True):
        for site in sites:
            devices[site.sublayer] = execution_device(layer, device)
    place(residual, devices)
    if device.type != "meta":
        mark_filled(residual)
    return residual


def takes_of(layer: nn.Module, sites: Sequence[Site], layout: Layout) -> dict[str, Takes]:
    """The arguments of every module that a sublayer calls after its norm.

    An MLP, and what follows a body, gets only what it names.
    """
    modules: dict[str, Takes] = {}
    for site in sites:
        for name in site.bodies:
            module = part_of(layer, name)
            if isinstance(module, nn.Module):
                everything = name == site.body and site.kind != "mlp"
                renames = {own: other for part, own, other in layout.renames if part == name}
                modules[name] = takes(module, layer, everything, renames)
    return modules


def _foldable_norms(plan: Plan, scales: Sequence[float]) -> dict[int, ScaledNorm]:
    """The norms that a kernel can fold into the read before them, by the number of the read."""
    norms = {len(scales) - 1: plan.parts.norm}
    for layer, sites in zip(plan.parts.layers, plan.groups, strict=True):
        for site in sites:
            if site.norm is not None and site.second is None:
                norms[site.sublayer] = part_of(layer, site.norm)
    folded = {i: foldable(norm, scales[i]) for i, norm in norms.items()}
    return {i: norm for i, norm in folded.items() if norm is not None}


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
        # Every mark of a conversion begins alike.
        for name in [name for name in module.__dict__ if name.startswith("_depth")]:
            del module.__dict__[name]
    for module, attributes in conversion.attributes:
        module.__dict__.update(attributes)
    restore_configs(conversion, head)
    if conversion.release is not None:
        give_back(conversion.taken, conversion.depth.residual, conversion.release)
    delattr(body, RESIDUAL)
    del body.__dict__["_conversion"]


def find_conversion(model: nn.Module) -> tuple[Conversion, PreTrainedModel] | None:
    """The record of a conversion and the model that owns the layers, somewhere in a model."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and "_conversion" in module.__dict__:
            return module.__dict__["_conversion"], module
    return None


def conversion_of(model: nn.Module) -> tuple[Conversion, PreTrainedModel]:
    conversion = find_conversion(model)
    if conversion is None:
        kind = type(model).__name__
        raise UserError(f"this {kind} is not a model that headwater.convert has converted")
    return conversion


def replace_class(
    conversion: Conversion,
    module: nn.Module,
    original: type[nn.Module],
    converted: type[nn.Module],
    marks: Mapping[str, Any] | None = None,
) -> None:
    """Give a module its converted class; `original` is what `revert` gives back."""
    conversion.classes.append((module, original))
    module.__class__ = converted
    module.__dict__.update({"_depth": conversion.depth, **(marks or {})})
    # Accelerate keeps the bound forward that it wraps, and puts it back.
    for name in ("_old_forward", "forward"):
        # It would put back the forward of the plain class.
        bound = module.__dict__.get(name)
        if isinstance(bound, MethodType) and bound.__func__ is original.forward:
            conversion.attributes.append((module, {name: bound}))
            module.__dict__[name] = MethodType(converted.forward, module)


def replace_config(
    parts: Parts,
    conversion: Conversion,
    settings: dict[str, Any],
    converted: type[PreTrainedConfig],
) -> None:
    """Give the model a config of its own, everywhere the old one was: models may share a config object.

    So it goes with the configs inside it, of the parts of a vision-language model.
    """
    # The copy keeps the identity of configs inside configs.
    old = parts.head.config
    copies: dict[int, Any] = {}
    copied = copy.deepcopy(old, copies)
    # A model that is built from a converted config keeps it, and the copy becomes the plain one.
    built = old.model_type.startswith(PREFIX)
    if built:
        _retype(copied, type(old).__mro__[1])
        del copied.headwater
    else:
        _retype(copied, converted)
    ours = old if built else copied
    ours.headwater = {**settings, "loads_after": "import headwater.hf"}
    # The parts share one config object: each gets the copy of its own.
    for module in parts.head.modules():
        config = module.__dict__.get("config")
        twin = copies.get(id(config))
        if isinstance(config, PreTrainedConfig) and twin is not None:
            new, plain = (config, twin) if built else (twin, config)
            conversion.configs[id(new)] = (new, plain)
            module.__dict__["config"] = new
    if not conversion.depth.residual.token_local:
        # It looks at earlier tokens of the stream, which a KV cache does not keep.
        parts.body.config.use_cache = False


def restore_configs(conversion: Conversion, head: PreTrainedModel) -> None:
    """Put the plain configs back, with what was changed since in the converted ones.

    A vocabulary may have been resized, for example.
    """
    skipped = {"headwater", "model_type", "transformers_version", "architectures", "dtype"}
    if not conversion.depth.residual.token_local:
        skipped.add("use_cache")
    restored: dict[int, PreTrainedConfig] = {}
    for new, plain in conversion.configs.values():
        _restore(new, plain, skipped, restored)
    # The modules point at the plain ones again.
    for module in head.modules():
        config = module.__dict__.get("config")
        if id(config) in restored:
            module.__dict__["config"] = restored[id(config)]


def _restore(
    new: PreTrainedConfig,
    plain: PreTrainedConfig,
    skipped: set[str],
    restored: dict[int, PreTrainedConfig],
) -> PreTrainedConfig:
    """The plain config itself if nothing was changed; else a copy: other models may share it."""
    if id(new) in restored:
        return restored[id(new)]
    changed: dict[str, Any] = {}
    for name in new.__dict__.keys() - skipped:
        value, before = new.__dict__[name], plain.__dict__.get(name)
        # The configs of parts stand inside others.
        if isinstance(value, PreTrainedConfig) and isinstance(before, PreTrainedConfig):
            value = _restore(value, before, skipped, restored)
            if value is before:
                continue
        if value != before:
            changed[name] = value
    restored[id(new)] = copy.copy(plain) if changed else plain
    restored[id(new)].__dict__.update(changed)
    return restored[id(new)]


def _retype(config: PreTrainedConfig, cls: type[PreTrainedConfig]) -> None:
    config.__class__ = cls
    # A config read from a file has the type on the instance too.
    config.__dict__.pop("model_type", None)
