"""Running a model as its users do: in one pass, and token by token from a cache, rows with and without padding."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 4  # tokens decoded from the cache


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients and dropout; every module is in the mode it had afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def whole(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Logits, or what the last layer gives where the model has no head, of one pass."""
    return _result(model(**inputs))


def decoded(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor | None:
    """The same of all tokens but the last few in one pass, and of those one by one from the cache. None where the model
    gives no cache, or not one result a token."""
    length = inputs["input_ids"].shape[1]
    cut = length - steps_of(length)
    out = model(**_until(inputs, cut), use_cache=True)
    parts = [_result(out)]
    if getattr(out, "past_key_values", None) is None or parts[0].shape[1] != cut:
        return None
    per_token = {name: value for name, value in inputs.items() if _is_per_token(value, inputs["input_ids"].shape)}
    for end in range(cut + 1, length + 1):
        step = {
            name: value if name == "attention_mask" else value[:, -1:] for name, value in _until(per_token, end).items()
        }
        out = model(**step, past_key_values=out.past_key_values, use_cache=True)
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


def parts_of(mask: Tensor) -> dict[str, Tensor]:
    """Which tokens of a decoded batch are of which kind, by its mask, (B, T). Padding is of none."""
    kept = mask.bool()
    padded = ~kept.all(1, keepdim=True)
    late = torch.arange(mask.shape[1], device=mask.device) >= mask.shape[1] - steps_of(mask.shape[1])
    return {
        "rows with padding": kept & padded & ~late,
        "from the cache": kept & ~padded & late,
        "from the cache, rows with padding": kept & padded & late,
    }


def steps_of(length: int) -> int:
    return min(STEPS, length - 1)


def _until(inputs: Mapping[str, Any], end: int) -> dict[str, Any]:
    shape = inputs["input_ids"].shape
    return {name: value[:, :end] if _is_per_token(value, shape) else value for name, value in inputs.items()}


def _is_per_token(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == shape


def _result(out: Any) -> Tensor:
    if isinstance(out, tuple):
        return out[0]
    return out.logits if "logits" in out else out.last_hidden_state
