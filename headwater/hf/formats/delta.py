"""The added parameters alone: a file of kilobytes, for a base that stays as it was.

A delta file holds the residual's tensors under their names in the whole model, and in its header how
the model was converted, with a hash over both. `save_delta` writes one beside a base; a converted
folder is such a file beside links to the base's weights (convert.py).
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headwater.errors import UserError
from headwater.folders import whole_file
from headwater.hf.convert.conversion import convert_with, load_added
from headwater.hf.convert.depth import RESIDUAL, fill, mark_filled
from headwater.hf.convert.install import conversion_of
from headwater.hf.convert.report import Report
from headwater.hf.convert.start import new_residual


def save_delta(model: nn.Module, path: str | Path) -> None:
    """Write what the conversion added to `model`, and how, to one safetensors file at `path`.

    It takes kilobytes, without the body's weights. Raises `headwater.errors.UserError` if the model is
    not converted.
    """
    with whole_file(Path(path)) as scratch:
        write_added(model, scratch)


def write_added(model: nn.Module, path: Path, dtype: torch.dtype | None = None) -> list[str]:
    """Write a delta file in a dtype, or in the residual's own. Returns the names of its tensors.

    A residual on the meta device is written with its start values.
    """
    conversion, body = conversion_of(model)
    depth = conversion.depth
    residual = depth.residual
    if any(parameter.is_meta for parameter in residual.parameters()):
        # A model that was never loaded has no values yet.
        residual = new_residual(residual.spec, residual.dim, residual.sublayers, depth.kinds)
    # Under these names transformers finds the tensors in a folder too.
    prefix = f"{path_of(model, body)}{RESIDUAL}."
    tensors: dict[str, Tensor] = {}
    for name, tensor in residual.state_dict().items():
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        tensors[prefix + name] = tensor.detach().cpu().contiguous()
    how = {"architecture": conversion.report.architecture, **body.config.headwater}
    about = json.dumps(how)
    metadata = {"format": "pt", "headwater": about, "sha256": _hash(about, tensors)}
    save_file(tensors, path, metadata=metadata)
    return list(tensors)


def path_of(model: nn.Module, module: nn.Module) -> str:
    """The path of a module in a model, with a dot at its end; empty for the model itself."""
    name = next(name for name, part in model.named_modules() if part is module)
    return f"{name}." if name else ""


def _hash(about: str, tensors: Mapping[str, Tensor]) -> str:
    """The hash of what a delta file says and of its tensors."""
    # The settings are hashed with the tensors: one without the other computes something else.
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_delta(model: nn.Module, path: str | Path) -> Report:
    """Convert a plain `model`, in place, as the file at `path` says, and give it the file's parameters.

    Returns the report of the conversion.
    Raises `headwater.errors.UserError` for what `save_delta` has not written, or was written for
    another shape.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
            metadata = file.metadata()
            about, sha256 = metadata["headwater"], metadata["sha256"]
    except (SafetensorError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a delta file of headwater: {error}") from None
    if sha256 != _hash(about, tensors):
        raise UserError(f"{path} is not what was written: its hash differs. Take it from a copy")
    # The hash covers the header too, so that it can be taken as it is.
    report = convert_with(model, json.loads(about))
    weights = {name.partition(f"{RESIDUAL}.")[2]: tensor for name, tensor in tensors.items()}
    residual = conversion_of(model)[0].depth.residual
    load_added(model, residual, weights, f"{path} does not fit the residual '{report.residual}'")
    return report


def reset(model: nn.Module) -> None:
    """Give the added parameters of `model` their start values: for one converted on the meta device,
    after `to_empty`. Buffers of the model itself that no checkpoint holds stay empty."""
    depth = conversion_of(model)[0].depth
    mark_filled(depth.residual, False)
    fill(depth)
