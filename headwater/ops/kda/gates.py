"""The log decay of KDA, g <= 0: each channel of the state keeps the share exp(g).

    softplus:   g = -exp(a) softplus(x + b)           without bound (Kimi Linear, arXiv 2510.26692)
    bounded:    g = -5 sigmoid(exp(a) (x + b))        never below -5 (Kimi K3)

a is one number per head, b one per channel. fp32 throughout.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.ops.numerics import accumulation_dtype, full_precision

GATES = ("softplus", "bounded")
LOWER_BOUND = -5.0


def kda_gate(
    x: Tensor, rate: Tensor, bias: Tensor, form: Literal["softplus", "bounded"] = "softplus"
) -> Tensor:
    """Compute the log decay of each channel.

    Arguments:
        x: what the layer computes from its input, (..., H, K).
        rate: logarithm of each head's rate, (H,).
        bias: of each channel, (H, K).
        form: "softplus" or "bounded".

    Returns: (..., H, K) in fp32 (fp64 stays fp64), none above zero.

        g = kda_gate(torch.randn(1, 8, 2, 4), torch.zeros(2), torch.zeros(2, 4))
    """
    dtype = accumulation_dtype(x.dtype)
    with full_precision(x):
        x = x.to(dtype) + bias.to(dtype)
        speed = rate.to(dtype).exp()[:, None]  # (H, 1)
        if form == "bounded":
            return LOWER_BOUND * torch.sigmoid(speed * x)
        return -speed * F.softplus(x)
