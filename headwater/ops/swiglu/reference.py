"""SwiGLU's gate in plain PyTorch; autograd has its gradient."""

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up
