"""Numerics that several operators share: sums in fp32 (fp64 stays fp64), whatever autocast says."""

import torch
import torch.nn.functional as F
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of tensors of `dtype`: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def full_precision(x: Tensor) -> torch.autocast:
    """Make a context in which operations keep the dtype of their operands.

    Under autocast, products would round logits to bf16, and norms would return fp32.
    """
    # Before torch 2.13, asking torch whether a device has autocast breaks the graph.
    kind = x.device.type
    return torch.autocast("cpu" if kind == "meta" else kind, enabled=False)


def wide(x: Tensor) -> Tensor:
    """Return x in the dtype that sums are computed in."""
    return x.to(accumulation_dtype(x.dtype))


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear map in full precision, also under autocast.

    Gates read small differences of a large stream off its result.
    """
    x = wide(x)
    if bias is not None:
        bias = bias.to(x.dtype)
    with full_precision(x):
        return F.linear(x, weight.to(x.dtype), bias)


def project_normed(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return weight RMSNorm(x).

    The norm is one scalar per row, so it multiplies the result: the normed x is never formed.
    """
    return project(x, weight) * rms_scale(x, eps)


def rms_scale(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the factor by which RMSNorm multiplies x, (..., 1).

    A CPU computes the length of x sooner, but a length has no second derivative where x is zero.
    """
    mean_square = wide(x).square().mean(-1, keepdim=True)
    return torch.rsqrt(mean_square + eps)


def shares(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 - b and b = sigmoid(z), the weights of two sources whose logits are 0 and z.

    Both weights and their gradients are as exact as z. If b were computed first and had rounded to
    one, 1 - b would be zero, and so would sigmoid's own gradient, b (1 - b).
    """
    return F.logsigmoid(-z).exp(), F.logsigmoid(z).exp()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis of `x` (..., D), in its dtype.

    `weight` is (D,), or None for ones.
    """
    mean_square = x.square().mean(-1, keepdim=True)
    y = x * torch.rsqrt(mean_square + eps)
    return y if weight is None else y * weight.to(x.dtype)
