"""Numbers that describe a depth-mixing matrix M (reads, sources, ...), per token.

Entropy and what follows from it treat a row as shares, |M| over its row's sum. Ranks are counted
per token.
"""

import torch
from torch import Tensor

from headwater.residuals.measures import entropy, shares

__all__ = [
    "effective_depth",
    "effective_sources",
    "entropy",
    "numerical_rank",
    "row_sums",
    "semiseparable_rank",
    "shares",
]

TOLERANCE = 1e-4  # of the largest singular value; M comes from fp32 products


def row_sums(matrix: Tensor) -> Tensor:
    """(reads, ...)"""
    return matrix.sum(1)


def effective_sources(matrix: Tensor) -> Tensor:
    """The number of equally weighted sources with a row's entropy, (reads, ...)."""
    return entropy(matrix).exp()


def effective_depth(matrix: Tensor) -> Tensor:
    """The mean distance in sublayers from a read to its sources, weighted by their shares.

    0 is the newest output alone; the embedding is as far from read r as r sublayers. (reads, ...)
    """
    reads, sources = matrix.shape[:2]
    distance = torch.arange(reads).unsqueeze(1) - torch.arange(sources)
    distance = distance.clamp_min(0).to(matrix)
    trailing = [1] * (matrix.dim() - 2)  # axes of tokens
    return (shares(matrix) * distance.view(reads, sources, *trailing)).sum(1)


def numerical_rank(matrix: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """Singular values above `tolerance` times the largest, per token, (...)."""
    values = torch.linalg.svdvals(_tokens_first(matrix))
    return (values > tolerance * values.amax(-1, keepdim=True)).sum(-1)


def semiseparable_rank(matrix: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """The largest rank of a block M[k:, :k + 1], per token, (...).

    A channel's state must carry as many numbers across depth k for the later reads of what came
    before it. A residual of n streams has at most n.
    """
    m = _tokens_first(matrix)
    largest = torch.linalg.svdvals(m).amax(-1, keepdim=True)
    ranks = []
    for k in range(m.shape[-2]):
        values = torch.linalg.svdvals(m[..., k:, : k + 1])
        ranks.append((values > tolerance * largest).sum(-1))
    return torch.stack(ranks).amax(0)


def _tokens_first(matrix: Tensor) -> Tensor:
    return matrix.movedim((0, 1), (-2, -1)).double()
