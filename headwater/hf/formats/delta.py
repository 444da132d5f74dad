"""The added parameters alone: a small file beside a checkpoint that stays as it was."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headwater.errors import UserError
from headwater.folders import whole_file
from headwater.hf.convert.classes import saved_settings
from headwater.hf.convert.conversion import convert_with, load_added
from headwater.hf.convert.depth import fill, mark_filled
from headwater.hf.convert.install import conversion_of
from headwater.hf.convert.report import Report


def save_delta(model: nn.Module, path: str | Path) -> None:
    """Write what the conversion added to `model`, and how, to one safetensors file at `path`: kilobytes, without the
    body's weights. Raises `headwater.errors.UserError` if the model is not converted."""
    conversion, body = conversion_of(model)
    weights = {
        name: p.detach().cpu().contiguous()
        for name, p in conversion.depth.residual.state_dict().items()
    }
    about = json.dumps(
        {"architecture": conversion.report.architecture, **saved_settings(body.config)}
    )
    metadata = {"headwater": about, "sha256": _hash(about, weights)}
    with whole_file(Path(path)) as scratch:
        save_file(weights, scratch, metadata=metadata)


def _hash(about: str, weights: Mapping[str, Tensor]) -> str:
    """The hash of what a delta file says and of its tensors."""
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_delta(model: nn.Module, path: str | Path) -> Report:
    """Convert a plain `model`, in place, as the file at `path` says, and give it the file's parameters.

    Returns the report of the conversion.
    Raises `headwater.errors.UserError` for what `save_delta` has not written, or was written for another shape.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            about = _read_about(metadata, path)
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(f"{path} is not a delta file of headwater: {error}") from None
    if metadata.get("sha256") != _hash(metadata["headwater"], weights):
        raise UserError(f"{path} is not what was written: its hash differs. Take it from a copy")
    report = convert_with(model, about)
    residual = conversion_of(model)[0].depth.residual
    load_added(model, residual, weights, f"{path} does not fit the residual '{report.residual}'")
    return report


def _read_about(metadata: dict[str, str], path: str | Path) -> dict[str, Any]:
    if "headwater" not in metadata:
        raise UserError(
            f"{path} is not a delta file of headwater: its header has no field 'headwater'"
        )
    try:
        about = json.loads(metadata["headwater"])
    except ValueError as error:
        raise UserError(
            f"{path}: the field 'headwater' of its header is damaged: {error}"
        ) from None
    if not isinstance(about, dict) or not {"residual", "scales"} <= about.keys():
        raise UserError(f"{path}: the field 'headwater' of its header names no residual and scales")
    return about


def reset(model: nn.Module) -> None:
    """Give the added parameters of `model` their start values: for one converted on the meta device, after
    `to_empty`. Buffers of the model itself that no checkpoint holds stay empty."""
    depth = conversion_of(model)[0].depth
    mark_filled(depth.residual, False)
    fill(depth)
