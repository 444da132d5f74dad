"""Models of flash-linear-attention with Attention Residuals.

A `transformer` becomes the transformers model that it is: Llama, or Qwen2 where query, key and value
have a bias, or Qwen3 where query and key are normed. All others are fla's own class, built without its
residual and converted.
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

from .names import FLA
from .released import load_released

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
# transformers' names of the settings above where they are others
NAMES = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
}
# fla's query and key norms have this eps, whatever its config says; Qwen3 has one eps for all norms.
HEAD_NORM_EPS = 1e-5


def is_fla(config: Mapping[str, Any]) -> bool:
    """Tell whether a config is of a model that has Attention Residuals of fla's."""
    return config.get(FLA.block_field) is not None


def load_fla(folder: Path, config: Mapping[str, Any]) -> PreTrainedModel:
    """The model of a folder that fla saved, converted to `attnres-block`."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return read_fla(weights, config)


def read_fla(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> PreTrainedModel:
    """A checkpoint of flash-linear-attention with Attention Residuals.

    Arguments: `weights`, its tensors by name; `config`, what its config.json holds.

    Returns a converted model, in evaluation mode, that computes the same: of a `transformer`
    transformers' model, of any other type fla's own class, which needs fla and a GPU to run.
    Raises `headwater.errors.UserError` for a model of another kind, and for weights that do not fit
    the config.
    """
    model_type = config.get("model_type", MODEL_TYPE)
    if model_type not in FLA_TYPES:
        raise UserError(
            f"fla's models with Attention Residuals that can be read are {', '.join(FLA_TYPES)}; "
            f"got '{model_type}'"
        )
    plain: PreTrainedConfig
    if model_type == MODEL_TYPE:
        config = {**DEFAULTS, **config}
        plain = plain_config(weights, config)
    else:
        # fla's class without its residual, which is converted then.
        plain = fla_config(model_type).from_dict({**config, FLA.block_field: None})
        config = {**plain.to_dict(), FLA.block_field: config[FLA.block_field]}
    model = AutoModelForCausalLM.from_config(plain)
    tensors = dict(weights)
    # The embedding says the dtype, and is the head too where they are tied.
    for name, embedding in weights.items():
        if name.endswith(".embeddings.weight"):
            model.to(embedding.dtype)
            if config["tie_word_embeddings"]:  # then files hold it once
                tensors.setdefault("lm_head.weight", embedding)
    load_released(model, tensors, config)
    return model.eval()


def plain_config(
    weights: Mapping[str, Tensor], config: Mapping[str, Any]
) -> LlamaConfig | Qwen2Config | Qwen3Config:
    """The config of the model of transformers that computes a `transformer` of fla.

    Raises UserError for a setting that none of the three models has.
    """
    qk_norm, biases = config["qk_norm"], config["qkv_bias"]
    without_counterpart = {
        "window_size": config["window_size"] is not None,
        "hidden_act": config["hidden_act"] != "swish",
        "qkv_bias": biases and qk_norm,
        "qk_norm": qk_norm and config["norm_eps"] != HEAD_NORM_EPS,
    }
    for name, refused in without_counterpart.items():
        if refused:
            raise UserError(
                f"a model of fla with {name}={config[name]} has no counterpart in transformers "
                f"(qk_norm has one without qkv_bias and with norm_eps={HEAD_NORM_EPS})"
            )
    without_name = ("qkv_bias", "qk_norm", "window_size", "rope_theta", "hidden_act")
    shape: dict[str, Any] = {
        NAMES.get(name, name): config[name] for name in DEFAULTS if name not in without_name
    }
    shape |= {
        "num_key_value_heads": config["num_kv_heads"] or config["num_heads"],
        # The config may leave it out.
        "intermediate_size": weights["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "head_dim": config["hidden_size"] // config["num_heads"],
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
    }
    # Llama has no biases, Qwen2 has them for query, key and value.
    if biases:
        return Qwen2Config(**shape)
    return Qwen3Config(**shape) if qk_norm else LlamaConfig(**shape)
