"""Running a model as its users do: in one pass, and token by token from a cache, rows with and without padding."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 4  # tokens decoded from the cache
CACHES = ("past_key_values", "cache_params")  # what models call it in their outputs and arguments


def whole(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Logits, or what the last layer gives where the model has no head, of one pass."""
    return _result(model(**inputs))


def decoded(model: nn.Module, inputs: Mapping[str, Any], steps: int = STEPS) -> Tensor | None:
    """Results of all tokens but the last `steps` in one pass, and of the last ones one by one from the cache.

    None where the model gives no cache, or not one result a token.
    """
    length = inputs["input_ids"].shape[1]
    cut = length - min(steps, length - 1)
    out = model(**_until(inputs, cut), use_cache=True)
    parts = [_result(out)]
    cache = next((name for name in CACHES if getattr(out, name, None) is not None), None)
    if cache is None or parts[0].shape[1] != cut:
        return None
    per_token = {
        name: value
        for name, value in inputs.items()
        if _is_per_token(value, inputs["input_ids"].shape)
    }
    for end in range(cut + 1, length + 1):
        until = _until(per_token, end)
        step = {
            name: value if name == "attention_mask" else value[:, -1:]
            for name, value in until.items()
        }
        out = model(**step, **{cache: getattr(out, cache)}, use_cache=True)
        parts.append(_result(out))
    return torch.cat(parts, dim=1)


def pad_left(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Every other row without its first third, if no row has padding of its own."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask.clone()
    if mask.all():
        mask[1::2, : ids.shape[1] // 3] = 0
    return {**inputs, "attention_mask": mask}


def parts_of(mask: Tensor, steps: int = STEPS) -> dict[str, Tensor]:
    """Masks of the kinds of token in a decoded batch, from its attention mask, (B, T). Padding is of no kind."""
    kept, length = mask.bool(), mask.shape[1]
    padded = ~kept.all(1, keepdim=True)
    late = torch.arange(length, device=mask.device) >= length - min(steps, length - 1)
    return {
        "in one pass": kept & ~padded & ~late,
        "rows with padding": kept & padded & ~late,
        "from the cache": kept & ~padded & late,
        "from the cache, rows with padding": kept & padded & late,
    }


def _until(inputs: Mapping[str, Any], end: int) -> dict[str, Any]:
    shape = inputs["input_ids"].shape
    return {
        name: value[:, :end] if _is_per_token(value, shape) else value
        for name, value in inputs.items()
    }


def _is_per_token(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == shape


def _result(out: Any) -> Tensor:
    if isinstance(out, tuple):
        return out[0]
    return out.logits if "logits" in out else out.last_hidden_state
