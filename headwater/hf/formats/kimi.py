"""Kimi Linear checkpoints in headwater's decoder and back: transformers' names, and the released ones.

A checkpoint of transformers' `kimi_linear` is a decoder of `models`, with its layers as a pattern.
names.py has the names of the tensors; the tables here have those of the settings.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwater.errors import UserError, user_values
from headwater.folders import at_home, check_hashes, whole_folder
from headwater.models import Decoder, ModelConfig
from headwater.models.pattern import write_pattern
from headwater.residuals import Residual, parse
from headwater.residuals.attention import AttentionResidual

from .names import KIMI_K3, from_release, read_names, to_release, write_names

# Settings of the decoder; what a config calls each, transformers' name first; and its default.
SETTINGS = (
    ("vocab_size", "vocab_size", None),
    ("dim", "hidden_size", None),
    ("layers", "num_hidden_layers", None),
    ("heads", "num_attention_heads", 32),
    ("mlp_dim", "intermediate_size", None),
    ("context", "model_max_length max_position_embeddings", 4096),
    ("tie_embeddings", "tie_word_embeddings", False),
    ("norm_eps", "rms_norm_eps", 1e-5),
    ("kda_heads", "linear_num_heads", 32),
    ("kda_head_dim", "linear_head_dim", 128),
    ("kda_conv", "linear_conv_kernel_dim", 4),
    ("mla_latent", "kv_lora_rank", 512),
    ("mla_head_dim", "qk_nope_head_dim", 128),
    ("mla_shared_dim", "qk_rope_head_dim", 64),
    ("mla_value_dim", "v_head_dim", 128),
    ("experts", "num_experts num_local_experts", 256),
    ("experts_per_token", "num_experts_per_token num_experts_per_tok", 8),
    ("expert_dim", "moe_intermediate_size", 1024),
    ("shared_experts", "num_shared_experts n_shared_experts", 1),
    ("expert_scale", "routed_scaling_factor", 2.446),
)
# The released config has these in `linear_attn_config`: its names, and transformers'.
LINEAR = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
# Settings of a config that the decoder has only one value of. A released config says the first ones.
RELEASED_ONLY: dict[str, Any] = {
    "model_type": "kimi_linear",
    "q_lora_rank": None,
    "hidden_act": "silu",
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "num_expert_group": 1,
    "mla_use_nope": True,
    "moe_layer_freq": 1,
}
ONLY: dict[str, Any] = {
    **RELEASED_ONLY,
    "attention_bias": False,
    "norm_topk_prob": True,
    "n_group": 1,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
    "linear_use_full_rank_gate": False,
}
MIXERS = {"linear_attention": "kda", "full_attention": "mla"}


def load_kimi(folder: str | Path, residual: str | None = None) -> Decoder:
    """A Kimi Linear checkpoint as a decoder, with any residual.

    Arguments:
        folder: config.json and .safetensors files, with transformers' names or the released ones.
        residual: how depth is connected, such as "attnres-block:block=6"; its own parameters begin at
            their start. None takes the checkpoint's: the plain residual, or Attention Residuals with
            what they have learned.

    Returns: a `Decoder` in fp32 on the CPU. All of it is held in memory.

    Raises: `headwater.errors.UserError` for a model that the decoder does not compute, such as Kimi K3
        with its gates and latent experts, and for weights that are not those of the config's layers.

        model = headwater.hf.load_kimi("Kimi-Linear", residual="attnres-block:block=6")
    """
    folder = at_home(folder)
    check_hashes(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = kimi_settings(config)
    if residual is not None:
        settings["residual"] = residual
    model = Decoder(ModelConfig.from_dict(settings))
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    # A release with Attention Residuals has names of its own for them.
    if config.get(KIMI_K3.block_field) is not None:
        tensors = from_release(tensors, KIMI_K3)
    with user_values():
        weights = read_names(tensors, model.config)
        # Another residual begins anew, and so does one that the checkpoint does not have.
        learned = [name for name in weights if name.startswith("residual.")]
        if residual is not None or not learned:
            start = model.weights().items()
            weights = {name: weights[name] for name in weights if name not in learned}
            weights |= {name: tensor for name, tensor in start if name.startswith("residual.")}
        model.load_weights(weights)
    return model


def save_kimi(model: Decoder, folder: str | Path, *, released: bool = False) -> None:
    """Write a decoder as a Kimi Linear checkpoint: config.json and model.safetensors.

    Arguments:
        model: a decoder of KDA and MLA layers with the plain residual; where `released`, Block
            Attention Residuals too, if their blocks are whole layers and their eps is the model's
            (`attnres-block:block=4,eps=1e-5`).
        folder: where to; made if need be.
        released: with the names and the config of the released files, as vLLM reads them; else
            transformers' names. transformers loads either, but knows no Attention Residuals here.

    Raises: `headwater.errors.UserError` for a decoder that is no Kimi Linear.

        headwater.hf.save_kimi(model, "mine")
        AutoModelForCausalLM.from_pretrained("mine")
    """
    settings, block = model.config.to_dict(), None
    # Only the released names have a place for the residual.
    if released and model.config.residual != "standard":
        block = _layers_in_a_block(model.residual, model.config)
        settings["residual"] = "standard"
    config = kimi_config(settings)
    weights = write_names(model.weights(), model.config, released)
    if released:
        config |= _released_config(config, next(iter(weights.values())).dtype)
    if block is not None:
        config[KIMI_K3.block_field] = block
        weights = to_release(weights, KIMI_K3)
    with whole_folder(at_home(folder)) as partial:
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})


def _layers_in_a_block(residual: Residual, config: ModelConfig) -> int:
    """The size of a block as the released config counts it.

    Raises UserError for a residual that no such config can say.
    """
    options = parse(residual.spec)[1]
    usual = options.get("key_weight", True) and options.get("scale", "one") == "one"
    # The released config says the size of a block, and nothing else of a residual.
    if isinstance(residual, AttentionResidual) and residual.phased and usual:
        layers, rest = divmod(residual.block, KIMI_K3.block_unit)
        if rest == 0 and residual.eps == config.norm_eps:
            return layers
    raise UserError(
        f"a released Kimi Linear has no residual '{residual.spec}': it must be attnres-block with "
        f"an even block and eps={config.norm_eps}, the model's, and otherwise its defaults"
    )


def kimi_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's settings for a config of transformers' `kimi_linear`, or of a released checkpoint.

    Raises UserError for a config that the decoder does not compute.
    """
    # The released config nests the settings of KDA.
    linear = config.get("linear_attn_config") or {}
    nested = {LINEAR.get(key, f"linear_{key}"): value for key, value in linear.items()}
    config = {**config, **nested}
    heads = config.get("num_attention_heads", 32)
    # Anything else would load, and compute something else.
    for name, value in {**ONLY, "num_key_value_heads": heads}.items():
        if config.get(name, value) not in (value, None):
            raise UserError(
                f"{name} must be {value!r} in a Kimi Linear that the decoder takes, got {config[name]!r}"
            )
    settings: dict[str, Any] = {}
    for native, foreign, default in SETTINGS:
        values = [config[name] for name in foreign.split() if config.get(name) is not None]
        settings[native] = values[0] if values else default
    settings |= {"kv_heads": heads, "kda_norm_eps": settings["norm_eps"]}
    settings |= _layers_of(config)
    settings["residual"] = "standard"
    if config.get(KIMI_K3.block_field) is not None:
        block = min(KIMI_K3.block(config), 2 * config["num_hidden_layers"])
        settings["residual"] = f"attnres-block:block={block},eps={KIMI_K3.eps(config)}"
    return settings


def _layers_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `pattern` and `dense_layers`, from the lists that a config has of its layers."""
    count = config["num_hidden_layers"]
    if config.get("layer_types") is not None:
        mixers = [MIXERS[kind] for kind in config["layer_types"]]
    else:
        # The released list numbers layers from 1.
        full = config["linear_full_attn_layers"]
        mixers = ["mla" if number in full else "kda" for number in range(1, count + 1)]
    first = config.get("first_k_dense_replace", 1)
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense"] * first + ["sparse"] * (count - first)
    # Dense layers before all others are a setting; elsewhere each layer is named.
    first = kinds.index("sparse") if "sparse" in kinds else count
    if "dense" not in kinds[first:]:
        return {"pattern": write_pattern(mixers), "dense_layers": first}
    words = {"dense": "mlp", "sparse": "moe"}
    layers = [f"{mixer}+{words[kind]}" for mixer, kind in zip(mixers, kinds, strict=True)]
    return {"pattern": write_pattern(layers), "dense_layers": 0}


def kimi_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' config for a decoder's settings.

    Raises UserError for a decoder that is no Kimi Linear.
    """
    config = ModelConfig.from_dict(settings)
    layers = config.layout
    other_layers = any(len(layer) != 2 or layer[0] not in ("kda", "mla") for layer in layers)
    # transformers' model computes neither of these.
    unlike = {
        "pattern": other_layers,
        "residual": config.residual != "standard",
        "kda_gate": config.kda_gate != "softplus",
        "kda_norm_eps": config.kda_norm_eps != config.norm_eps,
        "shared_experts": "moe" in config.kinds and config.shared_experts == 0,
    }
    for name, differs in unlike.items():
        if differs:
            raise UserError(
                f"a decoder with {name} '{getattr(config, name)}' has no counterpart in Kimi Linear, "
                f"whose norms all have one eps ({config.norm_eps}) and whose layers are kda or mla"
            )
    # What the decoder derives is written out.
    head = config.dim // config.heads
    experts = max(config.experts, 1)
    values = {
        **config.to_dict(),
        "kda_heads": config.kda_heads or config.heads,
        "kda_head_dim": config.kda_width,
        "mla_latent": config.mla_latent or 4 * head,
        "mla_head_dim": config.mla_head_dim or head,
        "mla_shared_dim": config.mla_shared_dim or head // 2,
        "mla_value_dim": config.mla_value_dim or head,
        "experts": experts,
        "experts_per_token": min(config.experts_per_token, experts),
        "expert_dim": config.expert_width if config.experts else 1,
    }
    kinds = {native: foreign for foreign, native in MIXERS.items()}
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        **{foreign.split()[0]: values[native] for native, foreign, _ in SETTINGS},
        "num_key_value_heads": config.heads,
        "layer_types": [kinds[layer[0]] for layer in layers],
        "mlp_layer_types": ["sparse" if layer[1] == "moe" else "dense" for layer in layers],
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _released_config(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The keys of the released config, which vLLM reads, for a config of transformers'."""
    mlps = config["mlp_layer_types"]
    dense = mlps.index("sparse") if "sparse" in mlps else len(mlps)
    if "dense" in mlps[dense:]:
        raise UserError("the released config names dense layers before all others alone")
    # The released lists count layers from 1.
    numbers: dict[str, list[int]] = {"linear_attention": [], "full_attention": []}
    for number, kind in enumerate(config["layer_types"], start=1):
        numbers[kind].append(number)
    linear = {native: config[foreign] for native, foreign in LINEAR.items()}
    return {
        **RELEASED_ONLY,
        "linear_attn_config": {
            "kda_layers": numbers["linear_attention"],
            "full_attn_layers": numbers["full_attention"],
            **linear,
        },
        "first_k_dense_replace": dense,
        "topk_group": 1,
        "use_grouped_topk": True,
        "max_position_embeddings": config["model_max_length"],
        "dtype": str(dtype).removeprefix("torch."),
    }
