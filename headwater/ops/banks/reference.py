"""A bank's sums in plain PyTorch: the mathematics is in `operators`."""

from collections.abc import Sequence

import torch
from torch import Tensor


def combine(sources: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return sum_n weights_n * sources_n in the dtype of the sources.

    Every weight broadcasts against a source. One running sum instead of a stack: three passes per
    source and no copy of the sources.
    """
    total = sources[0] * weights[0]
    for source, weight in zip(sources[1:], weights[1:], strict=True):
        total = torch.addcmul(total, source.to(total.dtype), weight)
    return total.to(sources[0].dtype)


def mix_bank(bank: Sequence[Tensor], weights: Tensor) -> tuple[Tensor, ...]:
    ways = [way.split(1, -1) for way in weights.unbind(-2)]
    return tuple(combine(bank, way) for way in ways)
