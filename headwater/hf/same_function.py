"""Compare what two models compute: run each as its users do, and look at every token.

A batch goes through a model in one pass; then, with every other row padded, all but its last tokens in
one pass and the last ones one by one from a cache. The results of both models are compared by kind of
token: as distributions where they are logits (`divergence`), else as vectors (`relative_distance`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwater.evaluation import evaluating

STEPS = 4  # tokens decoded from the cache
CACHES = ("past_key_values", "cache_params")  # what models call it in their outputs and arguments
ONE_PASS = "in one pass"
CACHED = ("from the cache", "from the cache, rows with padding")


def divergence(logits: Tensor, truth: Tensor) -> Tensor:
    """The KL divergence of the truth to a model's logits, (tokens, V), in nats: (tokens,)."""
    log_p, log_q = truth.log_softmax(-1), logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def relative_distance(results: Tensor, truth: Tensor) -> Tensor:
    """|results - truth| / |truth| of each token's vector, (tokens, D): (tokens,)."""
    # Another number of tokens is as far off as can be.
    if results.shape != truth.shape:
        return torch.tensor([torch.inf])
    # Zeros, as padding's, equal zeros.
    expected = truth.double()
    sizes = expected.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    return (results.double() - expected).norm(dim=-1) / sizes


def is_half(dtype: torch.dtype) -> bool:
    """Tell a dtype in which a token may go to another expert by rounding: there the median judges."""
    return dtype.itemsize < torch.float32.itemsize


def one_pass(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Logits, or what the last layer gives where the model has no head, (B, T, V)."""
    with evaluating(model), torch.no_grad():
        return _result(model(**inputs))


def results_by_kind(
    model: nn.Module, inputs: Mapping[str, Any], steps: int = STEPS
) -> dict[str, Tensor]:
    """The results of the tokens that are not padding, each kind (tokens, V).

    Arguments:
        inputs: a batch with padding, as `pad_left` gives it.
        steps: the number of last tokens that are decoded from a cache, one by one.

    Returns nothing where the model gives no cache, or not one result a token.
    """
    results = decode(model, inputs, steps)
    if results is None:
        return {}
    kinds = kinds_of(inputs["attention_mask"], steps)
    return {kind: results[mask] for kind, mask in kinds.items()}


def decode(model: nn.Module, inputs: Mapping[str, Any], steps: int = STEPS) -> Tensor | None:
    """Results of all tokens but the last `steps` in one pass, and of the last ones from the cache.

    None where the model gives no cache, or not one result a token.
    """
    rows, length = inputs["input_ids"].shape
    cut = length - min(steps, length - 1)
    per_token: dict[str, Tensor] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.shape[:2] == (rows, length):
            per_token[name] = value
    first = {name: value[:, :cut] for name, value in per_token.items()}
    with evaluating(model), torch.no_grad():
        # Pixels and the like go along with the prompt.
        out = model(**{**inputs, **first}, use_cache=True)
        results = [_result(out)]
        caches = [name for name in CACHES if getattr(out, name, None) is not None]
        if not caches or results[0].shape[1] != cut:
            return None
        for end in range(cut + 1, length + 1):
            step = {name: value[:, end - 1 : end] for name, value in per_token.items()}
            if "attention_mask" in step:
                # It goes along whole: it says which of the cached tokens are padding.
                step["attention_mask"] = per_token["attention_mask"][:, :end]
            out = model(**step, **{caches[0]: getattr(out, caches[0])}, use_cache=True)
            results.append(_result(out))
    return torch.cat(results, dim=1)


def pad_left(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Mask the first third of every other row, if no row has padding of its own."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask.clone()
    if mask.all():
        mask[1::2, : ids.shape[1] // 3] = 0
    return {**inputs, "attention_mask": mask}


def kinds_of(mask: Tensor, steps: int = STEPS) -> dict[str, Tensor]:
    """Masks of the kinds of token in a decoded batch, from its attention mask, (B, T). Padding is of no kind."""
    tokens, length = mask.bool(), mask.shape[1]
    # A row with padding is another kind: its positions are shifted.
    whole_rows = tokens.all(1, keepdim=True)
    in_one_pass = tokens.clone()
    in_one_pass[:, length - min(steps, length - 1) :] = False
    decoded = tokens & ~in_one_pass
    return {
        ONE_PASS: in_one_pass & whole_rows,
        "rows with padding": in_one_pass & ~whole_rows,
        CACHED[0]: decoded & whole_rows,
        CACHED[1]: decoded & ~whole_rows,
    }


def _result(out: Any) -> Tensor:
    if isinstance(out, tuple):
        return out[0]
    return out.logits if "logits" in out else out.last_hidden_state
