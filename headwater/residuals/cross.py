"""DeepCrossAttention: generalised residual networks make separate query, key and value inputs out
of all layers."""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from .base import Read, State, even_weights, hold
from .layerwise import LayerwiseResidual
from .numerics import combine, project
from .options import check_range
from .registry import register


class GRN(nn.Module):
    """Weights of `inputs` reads over `sources` sources: constants (per channel or not) and a
    data-dependent scalar."""

    def __init__(self, dim: int, inputs: int, sources: int, version: str) -> None:
        super().__init__()
        channels = {"v1": 1, "v2": dim, "v3": dim}[version]
        self.constant = nn.Parameter(torch.ones(inputs, sources, channels))
        self.query = nn.Parameter(torch.zeros(inputs, dim)) if version == "v3" else None

    def forward(self, bank: State) -> list[list[Tensor]]:
        """Return one weight per source, for each input."""
        weights = [list(row.unbind(0)) for row in self.constant]
        if self.query is None:
            return weights
        # A source adds to its constants a number per input and token.
        for n, source in enumerate(bank):
            scalars = project(source, self.query)  # (..., inputs)
            # Not relu, nor clamp from torch 2.15 on: at the zero start their gradient is zero, and
            # no query would move.
            scalars = hold(torch.where(scalars < 0, 0, scalars))
            # Each input's list has one weight per source.
            for row, scalar in zip(weights, scalars.split(1, dim=-1)):
                row[n] = row[n] + scalar
        return weights


@register("deepcrossattention")
class DeepCrossAttentionResidual(LayerwiseResidual):
    """g_m = sum_j (b_{mj} + ReLU(<w_m, u_j>)) u_j for query, key, value;  u_{m+1} = t + MLP(g_m^q + t), t = attention.

    u_0 is the embedding, u_j a layer's output without its input.
    `version`: v1 has one b per source and no ReLU term, v2 has one b per channel, and v3 has that
        and the ReLU term.
    `inputs`: separate makes three reads, and shared one.
    `last`: only the embedding, the sum of the older outputs and this many last outputs are kept
        (k-DCA). The MLP's skip takes the query input. A final read of the same version feeds the
        head. A short attention before the attention reads g^q, and what it writes joins all three.
    At initialisation: b = 1, w = 0, the plain residual exactly. A read of the embedding alone has
    no parameters.
    Cost: 3 (N + 1) D parameters per layer with N sources (v3); the state holds N outputs.
    DeepCrossAttention, arXiv 2502.06785.
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
        if last is not None:
            check_range("last", last, 1, self.layers)
        self.mixes = "scalar" if version == "v1" else "channel"
        self.last = last
        self.version = version
        self.separate = inputs == "separate"
        self.grns = nn.ModuleDict()
        for m in range(1, self.layers + 1):
            reads = 3 if self.routes(m) else 1
            sources = self.bank_size(m)
            self.grns[self.key(m)] = GRN(dim, reads, sources, version)

    def bank_size(self, m: int) -> int:
        return 1 + m if self.last is None else min(1 + m, self.last + 2)

    def mix(self, bank: State, m: int) -> tuple[Read, Tensor, State]:
        if m == 0:
            return bank[0], bank[0], bank
        reads = [combine(bank, weights) for weights in self._grn(m)(bank)]
        # An MLP's layer skip takes the query input, the first.
        if len(reads) == 1:
            return reads[0], reads[0], bank
        return (reads[0], reads[1], reads[2]), reads[0], bank

    def routes(self, m: int) -> bool:
        return self.separate and m > 0 and self.takes_inputs(m)

    def store(self, bank: State, output: Tensor, m: int) -> State:
        # Of k-DCA's older outputs only the sum is kept, beside the embedding.
        bank = (*bank, output)
        if self.last is not None and len(bank) > self.last + 2:
            return (bank[0], bank[1] + bank[2], *bank[3:])
        return bank

    def bank_weights(self, bank: State, m: int) -> Tensor:
        """Return weights of the query input, one per channel where channels differ."""
        if m == 0:
            return even_weights(bank[0])
        query, *_ = self._grn(m)(bank)
        tokens = bank[0].shape[:-1]
        weights = [weight.expand(*tokens, -1) for weight in query]
        return torch.stack(weights).detach()

    def flops_per_token(self) -> int:
        # The sum; for v3 also the product in the ReLU, and its addition.
        per_source = 5 if self.version == "v3" else 2
        operations = 2 * self.sublayers
        for m in range(1, self.layers + 1):
            inputs, sources, _ = self._grn(m).constant.shape
            operations += per_source * inputs * sources
        return self.dim * operations

    def _grn(self, m: int) -> GRN:
        return cast(GRN, self.grns[self.key(m)])
