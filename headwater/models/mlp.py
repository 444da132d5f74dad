"""SwiGLU: the feed-forward sublayer."""

import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .projection import project_together


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        """`width`: hidden channels, if not the configuration's."""
        super().__init__()
        width = config.mlp_dim if width is None else width
        self.gate = nn.Linear(config.dim, width, bias=False)
        self.up = nn.Linear(config.dim, width, bias=False)
        self.output = nn.Linear(width, config.dim, bias=False)

    def scaled_by_gain(self) -> tuple[Tensor, ...]:
        """The weights that a residual may ask to start smaller, besides the output's."""
        return self.gate.weight, self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project_together(x, self.gate, self.up)
        return self.output(F.silu(gate) * up)
