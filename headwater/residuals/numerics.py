"""Numerics shared by the residuals: weights and gates in fp32 (fp64 stays fp64), one downcast of what they mix."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.ops.numerics import accumulation_dtype, full_precision


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
    """What RMSNorm multiplies x by, (..., 1)."""
    return torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)


def combine(sources: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """sum_n weights_n * sources_n in the dtype of the sources; every weight broadcasts against a source.

    One running sum instead of a stack: three passes a source and no copy of the sources.
    """
    total = sources[0] * weights[0]
    for source, weight in zip(sources[1:], weights[1:], strict=True):
        total = torch.addcmul(total, source.to(total.dtype), weight)
    return total.to(sources[0].dtype)
