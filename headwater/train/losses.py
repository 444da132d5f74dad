"""The loss of one forward pass, the same for a whole model and for the last stage of a pipeline."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def half_precision(device: torch.device, *, cached: bool = True) -> torch.autocast:
    """The model itself runs in bf16 on a GPU. `cached`: weights that are rounded stay so until the context ends, which
    a CUDA graph must not see."""
    return torch.autocast(
        device.type, dtype=torch.bfloat16, enabled=device.type == "cuda", cache_enabled=cached
    )


def nats_per_token(logits: Tensor, targets: Tensor) -> Tensor:
    """(B, T) from logits (B, T, vocab), in fp32."""
    rows = logits.flatten(
        0, -2
    ).float()  # along the last axis: with the vocabulary in the middle the softmax is slow
    return F.cross_entropy(rows, targets.flatten(), reduction="none").view_as(targets)
