"""SwiGLU: the feed-forward sublayer."""

from torch import Tensor, nn

from headwater.ops.routing import Backend
from headwater.ops.swiglu import swiglu

from .config import ModelConfig
from .projection import project_joined


class SwiGLU(nn.Module):
    backend: Backend = "auto"
    """Of what is between the products, where one product makes gate and up."""

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
        return self.output(swiglu(*project_joined(x, self.gate, self.up), backend=self.backend))
