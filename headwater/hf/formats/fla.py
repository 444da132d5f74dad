"""Models of flash-linear-attention with Attention Residuals.

A `transformer` becomes the transformers model that it is: Llama, or Qwen2 where query, key and value have a bias, or
Qwen3 where query and key are normed. All others are fla's own class, built without its residual and converted.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from headwater.errors import UserError
from headwater.hf.convert.layouts import FLA_TYPES
from headwater.hf.convert.registration import fla_config

from .released import FLA, load_released

MODEL_TYPE = "transformer"
DEFAULTS = {  # of its config class, for a config.json that leaves them out
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_heads": 32,
    "num_kv_heads": None,
    "qkv_bias": False,
    "qk_norm": False,
    "window_size": None,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD_NORM_EPS = (
    1e-5  # of fla's query and key norms, whatever its config says; Qwen3 has one eps for all norms
)


def is_fla(config: Mapping[str, Any]) -> bool:
    """Tell whether a config is of a model that has Attention Residuals of fla's."""
    return config.get(FLA.block_field) is not None


def load_fla(folder: Path, config: Mapping[str, Any]) -> PreTrainedModel:
    """The model of a folder that fla saved, converted to `attnres-block`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no .safetensors file")
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return read_fla(weights, config)


def read_fla(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> PreTrainedModel:
    """A checkpoint of flash-linear-attention with Attention Residuals.

    Arguments: `weights`, its tensors by name; `config`, what its config.json holds.

    Returns a converted model, in evaluation mode, that computes the same: of a `transformer` transformers' model, of
    any other type fla's own class, which needs fla and a GPU to run.
    Raises `headwater.errors.UserError` for a model of another kind, and for weights that do not fit the config.
    """
    model_type = config.get("model_type", MODEL_TYPE)
    if model_type not in FLA_TYPES:
        raise UserError(
            f"fla's models with Attention Residuals that can be read are {', '.join(FLA_TYPES)}; got '{model_type}'"
        )
    plain: PreTrainedConfig
    if model_type == MODEL_TYPE:
        config = {**DEFAULTS, **config}
        plain = plain_config(weights, config)
    else:
        plain = fla_config(model_type).from_dict({**config, FLA.block_field: None})
        config = {**plain.to_dict(), FLA.block_field: config[FLA.block_field]}
    model = AutoModelForCausalLM.from_config(plain)
    ours = dict(weights)
    embedding = next(
        (tensor for name, tensor in ours.items() if name.endswith(".embeddings.weight")), None
    )
    if embedding is None:
        raise UserError(
            f"the weights do not fit a '{model_type}': they have no '*.embeddings.weight'"
        )
    if config["tie_word_embeddings"]:  # then files hold it once
        ours.setdefault("lm_head.weight", embedding)
    model.to(embedding.dtype)
    load_released(model, ours, config)
    return model.eval()


def plain_config(
    weights: Mapping[str, Tensor], config: Mapping[str, Any]
) -> LlamaConfig | Qwen2Config | Qwen3Config:
    _check(config)
    heads = config["num_heads"]
    shape = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": weights["model.layers.0.mlp.gate_proj.weight"].shape[
            0
        ],  # the config may leave it out
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config["num_kv_heads"] or heads,
        "head_dim": config["hidden_size"] // heads,
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": config["norm_eps"],
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        **{
            name: config[name]
            for name in ("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
        },
    }
    if config["qkv_bias"]:
        return Qwen2Config(**shape)
    return Qwen3Config(**shape) if config["qk_norm"] else LlamaConfig(**shape)


def _check(config: Mapping[str, Any]) -> None:
    """Refuse what none of the three models computes."""
    wrong = {
        "window_size": config["window_size"] is not None,
        "hidden_act": config["hidden_act"] != "swish",
        "qkv_bias": config["qkv_bias"] and config["qk_norm"],
        "qk_norm": config["qk_norm"] and config["norm_eps"] != HEAD_NORM_EPS,
    }
    for name, refused in wrong.items():
        if refused:
            raise UserError(
                f"a model of fla with {name}={config[name]} has no counterpart in transformers"
                + (
                    f" unless norm_eps is {HEAD_NORM_EPS}, as in its query and key norms"
                    if name == "qk_norm"
                    else ""
                )
            )
