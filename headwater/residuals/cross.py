"""DeepCrossAttention: generalised residual networks make separate query, key and value inputs out of all layers."""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from .base import Read, State, hold
from .layerwise import LayerwiseResidual
from .numerics import combine, project
from .registry import register


class GRN(nn.Module):
    """Weights of `inputs` reads over `sources` sources: constants (per channel or not) and a data-dependent scalar."""

    def __init__(self, dim: int, inputs: int, sources: int, version: str) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.ones(inputs, sources, 1 if version == "v1" else dim))
        self.query = nn.Parameter(torch.zeros(inputs, dim)) if version == "v3" else None

    def forward(self, bank: State) -> list[list[Tensor]]:
        """Return one weight per source, for each input."""
        weights = [list(row.unbind(0)) for row in self.constant]
        if self.query is None:
            return weights
        for n, source in enumerate(bank):
            scalars = project(source, self.query)  # (..., inputs)
            # Not relu, nor clamp from torch 2.15 on: at the zero start their gradient is zero, and no query would move.
            scalars = hold(torch.where(scalars < 0, 0, scalars))
            for row, scalar in zip(weights, scalars.split(1, dim=-1), strict=True):
                row[n] = row[n] + scalar
        return weights


@register("deepcrossattention")
class DeepCrossAttentionResidual(LayerwiseResidual):
    """g_m = sum_j (b_{mj} + ReLU(<w_m, u_j>)) u_j for query, key, value;  u_{m+1} = t + MLP(g_m^q + t), t = attention.

    u_0 is the embedding, u_j a layer's output without its input.
    `version`: v1 has one b per source and no ReLU term, v2 has one b per channel, and v3 has that and the ReLU term.
    `inputs`: separate makes three reads, and shared one.
    `last`: only the embedding, the sum of the older outputs and this many last outputs are kept (k-DCA).
    The MLP's skip takes the query input. A final read of the same version feeds the head.
    A short attention before the attention reads g^q, and what it writes joins all three.
    At initialisation: b = 1, w = 0, the plain residual exactly. A read of the embedding alone has no parameters.
    Cost: 3 (N + 1) D parameters per layer with N sources (v3); the state holds N outputs. DeepCrossAttention,
    arXiv 2502.06785.
    """

    at_start = "exact"
    keeps_input = False

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        version: Literal["v1", "v2", "v3"] = "v3",
        inputs: Literal["separate", "shared"] = "separate",
        last: int | None = None,
        kinds: Sequence[str] | None = None,
    ) -> None:
        super().__init__(dim, sublayers, kinds)
        if last is not None and not 1 <= last <= self.layers:
            raise ValueError(
                f"last counts layer outputs and must lie between 1 and {self.layers}, got {last}"
            )
        self.mixes = "scalar" if version == "v1" else "channel"
        self.last, self.version, self.separate = last, version, inputs == "separate"
        self.grns = nn.ModuleDict()
        for m in range(1, self.layers + 1):
            self.grns[self.key(m)] = GRN(
                dim, 3 if self.routes(m) else 1, self.bank_size(m), version
            )

    def bank_size(self, m: int) -> int:
        return 1 + m if self.last is None else min(1 + m, self.last + 2)

    def mix(self, bank: State, m: int) -> tuple[Read, Tensor, State]:
        if m == 0:
            return bank[0], bank[0], bank
        reads = [combine(bank, weights) for weights in self._grn(m)(bank)]
        if len(reads) == 1:
            return reads[0], reads[0], bank
        return (reads[0], reads[1], reads[2]), reads[0], bank

    def routes(self, m: int) -> bool:
        return self.separate and m > 0 and self.takes_inputs(m)

    def store(self, bank: State, output: Tensor, m: int) -> State:
        bank = (*bank, output)
        if self.last is not None and len(bank) > self.last + 2:
            return (bank[0], bank[1] + bank[2], *bank[3:])
        return bank

    def bank_weights(self, bank: State, m: int) -> Tensor:
        """Weights of the query input, one per channel where channels differ."""
        if m == 0:
            return torch.ones(1, *bank[0].shape[:-1], 1, device=bank[0].device)
        weights = torch.stack(
            [w.expand(*bank[0].shape[:-1], w.shape[-1]) for w in self._grn(m)(bank)[0]]
        )
        return weights.detach()

    def flops_per_token(self) -> int:
        reads = sum(self._grn(m).constant[..., 0].numel() for m in range(1, self.layers + 1))
        per_source = (
            5 if self.version == "v3" else 2
        )  # the sum; for v3 also the ReLU's product and its addition
        return self.dim * (per_source * reads + 2 * self.sublayers)

    def _grn(self, m: int) -> GRN:
        return cast(GRN, self.grns[self.key(m)])
