"""Measures of how widely a read spreads its weights over depth; the trainer logs them as it
goes."""

import torch
from torch import Tensor


def shares(matrix: Tensor) -> Tensor:
    """|M| with rows that sum to one, of a depth-mixing matrix (reads, sources, ...); a row of zeros
    stays zero."""
    size = matrix.abs()
    tiny = torch.finfo(matrix.dtype).tiny
    return size / size.sum(1, keepdim=True).clamp_min(tiny)


def entropy(matrix: Tensor) -> Tensor:
    """Entropy of each row's shares, in nats, (reads, ...); matrix (reads, sources, ...), as
    `mixing` returns it.

    `entropy(mixing(residual, trace.sources))` is log n for a read of n sources with equal weights,
        0 for one alone.
    """
    # 0 log 0 counts as zero.
    p = shares(matrix)
    return -torch.special.xlogy(p, p).sum(1)
