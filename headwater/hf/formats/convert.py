"""Convert a checkpoint folder, and take a conversion back, without writing its weights again.

What a conversion adds is a few vectors a layer; the rest is linked. A model that fits in memory is loaded and tried
first, as `headwater.convert` does; of one that does not fit only the shapes are looked at, and the report says so.
"""

import json
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from headwater.errors import UserError, spell, user_values
from headwater.folders import check_hashes, whole_folder
from headwater.hf.convert.classes import class_of
from headwater.hf.convert.conversion import convert
from headwater.hf.convert.depth import RESIDUAL
from headwater.hf.convert.install import conversion_of
from headwater.hf.convert.layouts import PREFIX, Layout
from headwater.hf.convert.report import Report
from headwater.hf.convert.start import new_residual
from headwater.residuals import parse

from .decoder import DecoderConfig
from .fla import is_fla
from .folder import check_out, load, load_config, read_config
from .remote import FILE as REMOTE_CODE
from .remote import write_remote_code
from .shards import copy_companions, link_weights, size_of, unlink_weights, weight_map

NOTE = """
## Residual

This checkpoint has the residual `{residual}` of [headwater]. Its model type, `{model_type}`, is known to transformers
after `import headwater.hf`:

    import headwater.hf
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("THIS FOLDER")

[headwater]: https://pypi.org/project/headwater
"""


def convert_folder(
    source: Path,
    out: Path,
    residual: str | None = None,
    *,
    layout: Layout | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    check: bool | None = None,
    remote_code: bool = False,
) -> Report:
    """Write a checkpoint folder with another residual.

    Arguments:
        source: a transformers checkpoint, or one of fla that has Attention Residuals, which it then keeps.
        out: the folder to write, new or empty. If anything goes wrong, nothing is left there.
        residual: with its options, as `attnres-block:block=4`; attnres-block by default.
        layout: for an architecture that the table does not know.
        dtype: of the weights that are written, such as "bfloat16"; by default they are linked as they are.
        device: where the model is tried.
        check: load the model and try it before and after; by default where it fits in memory.
        remote_code: add a modeling file with which `trust_remote_code=True` loads the folder without headwater.

    Returns: the report of the conversion.

    Raises: `headwater.errors.UserError`.

        print(convert_folder(Path("llama"), Path("llama-attnres"), "attnres-block:block=4"))
    """
    check_out(out)
    chosen = "attnres-block" if residual is None else residual
    with user_values():  # a misspelt residual is no reason to load a model
        parse(chosen)
    config = read_config(source)
    if is_fla(config):
        return _convert_fla(source, out, residual)
    _refuse_decoder(source, config)
    if is_converted(source):
        spec = (config.get("headwater") or {}).get("residual")
        take_back = f"headwater revert {quote(str(source))} --out OTHER"
        raise UserError(f"{source} is converted already, to '{spec}': {take_back} first")
    loads = _fits(source) if check is None else check
    if not loads and dtype is not None:
        raise UserError(
            f"{spell('dtype')} writes all weights again, for which the model must be loaded: "
            f"leave {spell('check')} no out"
        )
    model = load(source, dtype or "auto", device) if loads else _empty(source)
    report = convert(model, chosen, layout=layout)
    with whole_folder(out) as folder:
        if dtype is None and _named_alike(model, source):
            link_weights(source, folder, _added(model, source))
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder)
        elif loads:
            model.save_pretrained(folder)
        else:
            raise UserError(
                f"the tensors of {source} have other names than the model's: convert it with "
                f"{spell('check')} yes"
            )
        copy_companions(source, folder)
        _write_note(folder, model)
        if remote_code:
            _write_config(folder, read_config(folder) | write_remote_code(model, folder))
    return report


def add_remote_code(source: Path, out: Path) -> None:
    """Write a converted checkpoint folder, trained or not, once more: with a modeling file, its weights linked."""
    check_out(out)
    _refuse_decoder(source, read_config(source))
    model = _empty(source)
    with whole_folder(out) as folder:
        unlink_weights(source, folder, ())
        copy_companions(source, folder)
        _write_config(folder, read_config(source) | write_remote_code(model, folder))


def revert_folder(source: Path, out: Path) -> str:
    """Write a converted checkpoint folder as the plain model that it came from. Returns the residual it had."""
    check_out(out)
    config = read_config(source)
    if not is_converted(source):
        raise UserError(f"{source} is not a checkpoint that headwater has converted")
    _refuse_decoder(source, config)
    model = _empty(source)
    _, body = conversion_of(model)
    with whole_folder(out) as folder:
        if not weight_map(source):
            raise UserError(f"{source} holds no safetensors files")
        unlink_weights(source, folder, f"{_path(model, body)}{RESIDUAL}.")
        plain = {
            name: value for name, value in config.items() if name not in ("headwater", "auto_map")
        }
        plain["model_type"] = config["model_type"].removeprefix(PREFIX)
        plain["architectures"] = [type(model).plain.__name__]  # type: ignore[attr-defined]
        copy_companions(source, folder)
        (folder / REMOTE_CODE).unlink(missing_ok=True)
        _write_config(folder, plain)
        readme = folder / "README.md"
        if readme.is_file():
            readme.write_text(
                readme.read_text(encoding="utf-8").partition(NOTE.splitlines()[1])[0],
                encoding="utf-8",
            )
    return str(config["headwater"]["residual"])


def _refuse_decoder(source: Path, config: dict[str, Any]) -> None:
    if config.get("model_type") == DecoderConfig.model_type:
        raise UserError(
            f"{source} is headwater's own decoder with the residual it was trained with: there is no model of "
            "transformers under it, to be converted, reverted or written as a modeling file. Train with another "
            "--residual (headwater train --init-from RUN), or export the run in another --dtype"
        )


def is_converted(source: Path) -> bool:
    return str(read_config(source).get("model_type")).startswith(PREFIX)


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _convert_fla(source: Path, out: Path, residual: str | None) -> Report:
    model = load(source)
    report = conversion_of(model)[0].report
    if residual is not None:
        raise UserError(
            f"{source} has Attention Residuals already, '{report.residual}': leave "
            f"{spell('model.residual')} out"
        )
    with whole_folder(out) as folder:
        model.save_pretrained(folder)
        copy_companions(source, folder)
        _write_note(folder, model)
    return report


def _empty(source: Path) -> PreTrainedModel:
    """The model of a folder without its weights."""
    check_hashes(source)
    config = load_config(source)
    model_class = class_of(config)
    with torch.device("meta"):
        if issubclass(model_class, PreTrainedModel):
            return model_class(config)
        return model_class.from_config(config)


def _named_alike(model: PreTrainedModel, source: Path) -> bool:
    """Tell whether the folder calls its tensors as the model does: then added ones can stand beside them."""
    return any(name in weight_map(source) for name in _norm_names(model))


def _norm_names(model: PreTrainedModel) -> list[str]:
    """Names of the parameters of the final norm, which every checkpoint has."""
    conversion, body = conversion_of(model)
    norm = getattr(body, conversion.layout.final_norm)
    return [f"{_path(model, norm)}{name}" for name, _ in norm.named_parameters()]


def _path(model: PreTrainedModel, module: torch.nn.Module) -> str:
    name = next(name for name, part in model.named_modules() if part is module)
    return f"{name}." if name else ""


def _added(model: PreTrainedModel, source: Path) -> dict[str, Tensor]:
    """The residual's tensors under their names in the whole model, in the dtype that the folder's norms have."""
    conversion, body = conversion_of(model)
    residual = conversion.depth.residual
    if any(parameter.is_meta for parameter in residual.parameters()):
        kinds = conversion.depth.kinds
        residual = new_residual(residual.spec, residual.dim, len(kinds), kinds)
    listed = weight_map(source)
    name = next(name for name in _norm_names(model) if name in listed)
    with safe_open(source / listed[name], "pt") as file:
        dtype = file.get_tensor(name).dtype
    prefix = f"{_path(model, body)}{RESIDUAL}."
    tensors = residual.state_dict().items()
    return {
        prefix + key: (t.to(dtype) if t.is_floating_point() else t).cpu().contiguous()
        for key, t in tensors
    }


def _fits(source: Path) -> bool:
    """Tell whether a folder's weights take at most half of the memory that is free."""
    about = Path("/proc/meminfo")
    if not about.is_file():
        return True
    free = next(line for line in about.read_text().splitlines() if line.startswith("MemAvailable"))
    return 2 * size_of(source) <= 1024 * int(free.split()[1])


def _write_note(folder: Path, model: PreTrainedModel) -> None:
    """Write how the model is loaded at the end of the README, for whoever opens the folder."""
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    note = NOTE.format(
        residual=model.config.headwater["residual"], model_type=model.config.model_type
    )
    readme.write_text((text + note).lstrip(), encoding="utf-8")
