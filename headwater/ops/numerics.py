"""Numerics that several operators share: sums in fp32 (fp64 stays fp64), whatever autocast says."""

import torch
import torch.nn.functional as F
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of tensors of `dtype` are computed in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def full_precision(x: Tensor) -> torch.autocast:
    """Operations inside keep the dtype of their operands: under autocast products would round logits to bf16, and
    norms would return fp32."""
    kind = x.device.type  # asking torch whether a device has autocast breaks the graph before torch 2.13
    return torch.autocast("cpu" if kind == "meta" else kind, enabled=False)


def shares(z: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 1 - b and b = sigmoid(z), the weights of two sources whose logits are 0 and z; they and their gradients
    are as exact as z. Of a b that has rounded to one, 1 - b is zero, and so is sigmoid's own gradient, b (1 - b)."""
    return F.logsigmoid(-z).exp(), F.logsigmoid(z).exp()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last axis of `x` (..., D), in its dtype; `weight` (D,) or
    None."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.to(x.dtype)
