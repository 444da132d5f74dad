"""SwiGLU: the feed-forward sublayer."""

from torch import Tensor

from headwater.ops.routing import Backend
from headwater.ops.swiglu import swiglu
from headwater.residuals.one_token import Reading

from .cache import Entry
from .config import ModelConfig
from .part import Angles, Part
from .projection import are_plain, linear, project_joined


class SwiGLU(Part):
    """output(silu(gate(x)) * up(x))."""

    backend: Backend = "auto"
    """Backend of the gate, used where one product makes gate and up."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        width = config.mlp_dim if width is None else width  # hidden channels
        self.gate = linear(config.dim, width)
        self.up = linear(config.dim, width)
        self.output = linear(width, config.dim)

    def can_step(self) -> bool:
        return are_plain(self.gate, self.up, self.output)

    def step(
        self,
        reading: Reading,
        rotary: Angles,
        cache: Entry | None,
        backend: Backend,
    ) -> Tensor:
        return reading.project(self.gate.weight, self.up.weight, gated=True, backend=backend)

    def scaled_by_gain(self) -> tuple[Tensor, ...]:
        """The weights that a residual may ask to start smaller, besides the output's."""
        return self.gate.weight, self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        projections = project_joined(x, self.gate, self.up)
        return self.output(swiglu(*projections, backend=self.backend))
