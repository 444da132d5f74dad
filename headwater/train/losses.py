"""The loss of one forward pass, the same for a whole model and for the last stage of a pipeline."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def half_precision(device: torch.device, *, cached: bool = True) -> torch.autocast:
    """Run the model itself in bf16 on a GPU.

    `cached`: weights that are rounded stay so until the context ends, which a CUDA graph must not see.
    """
    on_gpu = device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=cached)


def nats_per_token(logits: Tensor, targets: Tensor) -> Tensor:
    """(B, T) from logits (B, T, vocab), in fp32."""
    # Along the last axis: with the vocabulary in the middle the softmax is slow
    rows = logits.flatten(0, -2).float()
    return F.cross_entropy(rows, targets.flatten(), reduction="none").view_as(targets)
