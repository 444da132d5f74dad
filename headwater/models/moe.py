"""A mixture of experts: each token runs through a few SwiGLUs, and one that all tokens share.

    s = sigmoid(R x) in fp32;   chosen = top-k of s + bias;   w = scale s / sum s over the chosen
    y = shared(x) + sum over the chosen of w_e expert_e(x)

The bias decides who is chosen and nothing else. No gradient moves it: after each step it goes up
for experts that had fewer tokens than the mean and down for those that had more (arXiv 2408.15664,
DeepSeek-V3). No token is dropped.
"""

from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.ops.experts import grouped_linear
from headwater.ops.numerics import accumulation_dtype, full_precision

from .config import ModelConfig
from .mlp import SwiGLU
from .part import Part


class Routes(NamedTuple):
    """The experts that tokens go to: scores (N, E) in fp32; experts and weights chosen, (N, k)."""

    scores: Tensor
    experts: Tensor
    weights: Tensor


class Router(Part):
    """Scores tokens (N, D) for E experts and chooses k for each; counts `load` in training."""

    bias: Tensor
    load: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.chosen, self.scale = config.experts_per_token, config.expert_scale
        self.weight = nn.Parameter(torch.empty(config.experts, config.dim))
        self.register_buffer("bias", torch.zeros(config.experts))
        self.register_buffer("load", torch.zeros(config.experts), persistent=False)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        """Fill the load when it comes from the meta device: no checkpoint has it."""
        empty = self.load.is_meta
        super()._apply(*args, **kwargs)
        if empty:
            self.load = torch.zeros_like(self.load)
        return self

    def forward(self, x: Tensor) -> Routes:
        # In fp32 under autocast too: experts that are nearly even would be chosen by rounding.
        with full_precision(x):
            dtype = accumulation_dtype(x.dtype)
            weight = self.here(self.weight).to(dtype)
            scores = F.linear(x.to(dtype), weight).sigmoid()
        # The bias decides who is chosen; the scores alone weigh the experts.
        biased = scores.detach() + self.bias
        experts = biased.topk(self.chosen, -1, sorted=False).indices
        weights = scores.gather(-1, experts)
        weights = self.scale * weights / (weights.sum(-1, keepdim=True) + 1e-20)
        # In training, count for the next move of the bias.
        if self.training and torch.is_grad_enabled():
            self.load.add_(count(experts, len(self.bias)))
        return Routes(scores, experts, weights)

    @torch.no_grad()
    def move_bias(self, load: Tensor, rate: Tensor | float) -> None:
        """Step toward an even load; `load` (E,): tokens that each expert had on all ranks."""
        self.bias.add_(rate * torch.sign(load.mean() - load))


def count(experts: Tensor, size: int) -> Tensor:
    """Count how often each of `size` experts was chosen, (E,).

    bincount would wait for the GPU.
    """
    ones = torch.ones(experts.numel(), device=experts.device)
    counts = torch.zeros(size, device=experts.device)
    return counts.index_add_(0, experts.flatten(), ones)


class Experts(Part):
    """E SwiGLUs, each parameter of all of them as one tensor."""

    def __init__(self, experts: int, dim: int, width: int) -> None:
        super().__init__()
        # The first expert of this process, and how many there are on all ranks.
        self.first = 0
        self.total = experts
        self.gate = nn.Parameter(torch.empty(experts, width, dim))
        self.up = nn.Parameter(torch.empty(experts, width, dim))
        self.output = nn.Parameter(torch.empty(experts, dim, width))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Run rows (N, D), sorted by expert: the rows of expert e end at `ends[e]`.

        Rows of experts that are not in this process stand behind the others and give zeros.
        """
        # Grouped products are not among autocast's: they are given its dtype.
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        gate = self.here(self.gate).to(dtype)
        up = self.here(self.up).to(dtype)
        output = self.here(self.output).to(dtype)
        ends = ends[: len(gate)]
        rest = len(gate) < self.total
        gates = F.silu(grouped_linear(x, gate, ends, rest=rest))
        hidden = gates * grouped_linear(x, up, ends, rest=rest)
        return grouped_linear(hidden, output, ends, rest=rest)


class MoE(Part):
    """The feed-forward sublayer with experts, (B, T, D) to (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config.experts, config.dim, config.expert_width)
        self.shared = None
        if config.shared_experts:
            self.shared = SwiGLU(config, config.shared_experts * config.expert_width)

    def scaled_by_gain(self) -> tuple[Tensor, ...]:
        """The weights that a residual may ask to start smaller, besides the outputs'."""
        shared = () if self.shared is None else self.shared.scaled_by_gain()
        return (self.experts.gate, self.experts.up, *shared)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (N, D)
        routes = self.router(tokens)
        y = self._mix(tokens, routes).view_as(x)
        return y if self.shared is None else y + self.shared(x)

    def _mix(self, tokens: Tensor, routes: Routes) -> Tensor:
        """Sum the chosen experts' outputs by their weights, (N, D)."""
        chosen = routes.experts.shape[1]
        total = self.experts.total
        # Count experts from the first of this process, so that its rows come first.
        experts = (routes.experts - self.experts.first) % total
        # The N k choices, sorted by expert.
        order = experts.flatten().argsort(stable=True)
        ends = count(experts, total).cumsum(0).to(torch.int32)
        rows = self.experts(tokens[order // chosen], ends)  # (N k, D)
        # The inverse of the order brings each token's outputs side by side again.
        places = torch.arange(len(order), device=order.device)
        back = torch.empty_like(order).scatter_(0, order, places)
        outputs = rows[back].unflatten(0, (-1, chosen))  # (N, k, D)
        weights = routes.weights.to(outputs.dtype).unsqueeze(-1)
        return (outputs * weights).sum(1)


def routers(model: nn.Module) -> dict[str, Router]:
    """Return every router of a model by its name, in the order of depth."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}
