"""RMSNorm as the decoder uses it."""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from headwater.ops.decode import Norm
from headwater.ops.numerics import full_precision


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm in the input's dtype; a residual's kernel can fold it into a read.

    Under autocast torch's own would return fp32, which every projection would round again.
    """

    folds = True

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_weight(x, self.weight)

    def for_kernels(self) -> Norm:
        """The numbers that a kernel needs of this norm."""
        return Norm(self.weight, cast(float, self.eps))

    def apply_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        with full_precision(x):
            return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.eps)
