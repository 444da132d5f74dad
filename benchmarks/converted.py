"""A token of a Llama, as it is and converted: transformers' own `generate` with its static cache.
A part of `benchmarks.generate`."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

import headwater


def model_of(arm: str, shape: dict[str, Any], dtype: torch.dtype, device: str) -> Any:
    """A Llama of a decoder's shape, converted to Block Attention Residuals in the arm `llama`."""
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab_size"], hidden_size=shape["dim"], intermediate_size=shape["mlp_dim"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    if arm == "llama":
        headwater.convert(model, "attnres-block", check=False)
    return model


def measured(
    model: Any, prompt: torch.Tensor, counts: tuple[int, int], clock: Callable[..., float]
) -> dict[str, Any]:
    """Milliseconds a token, from runs of two lengths over one size of cache, and seconds of the
    first run, which compiles."""
    few, many = counts
    run = partial(continued, model, prompt, many)
    began = time.perf_counter()
    run(many)
    if prompt.is_cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - began
    per_token = []
    for _ in range(3):
        short, long = clock(partial(run, few)), clock(partial(run, many))
        per_token.append((long - short) / (many - few))
    return {"ms": statistics.median(per_token), "first_run_seconds": first}


def continued(model: Any, prompt: torch.Tensor, room: int, new: int) -> Any:
    """`new` tokens; the cache has room for `room`."""

    # A lower max_new_tokens would compile anew
    def enough(tokens: Any, scores: Any, **_: Any) -> Any:
        return torch.full(
            (len(tokens),), tokens.shape[1] >= prompt.shape[1] + new, device=tokens.device
        )

    options = {
        "do_sample": False,
        "cache_implementation": "static",
        "pad_token_id": 0,
        "min_new_tokens": room,
    }
    return model.generate(prompt, max_new_tokens=room, stopping_criteria=[enough], **options)
