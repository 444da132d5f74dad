"""Models that `headwater train` made, as transformers models: Llama, or Qwen3 where heads are normed.

Only data crosses: the model's settings as a dictionary, and its tensors by name.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headwater.errors import UserError
from headwater.hf.convert.conversion import check_weights, convert

from .decoder import export_decoder

OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
ATTENTION = {
    "norm": "input_layernorm",
    "body.query": "self_attn.q_proj",
    "body.key": "self_attn.k_proj",
    "body.value": "self_attn.v_proj",
    "body.output": "self_attn.o_proj",
    "body.query_norm": "self_attn.q_norm",
    "body.key_norm": "self_attn.k_norm",
}
MLP = {
    "norm": "post_attention_layernorm",
    "body.gate": "mlp.gate_proj",
    "body.up": "mlp.up_proj",
    "body.output": "mlp.down_proj",
}


def export(
    settings: Mapping[str, Any], weights: Mapping[str, Tensor], end_of_text: int | None = None
) -> PreTrainedModel:
    """A decoder of headwater as a transformers model.

    Arguments: `settings`, its ModelConfig as a dict; `weights` by name; `end_of_text`, the token that ends a text.

    Returns a Llama or Qwen3, converted if its residual is not the plain one; with parts that those lack the decoder
    itself, as `AutoModelForCausalLM` loads it after `import headwater.hf`.
    Raises `headwater.errors.UserError` for weights that do not fit.
    """
    other = settings.get("pattern", "attention") != "attention"
    if other or any(settings.get(name) for name in ("shortswa", "value_residual", "experts")):
        return export_decoder(dict(settings), dict(weights), end_of_text)
    model = _plain(settings, end_of_text)
    if settings["residual"] != "standard":
        convert(model, settings["residual"], exact=False)
    ours = {_name(name): tensor for name, tensor in weights.items()}
    if settings["tie_embeddings"]:
        ours.setdefault("lm_head.weight", ours["model.embed_tokens.weight"])
    check_weights(model, ours, "the weights do not fit the settings")
    model.load_state_dict(ours)
    return model.eval()


def _plain(settings: Mapping[str, Any], end_of_text: int | None) -> PreTrainedModel:
    shape = {
        "vocab_size": settings["vocab_size"],
        "hidden_size": settings["dim"],
        "intermediate_size": settings["mlp_dim"],
        "num_hidden_layers": settings["layers"],
        "num_attention_heads": settings["heads"],
        "num_key_value_heads": settings["kv_heads"],
        "head_dim": settings["dim"] // settings["heads"],
        "max_position_embeddings": settings["context"],
        "rms_norm_eps": settings["norm_eps"],
        "rope_parameters": {"rope_type": "default", "rope_theta": settings["rope_theta"]},
        "tie_word_embeddings": settings["tie_embeddings"],
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }
    with torch.random.fork_rng(devices=[]):
        return (
            Qwen3ForCausalLM(Qwen3Config(**shape))
            if settings["qk_norm"]
            else LlamaForCausalLM(LlamaConfig(**shape))
        )


def _name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    head, _, rest = name.partition(".")
    if head == "residual":
        return f"model.{name}"
    index, _, inner = rest.partition(".")
    path, _, leaf = inner.rpartition(".")
    parts = (
        (MLP if int(index) % 2 else ATTENTION) if head == "sublayers" and index.isdigit() else {}
    )
    if path not in parts:
        raise UserError(f"'{name}' is not a tensor of headwater's decoder")
    return f"model.layers.{int(index) // 2}.{parts[path]}.{leaf}"
