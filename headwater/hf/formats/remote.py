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

from .delta import path_of

FILE = "modeling_headwater.py"
STEM = FILE.removesuffix(".py")
TEMPLATE = Path(__file__).with_name("modeling.txt")  # no module: the names of classes are filled in
HEADS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}


def write_remote_code(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Write the modeling file of a converted model to `folder`.

    Returns: fields for the config, with which `trust_remote_code=True` finds it.

    Raises: UserError for another residual than Attention Residuals as the paper has them, and for a
    head or a layer that the file does not cover.
    """
    plain: Any = type(model).plain  # type: ignore[attr-defined]
    heads = [auto for ending, auto in HEADS.items() if plain.__name__.endswith(ending)]
    obstacle = _obstacle(model, plain, heads)
    if obstacle is not None:
        raise UserError(
            f"{spell('remote_code')} writes a file for Attention Residuals with their defaults in "
            f"language models and classifiers of transformers, and this is {obstacle}"
        )
    base = type(model.base_model)
    converted, converted_base = type(model).__name__, f"Headwater{base.__name__}"
    plain_config = type(model.config).__mro__[1]
    # Words of the template, and the classes that they stand for.
    names = {
        "PLAIN_BASE_MODULE": base.__module__,
        "PLAIN_BASE": base.__name__,
        "MADE_BASE": converted_base,
        "PLAIN_CONFIG": plain_config.__name__,
        "PLAIN_MODEL": plain.__name__,
        "MADE_MODEL": converted,
        "MODEL_TYPE": PREFIX + plain_config.model_type,  # type: ignore[attr-defined]
    }
    # The template is Python but for the names of the classes.
    text = TEMPLATE.read_text(encoding="utf-8")
    for mark, name in names.items():
        text = text.replace(mark, name)
    (folder / FILE).write_text(text, encoding="utf-8")
    auto_map = {"AutoConfig": f"{STEM}.Config", heads[0]: f"{STEM}.{converted}"}
    if heads[0] == "AutoModelForCausalLM":  # a classifier builds its own body by AutoModel
        auto_map["AutoModel"] = f"{STEM}.{converted_base}"
    settings = {**model.config.headwater, "remote": _description(model)}
    return {"auto_map": auto_map, "headwater": settings}


def _obstacle(model: PreTrainedModel, plain: type, heads: list[str]) -> str | None:
    """The part of a model that the modeling file does not cover."""
    conversion, body = conversion_of(model)
    residual = conversion.depth.residual
    if not heads or not plain.__module__.startswith("transformers."):
        return f"a {plain.__name__} of {plain.__module__}"
    if not isinstance(residual, AttentionResidual) or not residual.phased:
        return f"'{residual.spec}'"
    if any(parts_of_layer(layer)["fp32"] for layer in getattr(body, conversion.layout.layers)):
        return f"a {plain.__name__} that keeps its stream in fp32"
    return None


def _description(model: PreTrainedModel) -> dict[str, Any]:
    """The description of the layers that the file needs."""
    conversion, body = conversion_of(model)
    residual: Any = conversion.depth.residual
    # Most layers are alike: the config describes each kind once.
    kinds: list[dict[str, Any]] = []
    layer_kinds: list[int] = []
    for layer in getattr(body, conversion.layout.layers):
        kind = _kind(layer)
        if kind not in kinds:
            kinds.append(kind)
        layer_kinds.append(kinds.index(kind))
    return {
        "body": path_of(model, body).removesuffix("."),
        "layers": conversion.layout.layers,
        "norm": conversion.layout.final_norm,
        "width": residual.dim,
        "block": residual.block,
        "eps": residual.eps,
        "kinds": kinds,
        "layer_kinds": layer_kinds,
    }


def _kind(layer: Any) -> dict[str, Any]:
    """The parts of a layer as a config has them, without the layer's place in the network."""
    parts = parts_of_layer(layer)
    # The file does not know it: `_obstacle` refuses it.
    del parts["fp32"]
    parts["takes"] = {name: asdict(takes) for name, takes in parts["takes"].items()}
    parts["sites"] = [asdict(site) for site in parts["sites"]]
    for site in parts["sites"]:
        del site["sublayer"]
    return json.loads(json.dumps(parts, default=sorted))  # sets and tuples become lists
