"""Numerics shared by the residuals: weights and gates in fp32 (fp64 stays fp64), one downcast of what they mix."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.ops.numerics import project, project_normed, rms_scale, wide

__all__ = ["combine", "project", "project_normed", "rms_scale", "wide"]


def combine(sources: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """sum_n weights_n * sources_n in the dtype of the sources; every weight broadcasts against a source.

    One running sum instead of a stack: three passes a source and no copy of the sources.
    """
    total = sources[0] * weights[0]
    for source, weight in zip(sources[1:], weights[1:], strict=True):
        total = torch.addcmul(total, source.to(total.dtype), weight)
    return total.to(sources[0].dtype)
