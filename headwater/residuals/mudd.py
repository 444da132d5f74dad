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
from .numerics import project, rms_scale, wide
from .registry import register


class DenseWeights(nn.Module):
    """Weights of `ways` reads over `sources` sources, from the newest source."""

    def __init__(self, dim: int, ways: int, sources: int, newest: float) -> None:
        super().__init__()
        hidden = ways * sources
        self.down = nn.Parameter(torch.randn(hidden, dim) / dim**0.5)
        self.up = nn.Parameter(torch.zeros(hidden, hidden))
        self.constant = nn.Parameter(
            newest * torch.eye(sources)[-1].repeat(ways, 1)
        )  # (ways, sources)

    def forward(self, newest: Tensor, backend: Backend = "reference") -> tuple[Tensor, Tensor]:
        """(..., ways, sources), and the newest source again."""
        z, newest = project_source(newest, self.down, backend=backend)
        return project(F.gelu(z), self.up, self.constant.flatten()).unflatten(
            -1, self.constant.shape
        ), newest


@register("muddformer")
class MUDDFormerResidual(LayerwiseResidual):
    """X^c_m = sum_j A^c_{mj} X_j for query, key, value and stream;  A_m = W2 GELU(W1 RMSNorm(X_m)) + a_m, per token.

    Layer m: t = X^r + attention(X^q, X^k, X^v);  X_{m+1} = t + MLP(t). X_j are layer outputs, X_0 the embedding; the
    final read has the stream way alone. One pre-norm weight serves query, key and value (the paper has three). A short
    attention before the attention reads X^r, and what it writes joins all four.
    `backend`: the sums, and the products that weights are made of, run as in `headwater.depth_attention`.
    `norm`: sources are normed, and what the stream reads of them too, so that the stream cannot grow by a factor
        from layer to layer.
    With norms: X^c_m = X_m + sum_j A^c_{mj} RMSNorm_j(X_j) for query, key and
    value, X_m + RMSNorm'_m(sum_j ...) for the stream. The paper
    has these norms as an option, and its authors train language models with them.
    At initialisation: W2 = 0 and a_m is one on the newest output, with norms zero: the plain residual exactly.
    Cost: C N D + (C N)^2 + C N parameters per layer with N sources, C = 4 ways, with norms 2 D more; the state holds
    every layer output. MUDDFormer, arXiv 2502.12170.
    """

    at_start = "exact"

    def __init__(
        self,
        dim: int,
        sublayers: int,
        *,
        norm: bool = False,
        backend: Backend = "auto",
        kinds: Sequence[str] | None = None,
    ) -> None:
        super().__init__(dim, sublayers, kinds, backend)
        last, newest = self.layers, 0.0 if norm else 1.0
        ways = {m: 4 if self.routes(m) else 1 for m in range(1, last + 1)}
        self.dense = nn.ModuleDict(
            {self.key(m): DenseWeights(dim, c, m + 1, newest) for m, c in ways.items()}
        )
        self.norm = norm
        if norm:
            self.mixes = "channel"
            self.fused = False  # its norms have no kernels, and gain from a compiled model
            self.before = nn.ParameterDict(
                {self.key(m): nn.Parameter(torch.ones(dim)) for m in range(last + 1)}
            )
            self.after = nn.ParameterDict(
                {self.key(m): nn.Parameter(torch.full((dim,), 1e-3)) for m in ways}
            )

    def mix(self, bank: State, m: int) -> tuple[Read, Tensor, State]:
        newest = bank[-1]
        if m == 0:
            return (
                newest,
                newest,
                (self._normed(newest, self.before[self.key(0)]),) if self.norm else bank,
            )
        weights, newest = self._dense(m)(newest, self._now())
        source = self._normed(newest, self.before[self.key(m)]) if self.norm else newest
        thread = m < self.layers
        reads, bank = mix_bank(
            (*bank[:-1], source), hold(weights), thread=thread, backend=self._now()
        )
        if self.norm:
            stream = self._normed(reads[-1], self.after[self.key(m)])
            reads = tuple(newest + read for read in (*reads[:-1], stream))
        return (reads[0], reads[1], reads[2]) if self.routes(m) else reads[0], reads[-1], bank

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return (wide(x) * hold(rms_scale(x)) * weight).to(x.dtype)

    def routes(self, m: int) -> bool:
        return m > 0 and self.takes_inputs(m)

    def bank_weights(self, bank: State, m: int) -> Tensor:
        """Weights of the query input, or of the stream where it is the only way."""
        if m == 0:
            return torch.ones(1, *bank[0].shape[:-1], 1, device=bank[0].device)
        weights = self._dense(m)(bank[-1])[0][..., 0, :].movedim(-1, 0).unsqueeze(-1).detach()
        return self._with_norms(weights, bank, m) if self.norm else weights

    def _with_norms(self, weights: Tensor, bank: State, m: int) -> Tensor:
        """Channel by channel: of the newest output there is one more than is normed, and a stream's sum is normed."""
        before, newest = self.before[self.key(m)].detach(), bank[-1]
        if not self.routes(m):
            read = sum(
                w * wide(x)
                for w, x in zip(weights, (*bank[:-1], self._normed(newest, before)), strict=True)
            )
            weights = weights * rms_scale(cast(Tensor, read)) * self.after[self.key(m)].detach()
        newest_weight = 1 + weights[-1] * rms_scale(newest) * before
        return torch.cat(
            [weights[:-1].expand(-1, *newest_weight.shape), newest_weight.unsqueeze(0)]
        )

    def flops_per_token(self) -> int:
        dense = [self._dense(m) for m in range(1, self.layers + 1)]
        matrices = sum(d.down.numel() + d.up.numel() for d in dense)
        operations = 2 * (
            matrices + self.dim * (self.sublayers + sum(d.constant.numel() for d in dense))
        )
        if self.norm:  # and the newest output, which joins every way
            operations += 5 * self.dim * (2 * self.layers + 1) + 2 * self.dim * sum(
                len(d.constant) for d in dense
            )
        return operations

    def _dense(self, m: int) -> DenseWeights:
        return cast(DenseWeights, self.dense[self.key(m)])
