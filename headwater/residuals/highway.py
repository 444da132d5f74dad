"""Highway connections: a gate divides one unit of weight between the stream and the new output."""

from math import log
from typing import Literal, cast

import torch
from torch import Tensor, nn

from headwater.ops.numerics import shares

from .base import State, hold
from .numerics import combine, project_normed, wide
from .registry import register
from .standard import StreamResidual

CARRY_BIAS = -2.0  # sigmoid(-2) = 0.12: the stream is mostly carried


class Gate(nn.Module):
    def __init__(self, dim: int, width: int, bias: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, dim))
        self.bias = nn.Parameter(torch.full((width,), bias))


@register("highway")
class HighwayResidual(StreamResidual):
    """h_{i+1} = (1 - g_i) h_i + g_i f_i(h_i),  g_i = sigmoid(W_i RMSNorm(h_i) + b_i).

    `gate`: scalar is one gate per token, channel one per channel.
    `start`: mean gives biases for g_i = 1 / (i + 2), so that a read is the mean of its sources, and
        carry a bias of -2.
    At initialisation: W is zero. With start=mean it is the plain residual up to a scale that the
    reader's pre-norm cancels; with carry it is different.
    Every row of the mixing matrix sums to one.
    Cost: D + 1 parameters per sublayer (D^2 + D with gate=channel), no extra state.
    Highway networks, arXiv 1505.00387, in the pre-norm form of arXiv 2603.15031.
    """

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        gate: Literal["scalar", "channel"] = "scalar",
        start: Literal["mean", "carry"] = "mean",
    ) -> None:
        super().__init__(dim, sublayers)
        self.at_start = {"mean": "scaled", "carry": "different"}[start]
        self.mixes = gate
        width = {"scalar": 1, "channel": dim}[gate]
        self.gates = nn.ModuleDict()
        for i in range(sublayers):
            bias = -log(i + 1) if start == "mean" else CARRY_BIAS
            self.gates[str(i)] = Gate(dim, width, bias)

    def _write(self, state: State, i: int, y: Tensor) -> State:
        (h,) = state
        gate = cast(Gate, self.gates[self.keys[i]])
        # Both shares are exact where one of them is almost nothing.
        carry, gain = shares(project_normed(h, gate.weight) + wide(gate.bias))
        return (combine((h, y), (hold(carry), hold(gain))),)

    def flops_per_token(self) -> int:
        # Products of the gates; 1 - g, and two products per channel.
        operations = 3 * self.dim * self.sublayers
        for gate in self.gates.values():
            operations += 2 * cast(Gate, gate).weight.numel()
        return operations
