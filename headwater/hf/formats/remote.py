"""A converted checkpoint for those without headwater: a modeling file of its own, and what it needs in the config."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headwater.errors import UserError, spell
from headwater.hf.convert.install import conversion_of
from headwater.hf.convert.layers import parts_of_layer
from headwater.hf.convert.layouts import PREFIX
from headwater.residuals.attention import AttentionResidual

FILE = "modeling_headwater.py"
TEMPLATE = Path(__file__).with_name("modeling.txt")  # no module: the names of classes are filled in
HEADS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}


def write_remote_code(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Write the modeling file of a converted model to `folder`.

    Returns: fields for the config, with which `trust_remote_code=True` finds it.

    Raises: UserError for another residual than Attention Residuals as the paper has them, and for a head or a layer
    that the file does not cover.
    """
    plain: Any = type(model).plain  # type: ignore[attr-defined]
    auto = next((auto for end, auto in HEADS.items() if plain.__name__.endswith(end)), None)
    if auto is None:
        raise UserError(
            f"{spell('remote_code')} writes language models and classifiers, and this is a "
            f"{plain.__name__}"
        )
    if plain.__module__.partition(".")[0] != "transformers":
        package = plain.__module__.partition(".")[0]
        raise UserError(
            f"{spell('remote_code')} builds on a class of transformers; of a {plain.__name__} "
            f"its modeling file is {package}'s, "
            "not transformers'"
        )
    about = _about(model)
    base = type(model.base_model)
    made, made_base = type(model).__name__, f"Headwater{base.__name__}"
    names = {
        "PLAIN_BASE_MODULE": base.__module__,
        "PLAIN_BASE": base.__name__,
        "MADE_BASE": made_base,
        "PLAIN_CONFIG": type(model.config).__mro__[1].__name__,
        "PLAIN_MODEL": plain.__name__,
        "MADE_MODEL": made,
        "MODEL_TYPE": PREFIX + type(model.config).__mro__[1].model_type,  # type: ignore[attr-defined]
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for mark, name in names.items():
        text = text.replace(mark, name)
    (folder / FILE).write_text(text, encoding="utf-8")
    stem = FILE.removesuffix(".py")
    auto_map = {"AutoConfig": f"{stem}.Config", auto: f"{stem}.{made}"}
    if auto == "AutoModelForCausalLM":  # a classifier builds its own body by AutoModel
        auto_map["AutoModel"] = f"{stem}.{made_base}"
    return {
        "auto_map": auto_map,
        "headwater": {**model.config.headwater, "remote": about},
    }


def _about(model: PreTrainedModel) -> dict[str, Any]:
    """The description of the layers that the file needs."""
    conversion, body = conversion_of(model)
    residual, layout = conversion.depth.residual, conversion.layout
    if not isinstance(residual, AttentionResidual) or not residual.phased:
        raise UserError(
            f"{spell('remote_code')} knows attnres-block and attnres-full with their defaults, "
            f"not '{residual.spec}'"
        )
    kinds: list[dict[str, Any]] = []
    layer_kinds: list[int] = []
    for layer in getattr(body, layout.layers):
        kind = _kind(layer)
        if kind not in kinds:
            kinds.append(kind)
        layer_kinds.append(kinds.index(kind))
    path = next(name for name, module in model.named_modules() if module is body)
    parts = {
        "body": path,
        "layers": layout.layers,
        "norm": layout.final_norm,
        "width": residual.dim,
    }
    return {
        **parts,
        "block": residual.block,
        "eps": residual.eps,
        "kinds": kinds,
        "layer_kinds": layer_kinds,
    }


def _kind(layer: Any) -> dict[str, Any]:
    parts = parts_of_layer(layer)
    if parts.pop("fp32"):
        raise UserError(
            f"{spell('remote_code')} does not cover the stream in fp32 of a {type(layer).__name__}"
        )
    takes = {name: asdict(arguments) for name, arguments in parts["takes"].items()}
    for arguments in takes.values():
        if arguments["without"] is not None:
            arguments["without"] = sorted(arguments["without"])
    sites = [
        {key: value for key, value in asdict(site).items() if key != "sublayer"}
        for site in parts["sites"]
    ]
    return json.loads(
        json.dumps({**parts, "sites": sites, "takes": takes})
    )  # with lists, as a config has them
