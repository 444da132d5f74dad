"""A token of a Llama: transformers' own generate with its static cache; converted, what `headwater generate` does.
A part of `benchmarks.generate`."""

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

import headwater
from headwater.hf import TransformersEngine
from headwater.models.generate import stream
from headwater.models.sampling import Sampling


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
    arm: str, model: Any, prompt: torch.Tensor, counts: tuple[int, int], clock: Callable[..., float]
) -> dict[str, Any]:
    """Milliseconds a token, from runs of two lengths over one size of cache, and seconds of the first run."""
    few, many = counts
    run = partial(continued if arm == "llama" else continued_by_transformers, model, prompt, many)
    began = time.perf_counter()
    run(many)
    if prompt.is_cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - began
    if arm == "llama" and run(few) != continued(model, prompt, few, few, graph=False):
        return {"refused": "a recorded step draws other tokens than the forward pass"}
    found = [[clock(partial(run, new)) for new in (few, many)] for _ in range(3)]
    each = statistics.median((long - short) / (many - few) for short, long in found)
    return {"ms": each, "first_run_seconds": first}


def continued(model: Any, prompt: torch.Tensor, room: int, new: int, graph: bool = True) -> Any:
    """`new` tokens; the cache has room for more."""
    steps = stream(TransformersEngine(model), prompt, room, Sampling(temperature=0.0), graph=graph)
    return list(itertools.islice(steps, new))


def continued_by_transformers(model: Any, prompt: torch.Tensor, room: int, new: int) -> Any:
    def enough(
        tokens: Any, scores: Any, **_: Any
    ) -> Any:  # a lower max_new_tokens would compile anew
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
