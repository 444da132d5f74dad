"""Numerics that several operators share: sums in fp32 (fp64 stays fp64), whatever autocast says."""

import torch
import torch.nn.functional as F
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of tensors of `dtype`: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def full_precision(x: Tensor) -> torch.autocast:
    """Operations inside keep the dtype of their operands: under autocast products would round logits to bf16, and
    norms would return fp32."""
    kind = (
        x.device.type
    )  # asking torch whether a device has autocast breaks the graph before torch 2.13
    return torch.autocast("cpu" if kind == "meta" else kind, enabled=False)


def wide(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map in full precision, also under autocast: gates read off small differences of a large stream."""
    x = wide(x)
    with full_precision(x):
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def project_normed(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """weight RMSNorm(x). The norm is one scalar, so it multiplies the result: the normed x is neither made nor kept."""
    return project(x, weight) * rms_scale(x, eps)


def rms_scale(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the factor by which RMSNorm multiplies x, (..., 1).

    It is not made of the length of x, which a CPU has sooner: where x is zero, a length has no second derivative.
    """
    return torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)


def shares(z: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 1 - b and b = sigmoid(z), the weights of two sources whose logits are 0 and z; they and their gradients
    are as exact as z. Of a b that has rounded to one, 1 - b is zero, and so is sigmoid's own gradient, b (1 - b)."""
    return F.logsigmoid(-z).exp(), F.logsigmoid(z).exp()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last axis of `x` (..., D), in its dtype; `weight` (D,) or
    None."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.to(x.dtype)
