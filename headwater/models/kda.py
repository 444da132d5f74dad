"""Kimi Delta Attention as a sublayer: convolutions, gates, the operator, a gated norm.

    q, k, v = SiLU(conv(W x));  g = gate(F2 F1 x);  b = sigmoid(B x)
    y = O (RMSNorm(kda(q, k, v, g, b)) sigmoid(G2 G1 x))

Kimi Linear, arXiv 2510.26692. No positions: the decay and the convolutions tell tokens apart.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.ops.kda import kda, kda_gate
from headwater.ops.numerics import accumulation_dtype, full_precision

from .cache import Lengths, States
from .config import ModelConfig
from .norm import RMSNorm
from .part import Part
from .projection import linear, project_together


class ShortConv(nn.Conv1d):
    """A causal convolution over the last `kernel` tokens, one for each channel."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__(channels, channels, kernel, groups=channels, bias=False)


class DecayGate(Part):
    """The log decay (B, T, H, K), in fp32: a rate for each head, a bias for each channel."""

    def __init__(self, heads: int, width: int, form: Any) -> None:
        super().__init__()
        self.heads, self.width, self.form = heads, width, form
        self.rate = nn.Parameter(torch.empty(heads))
        self.bias = nn.Parameter(torch.empty(heads * width))

    def reset(self) -> None:
        """Start heads at rates from 1 to 16 (bounded: at 1), and channels so that a token decays by
        0.001 to 0.1 of its rate."""
        with torch.no_grad():
            if self.form == "softplus":
                self.rate.uniform_(1, 16).log_()
            else:
                self.rate.zero_()
            self.bias.uniform_(math.log(1e-3), math.log(1e-1))
            step = self.bias.exp_().clamp_(min=1e-4)
            # The inverse of softplus: softplus of the bias is the step.
            self.bias.copy_(step + torch.log(-torch.expm1(-step)))

    def forward(self, x: Tensor) -> Tensor:
        shape = (self.heads, self.width)
        x = x.unflatten(-1, shape)
        bias = self.here(self.bias).view(shape)
        return kda_gate(x, self.here(self.rate), bias, self.form)


class KDA(Part):
    """Kimi Delta Attention over (B, T, D); with `States`, tokens continue earlier ones."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.kda_heads or config.heads
        self.head_dim = config.kda_width
        inner = self.heads * self.head_dim
        self.query = linear(config.dim, inner)
        self.key = linear(config.dim, inner)
        self.value = linear(config.dim, inner)
        self.query_conv = ShortConv(inner, config.kda_conv)
        self.key_conv = ShortConv(inner, config.kda_conv)
        self.value_conv = ShortConv(inner, config.kda_conv)
        # Decay and output gate come through narrow layers.
        self.decay_down = linear(config.dim, self.head_dim)
        self.decay_up = linear(self.head_dim, inner)
        self.decay = DecayGate(self.heads, self.head_dim, config.kda_gate)
        self.beta = linear(config.dim, self.heads)
        self.gate_down = linear(config.dim, self.head_dim)
        self.gate_up = linear(self.head_dim, inner)
        self.norm = RMSNorm(self.head_dim, config.kda_norm_eps)
        self.output = linear(inner, config.dim)

    def scaled_by_gain(self) -> tuple[Tensor, ...]:
        """The weights that a residual may ask to start smaller, besides the output's."""
        return (self.value.weight,)

    def new_entry(self, lengths: Lengths, dtype: torch.dtype) -> States:
        batch = len(lengths.tokens)
        behind = self.query_conv.kernel_size[0] - 1
        state = (batch, self.heads, self.head_dim, self.head_dim)
        tail = (batch, behind, 3 * self.heads * self.head_dim)
        options: dict[str, Any] = {"device": lengths.tokens.device}
        return States(
            torch.zeros(state, dtype=accumulation_dtype(dtype), **options),
            torch.zeros(tail, dtype=dtype, **options),
        )

    def forward(self, x: Tensor, cache: States | None = None) -> Tensor:
        projections = project_together(x, self.query, self.key, self.value)
        q, k, v = self._convolve(torch.cat(projections, -1), cache)
        decay, gate = project_together(x, self.decay_down, self.gate_down)
        g = self.decay(self.decay_up(decay))  # (B, T, H, K)
        beta = torch.sigmoid(self.beta(x).to(g.dtype))  # (B, T, H)
        # The state of earlier tokens goes in, the state after these comes out.
        state = None if cache is None else cache.state
        o, state = kda(q, k, v, g, beta, state)
        if cache is not None:
            cache.state.copy_(state)
        gate = self.gate_up(gate).unflatten(-1, (self.heads, self.head_dim))
        o = self.norm(o) * torch.sigmoid(gate)
        return self.output(o.flatten(2))

    def _convolve(self, x: Tensor, cache: States | None) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, keys and values (B, T, H, K) of their projections, (B, T, 3 H K)."""
        # One convolution for all three.
        convolutions = (self.query_conv, self.key_conv, self.value_conv)
        weights = [self.here(convolution.weight) for convolution in convolutions]
        weight = torch.cat(weights)  # (3 H K, 1, kernel)
        behind = weight.shape[-1] - 1
        # Before the first token it sees zeros, later what the cache has kept.
        tail = x.new_zeros(len(x), behind, x.shape[-1])
        if cache is not None:
            tail = cache.tail.to(x.dtype)
        x = torch.cat((tail, x), 1)
        if cache is not None:
            cache.tail.copy_(x[:, x.shape[1] - behind :])
        with full_precision(x):
            weight = weight.to(x.dtype)
            y = F.conv1d(x.transpose(1, 2), weight, groups=len(weight))
            y = F.silu(y.transpose(1, 2))
        y = y.unflatten(-1, (3, self.heads, self.head_dim))
        q, k, v = y.unbind(-3)
        return q, k, v
