"""MUDDFormer: each layer computes, token by token, its own weights over all earlier layer outputs."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.ops.banks import mix_bank, project_source
from headwater.ops.routing import Backend

from .base import Read, State, hold
from .layerwise import LayerwiseResidual
from .numerics import project
from .registry import register


class DenseWeights(nn.Module):
    """Weights of `ways` reads over `sources` sources, from the newest source."""

    def __init__(self, dim: int, ways: int, sources: int) -> None:
        super().__init__()
        hidden = ways * sources
        self.down = nn.Parameter(torch.randn(hidden, dim) / dim**0.5)
        self.up = nn.Parameter(torch.zeros(hidden, hidden))
        self.constant = nn.Parameter(torch.eye(sources)[-1].repeat(ways, 1))  # (ways, sources): the newest

    def forward(self, newest: Tensor, backend: Backend = "reference") -> tuple[Tensor, Tensor]:
        """(..., ways, sources), and the newest source again."""
        z, newest = project_source(newest, self.down, backend=backend)
        return project(F.gelu(z), self.up, self.constant.flatten()).unflatten(-1, self.constant.shape), newest


@register("muddformer")
class MUDDFormerResidual(LayerwiseResidual):
    """X^c_m = sum_j A^c_{mj} X_j for query, key, value and stream;  A_m = W2 GELU(W1 RMSNorm(X_m)) + a_m, per token.

    Layer m: t = X^r + attention(X^q, X^k, X^v);  X_{m+1} = t + MLP(t). X_j are layer outputs, X_0 the embedding; the
    final read has the stream way alone. One pre-norm weight serves query, key and value (the paper has three). A short
    attention before the attention reads X^r, and what it writes joins all four. `backend` of the sums, and of
    the products that weights are made of, as in `headwater.depth_attention`.
    At initialisation: W2 = 0 and a_m is one on the newest output: the plain residual exactly.
    Cost: C N D + (C N)^2 + C N parameters a layer with N sources, C = 4 ways; the state holds every layer output.
    MUDDFormer, arXiv 2502.12170.
    """

    at_start = "exact"

    def __init__(
        self, dim: int, sublayers: int, *, backend: Backend = "auto", kinds: Sequence[str] | None = None
    ) -> None:
        super().__init__(dim, sublayers, kinds, backend)
        self.dense = nn.ModuleDict(
            {self.key(m): DenseWeights(dim, 4 if self.routes(m) else 1, m + 1) for m in range(1, self.layers + 1)}
        )

    def mix(self, bank: State, m: int) -> tuple[Read, Tensor, State]:
        if m == 0:
            return bank[0], bank[0], bank
        weights, newest = self._dense(m)(bank[-1], self._now())
        thread = m < self.layers
        reads, bank = mix_bank((*bank[:-1], newest), hold(weights), thread=thread, backend=self._now())
        return (reads[0], reads[1], reads[2]) if self.routes(m) else reads[0], reads[-1], bank

    def routes(self, m: int) -> bool:
        return m > 0 and self.takes_inputs(m)

    def bank_weights(self, bank: State, m: int) -> Tensor:
        """Of the query input, or of the stream where it is the only way."""
        if m == 0:
            return torch.ones(1, *bank[0].shape[:-1], 1, device=bank[0].device)
        return self._dense(m)(bank[-1])[0][..., 0, :].movedim(-1, 0).unsqueeze(-1).detach()

    def flops_per_token(self) -> int:
        dense = [self._dense(m) for m in range(1, self.layers + 1)]
        matrices = sum(d.down.numel() + d.up.numel() for d in dense)
        return 2 * (matrices + self.dim * (self.sublayers + sum(d.constant.numel() for d in dense)))

    def _dense(self, m: int) -> DenseWeights:
        return cast(DenseWeights, self.dense[self.key(m)])
