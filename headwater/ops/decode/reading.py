"""The norm and the merge that a projection may apply to what it reads."""

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """An RMSNorm: weight (D,), eps."""

    weight: Tensor
    eps: float


class Merge(NamedTuple):
    """Phase 2 of Block Attention Residuals for one read.

    Phase 1's output (B, D) and log-sum-exp (B,); the query times the key norm's weight, fp32 (D,);
    eps of the keys' norm.
    """

    out: Tensor
    lse: Tensor
    folded: Tensor
    eps: float
