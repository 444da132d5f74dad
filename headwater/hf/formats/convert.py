"""Convert a checkpoint folder, and take a conversion back, without writing its weights again.

What a conversion adds is a delta file of a few vectors a layer; the rest is linked. A model that fits in
memory is loaded and tried first, as `headwater.convert` does. Of one that does not fit only the shapes
are looked at, and the report says so.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from headwater.errors import UserError, spell, user_values
from headwater.folders import check_hashes, whole_folder
from headwater.generation.prompt_portions import free_bytes
from headwater.hf.convert.classes import class_of
from headwater.hf.convert.conversion import convert
from headwater.hf.convert.depth import RESIDUAL
from headwater.hf.convert.install import conversion_of, revert
from headwater.hf.convert.layouts import PREFIX, Layout
from headwater.hf.convert.report import Report
from headwater.residuals import parse

from .decoder import DecoderConfig
from .delta import path_of, write_added
from .fla import is_fla
from .folder import check_out, load, load_config, read_config
from .remote import FILE as REMOTE_CODE
from .remote import write_remote_code
from .shards import ADDED, copy_companions, link_weights, size_of, weight_map

HEADING = "## Residual"
NOTE = f"""
{HEADING}

This checkpoint has the residual `{{residual}}` of [headwater]. Its model type, `{{model_type}}`, is
known to transformers after `import headwater.hf`:

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
    with user_values():  # a misspelt residual is no reason to load a model
        parse("attnres-block" if residual is None else residual)
    config = _config_of(source)
    # Weights in another dtype have to be loaded to be written.
    loads = dtype is not None or (_fits(source) if check is None else check)
    # The name of the final norm, where the folder's names are the model's.
    norm = None
    if is_fla(config):
        # Its own tensors have other names, so all are written again.
        if residual is not None:
            leave_out = f"leave {spell('model.residual')} out"
            raise UserError(f"{source} has Attention Residuals already: {leave_out}")
        model, loads = load(source, dtype or "auto", device), True
        report = conversion_of(model)[0].report
    else:
        model = load(source, dtype or "auto", device) if loads else _empty(source)
        report = convert(
            model, residual or "attnres-block", layout=layout, check=check is not False
        )
        norm = _norm_in(model, source)
    with whole_folder(out) as folder:
        if norm is not None and dtype is None:
            # The folder calls its tensors as the model does, so the added ones can stand beside them.
            with safe_open(source / weight_map(source)[norm], "pt") as file:
                stored = file.get_tensor(norm).dtype
            link_weights(source, folder, added=write_added(model, folder / ADDED, stored))
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
        # The modeling file says what it needs in the config.
        if remote_code:
            _write_config(folder, read_config(folder) | write_remote_code(model, folder))
    return report


def add_remote_code(source: Path, out: Path) -> None:
    """Write a converted checkpoint folder, trained or not, once more: with a modeling file, its weights linked."""
    check_out(out)
    config = _config_of(source)
    model = _empty(source)
    with whole_folder(out) as folder:
        link_weights(source, folder)
        copy_companions(source, folder)
        _write_config(folder, config | write_remote_code(model, folder))


def revert_folder(source: Path, out: Path) -> str:
    """Write a converted checkpoint folder as the plain model that it came from. Returns the residual it had."""
    check_out(out)
    config = _config_of(source)
    model = _empty(source)
    conversion, body = conversion_of(model)
    if not weight_map(source):
        raise UserError(f"{source} holds no safetensors files")
    if conversion.release is not None:
        # The weights of its residual go back under transformers' names.
        model = load(source)
        revert(model)
        with whole_folder(out) as folder:
            model.save_pretrained(folder)
            copy_companions(source, folder)
        return conversion.report.residual
    with whole_folder(out) as folder:
        link_weights(source, folder, removed=f"{path_of(model, body)}{RESIDUAL}.")
        copy_companions(source, folder)
        (folder / REMOTE_CODE).unlink(missing_ok=True)
        # The config says again what the plain model's said.
        plain = {key: config[key] for key in config if key not in ("headwater", "auto_map")}
        plain["model_type"] = config["model_type"].removeprefix(PREFIX)
        plain["architectures"] = [type(model).plain.__name__]  # type: ignore[attr-defined]
        _write_config(folder, plain)
        readme = folder / "README.md"
        # The note at the end of the README goes too.
        if readme.is_file():
            text = readme.read_text(encoding="utf-8")
            readme.write_text(text.partition(HEADING)[0], encoding="utf-8")
    return conversion.report.residual


def _config_of(source: Path) -> dict[str, Any]:
    """The config of a folder with a model that transformers has."""
    config = read_config(source)
    if config.get("model_type") == DecoderConfig.model_type:
        raise UserError(
            f"{source} is headwater's own decoder with the residual it was trained with: there is no "
            "model of transformers under it, to be converted, reverted or written as a modeling file. "
            "Train with another residual (headwater train --init-from RUN), or export the run in "
            "another dtype"
        )
    return config


def is_converted(source: Path) -> bool:
    return str(read_config(source).get("model_type")).startswith(PREFIX)


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _empty(source: Path) -> PreTrainedModel:
    """The model of a folder without its weights."""
    check_hashes(source)
    config = load_config(source)
    model_class = class_of(config)
    # Shapes alone: a model of any size fits.
    with torch.device("meta"):
        if issubclass(model_class, PreTrainedModel):
            return model_class(config)
        return model_class.from_config(config)


def _norm_in(model: PreTrainedModel, source: Path) -> str | None:
    """The name of the final norm's weight, which every model has, if the folder has it too."""
    conversion, body = conversion_of(model)
    norm = getattr(body, conversion.layout.final_norm)
    path, files = path_of(model, norm), weight_map(source)
    names = [f"{path}{name}" for name, _ in norm.named_parameters()]
    return next((name for name in names if name in files), None)


def _fits(source: Path) -> bool:
    """Tell whether a folder's weights take at most half of the memory that is free."""
    free = free_bytes(torch.device("cpu"))
    return free is None or 2 * size_of(source) <= free


def _write_note(folder: Path, model: PreTrainedModel) -> None:
    """Write how the model is loaded at the end of the README, for whoever opens the folder."""
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    residual = model.config.headwater["residual"]
    note = NOTE.format(residual=residual, model_type=model.config.model_type)
    readme.write_text((text + note).lstrip(), encoding="utf-8")
