"""SwiGLU: the feed-forward sublayer."""

import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .projection import project_together


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.up = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.output = nn.Linear(config.mlp_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project_together(x, self.gate, self.up)
        return self.output(F.silu(gate) * up)
