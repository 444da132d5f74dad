"""Models that `headwater train` made, as models of transformers: Llama, or Qwen3 where heads are normed."""

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

from headwater.hf.convert.conversion import check_weights, convert
from headwater.models import ModelConfig

from .decoder import export_decoder
from .names import write_names


def export(
    settings: Mapping[str, Any], weights: Mapping[str, Tensor], end_of_text: int | None = None
) -> PreTrainedModel:
    """A decoder of headwater as a transformers model.

    Arguments: `settings`, its ModelConfig as a dict; `weights` by name; `end_of_text`, the token that
    ends a text.

    Returns a Llama or Qwen3, converted if its residual is not the plain one; with parts that those
    lack the decoder itself, as `AutoModelForCausalLM` loads it after `import headwater.hf`.
    Raises `headwater.errors.UserError` for weights that do not fit.
    """
    config = ModelConfig.from_dict(settings)
    # Other parts have no counterpart in transformers' models.
    if set(config.kinds) != {"attention", "mlp"} or config.value_residual:
        return export_decoder(config, dict(weights), end_of_text)
    model = _plain(config, end_of_text)
    # Trained with its own scale: nothing is multiplied to look like the plain stream.
    if config.residual != "standard":
        convert(model, config.residual, exact=False)
    # All names are translated, the residual's too.
    tensors = write_names(weights, config)
    if config.tie_embeddings:
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    check_weights(model, tensors, "the weights do not fit the settings")
    model.load_state_dict(tensors)
    return model.eval()


def _plain(config: ModelConfig, end_of_text: int | None) -> PreTrainedModel:
    shape: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.dim // config.heads,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }
    with torch.random.fork_rng(devices=[]):
        if config.qk_norm:
            return Qwen3ForCausalLM(Qwen3Config(**shape))
        return LlamaForCausalLM(LlamaConfig(**shape))
