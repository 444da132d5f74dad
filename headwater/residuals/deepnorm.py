"""DeepNorm: a post-norm residual whose identity path is scaled up so that very deep networks
train."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .base import State, hold
from .layerwise import layer_starts, sublayer_kinds
from .numerics import rms_scale, wide
from .registry import register
from .standard import StreamResidual


@register("deepnorm")
class DeepNormResidual(StreamResidual):
    """h_{i+1} = RMSNorm_i(a h_i + f_i(h_i)),  a = (2 M)^(1/4) for M layers.

    The norm of write i has its own weight and feeds both the skip and the next sublayer. A
    sublayer's pre-norm then sees a normed stream, on which it is the identity at initialisation:
    what is left is the post-norm network, with RMSNorm where the paper has LayerNorm. `weight_gain`
    (8 M)^(-1/4) asks the model to start value, MLP and output weights smaller by that factor, as
    the paper does on top of its own initialisation.
    At initialisation: different from the plain residual. Cost: D parameters per sublayer. DeepNet,
    arXiv 2203.00555.
    """

    at_start = "different"
    mixes = "channel"

    def __init__(
        self, dim: int, sublayers: int, *, eps: float = 1e-6, kinds: Sequence[str] | None = None
    ) -> None:
        super().__init__(dim, sublayers)
        # The paper counts layers, each with attention and MLP.
        layers = len(layer_starts(sublayer_kinds(sublayers, kinds)))
        self.alpha = (2 * layers) ** 0.25
        self.weight_gain = (8 * layers) ** -0.25
        self.eps = eps
        self.norms = nn.ParameterDict({str(i): torch.ones(dim) for i in range(sublayers)})

    def _write(self, state: State, i: int, y: Tensor) -> State:
        (h,) = state
        # In fp32, as every norm.
        new = self.alpha * wide(h) + y
        normed = new * hold(rms_scale(new, self.eps)) * self.norms[self.keys[i]]
        return (normed.to(h.dtype),)

    def flops_per_token(self) -> int:
        return 7 * self.dim * self.sublayers
