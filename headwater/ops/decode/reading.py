"""What a projection reads: a stream as it is, normed, or merged with what a query found in the finished blocks."""

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """An RMSNorm: weight (D,), eps."""

    weight: Tensor
    eps: float


class Merge(NamedTuple):
    """Phase 2 of Block Attention Residuals for one read: phase 1's output (B, D) and log-sum-exp (B,), and the query
    times the key norm's weight, fp32 (D,); `eps` of the keys' norm."""

    out: Tensor
    lse: Tensor
    folded: Tensor
    eps: float
