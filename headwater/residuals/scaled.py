"""A learned gain on each sublayer's output: one number (ReZero) or one per channel (LayerScale)."""

import torch
from torch import Tensor, nn

from .base import State
from .registry import register
from .standard import StreamResidual


class GainResidual(StreamResidual):
    """h_{i+1} = h_i + gain_i f_i(h_i)."""

    def __init__(self, dim: int, sublayers: int, *, width: int, start: float) -> None:
        super().__init__(dim, sublayers)
        self.at_start = "exact" if start == 1 else "different"
        gains = [torch.full((width,), start) for _ in range(sublayers)]
        self.gains = nn.ParameterDict({str(i): gain for i, gain in enumerate(gains)})

    def _write(self, state: State, i: int, y: Tensor) -> State:
        (h,) = state
        # One operator, in the stream's dtype.
        gain = self.gains[self.keys[i]].to(h.dtype)
        return (torch.addcmul(h, y.to(h.dtype), gain),)


@register("rezero")
class ReZeroResidual(GainResidual):
    """h_{i+1} = h_i + a_i f_i(h_i), one scalar a_i a sublayer.

    `start`: the value of a_i at the start.
    At initialisation: zero, so the network is the identity, different from the plain
    residual (start=1 is equal to it). The paper drops the norms; here a sublayer keeps its
    pre-norm, and attention and MLP have a gain each. Cost: one parameter per sublayer. ReZero,
    arXiv 2003.04887.
    """

    def __init__(self, dim: int, sublayers: int, *, start: float = 0.0) -> None:
        super().__init__(dim, sublayers, width=1, start=start)


@register("layerscale")
class LayerScaleResidual(GainResidual):
    """h_{i+1} = h_i + diag(a_i) f_i(h_i), one gain per channel.

    `start`: the value of a_i at the start.
    At initialisation: 1e-4 (the paper goes down to 1e-6 for deep networks), different from
    the plain residual (start=1 is equal to it). Cost: D parameters per sublayer. CaiT, arXiv
    2103.17239.
    """

    mixes = "channel"

    def __init__(self, dim: int, sublayers: int, *, start: float = 1e-4) -> None:
        super().__init__(dim, sublayers, width=dim, start=start)
