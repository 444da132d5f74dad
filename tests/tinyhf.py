"""Small random models of every architecture in the table, without a download."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from transformers import AutoModelForCausalLM

from headwater.hf.convert.registration import own_config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB = 67

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
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "sliding_window": 8,
    "residual_multiplier": 0.22,  # Granite's own default of 1 would hide a forgotten one
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF = {"deepseek_v2": {"num_key_value_heads": 4}, "deepseek_v3": {"num_key_value_heads": 4}}


def tiny_config(model_type: str, **overrides):
    kind = own_config(model_type)
    default = kind()
    sizes = {name: value for name, value in (SIZES | OF.get(model_type, {})).items() if hasattr(default, name)}
    if getattr(default, "layer_types", None):
        sizes["layer_types"] = None  # as many as there are layers now
    return kind(**{**sizes, **overrides})


def tiny_model(model_type: str, seed: int = 0, **overrides):
    """In eval mode; norms and biases away from one and zero, so that a forgotten one shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **overrides)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens(batch: int = 2, length: int = 12, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def stir(model, amount: float = 0.5) -> None:
    """Move the added parameters off their start, so that the residual is not the plain one any more."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "residual." in name:
                parameter.add_(amount * torch.randn(parameter.shape).to(parameter))  # the same draw on any device
