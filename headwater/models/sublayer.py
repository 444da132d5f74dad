"""A sublayer: a pre-norm, and one of the parts that mix tokens or channels behind it."""

from collections.abc import Callable

from torch import Tensor, nn

from headwater.residuals import Read, State
from headwater.residuals.base import apply_norm

from .attention import Attention
from .cache import Entry
from .config import ModelConfig
from .kda import KDA
from .mla import MLA
from .mlp import SwiGLU
from .moe import MoE
from .norm import RMSNorm
from .part import Angles

Body = Attention | KDA | MLA | SwiGLU | MoE

BODIES: dict[str, Callable[[ModelConfig, bool], Body]] = {
    "attention": lambda config, mixes_values: Attention(config, mixes_values=mixes_values),
    "shortswa": lambda config, _: Attention(config, window=config.shortswa),
    "kda": lambda config, _: KDA(config),
    "mla": lambda config, _: MLA(config),
    "mlp": lambda config, _: SwiGLU(config),
    "moe": lambda config, _: MoE(config),
}


class Sublayer(nn.Module):
    """A pre-norm and the part behind it, by its kind.

    `mixes_values`: attention also reads the first attention's values; `keeps_values`: it hands on
    the values that it computed.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: str,
        *,
        mixes_values: bool = False,
        keeps_values: bool = False,
    ) -> None:
        super().__init__()
        self.kind, self.keeps_values = kind, keeps_values
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.body = BODIES[kind](config, mixes_values)

    def can_step(self) -> bool:
        """Tell whether one token of every row can run in fused launches."""
        # They would not keep the values that later sublayers mix in.
        return type(self.norm) is RMSNorm and not self.keeps_values and self.body.can_step()

    def forward(
        self,
        x: Read,
        rotary: Angles,
        cache: Entry | None,
        values: State,
        normed: bool,
    ) -> tuple[Tensor, State]:
        """Return the output (..., D), and the first attention's values once they are there.

        `normed`: the read has applied the norm already.
        """
        if not normed:
            x = apply_norm(self.norm, x)
        if isinstance(self.body, Attention):
            y, new_values = self.body(x, rotary, cache, *values)
            return y, (new_values,) if self.keeps_values else values
        if isinstance(self.body, KDA | MLA):
            return self.body(x, cache), values
        return self.body(x), values
