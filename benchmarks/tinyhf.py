"""Small random models of every architecture in the table, without a download."""

import importlib.util
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from headwater.hf.convert.layouts import ROWS
from headwater.hf.convert.registration import own_config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB = 67
# Their files take the kernels of fla, which need a GPU.
LINEAR = ("kimi_linear", "bailing_hybrid", "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
LINEAR += ("glm5_next", "qwen4_exp")
if not torch.cuda.is_available() and "fla" not in sys.modules:
    sys.modules["fla"] = None  # type: ignore[assignment]  # then importing it fails
    for linear in (
        name for name in LINEAR if importlib.util.find_spec(f"transformers.models.{name}")
    ):
        importlib.import_module(f"transformers.models.{linear}.modeling_{linear}")
    del sys.modules["fla"]

# Every name that some config has for a size; those a config lacks are not set.
SIZES = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(
        (
            "n_group",
            "topk_group",
            "n_shared_experts",
            "num_shared_experts",
            "first_k_dense_replace",
        ),
        1,
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "sliding_window": 8,
    "residual_multiplier": 0.22,  # Granite's own default of 1 would hide a forgotten one
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
KDA = {
    **HYBRID,
    "num_key_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "num_experts_per_token": 2,
}
KDA |= {"num_expert_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
GATED_DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
GATED_DELTA |= {**HYBRID, "linear_num_value_heads": 4}
THETA = {"rope_theta": 1e4}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
LATENT = {
    name: {"num_key_value_heads": 4}
    for name in (
        "deepseek_v2",
        "deepseek_v3",
        "axk1",
        "glm4_moe_lite",
        "youtu",
        "minicpm3",
        "longcat_flash",
    )
}
INDEXER = {"num_key_value_heads": 4, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
OF = {
    **LATENT,
    "deepseek_v32": INDEXER,
    "glm_moe_dsa": INDEXER,
    "axk2": INDEXER,
    "kimi_linear": {**KDA, "q_lora_rank": None},
    "bailing_hybrid": KDA,
    "qwen3_next": GATED_DELTA,
    "qwen3_5_text": GATED_DELTA,
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    }
    | {"use_mamba_kernels": False},
    "bamba": {**MAMBA2, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**MAMBA2, **HYBRID, "shared_intermediate_size": 16},
    "granitemoeshared": {"shared_intermediate_size": 16},
    "minimax": HYBRID,
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 4, "attention_heads": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16},
    "nemotron_h": {"layer_types": ["linear_attention", "full_attention", "mlp", "moe"]}
    | {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "olmo_hybrid": {**HYBRID, "linear_num_key_heads": 4, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "qwen3_5_moe_text": GATED_DELTA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 4}
    | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, **THETA}}
    | {"ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}},
    "gemma4_unified_text": {"global_head_dim": 8},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2}
    | {
        "rope_parameters": dict.fromkeys(
            ("sliding_attention", "full_attention"), {"rope_type": "default"} | THETA
        )
    },
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "lru_width": 32,
        "attention_window_size": 8,
    },
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
}

PARTS: dict[str, dict[str, dict]] = {}  # of a model type, by the type of its part


def tiny_config(model_type: str, **overrides):
    """Make a small config; of a model with several parts, each part is small."""
    kind = own_config(model_type)
    parts = getattr(kind, "sub_configs_defaults", None) or {}
    inner = {name: _part(spec, model_type) for name, spec in parts.items()}
    return kind(**{**_sizes(kind), **inner, **OF.get(model_type, {}), **overrides})


def _part(spec, model_type: str):
    """A config of one part: by the class that its kind says, or by a model type."""
    model_type = getattr(spec, "model_type", None)
    kind = (
        own_config(model_type)
        if isinstance(model_type, str) and not isinstance(spec, type)
        else spec
    )
    sizes = (
        _sizes(kind)
        | OF.get(kind.model_type, {})
        | PARTS.get(model_type, {}).get(kind.model_type, {})
    )
    return kind(**sizes)


def _sizes(kind: type) -> dict[str, object]:
    sizes = {name: value for name, value in SIZES.items() if _takes(kind, name)}
    if _takes(kind, "layer_types"):
        sizes["layer_types"] = None  # as many as there are layers now
    return sizes


def _takes(kind: type, name: str) -> bool:
    """Return whether a config has a field of this name that can be set.

    A size that follows from others is a property."""
    attribute = kind.attribute_map.get(name, name)
    value = getattr(kind, attribute, None)
    if isinstance(value, property):
        return value.fset is not None
    return any(
        {name, attribute} & vars(base).get("__annotations__", {}).keys() for base in kind.__mro__
    )


def tiny_model(model_type: str, seed: int = 0, **overrides):
    """Build a model in eval mode, with norms and biases away from one and zero.

    A forgotten one then shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **overrides)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def sample() -> list[str]:
    """One causal language model of every layout in the table; benchmarks/architectures.py tries them all."""
    pairs = [
        (layout, name)
        for layout, names in ROWS
        for name in names.split()
        if name in CONFIG_MAPPING_NAMES
    ]
    spec_by_type = dict(reversed(pairs))
    return list(reversed(spec_by_type.values()))


def tokens(batch: int = 2, length: int = 12, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def stir(model, amount: float = 0.5) -> None:
    """Move the added parameters off their start, so that the residual is not the plain one any more."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "residual." in name:
                # The same draw on any device
                parameter.add_(amount * torch.randn(parameter.shape).to(parameter))
