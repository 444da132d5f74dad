"""MUDDFormer: each layer computes, token by token, its own weights over all earlier layer
outputs."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.ops.banks import mix_bank, project_source
from headwater.ops.routing import Backend

from .base import Read, State, even_weights, hold
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
        last = torch.eye(sources)[-1]
        self.constant = nn.Parameter(newest * last.repeat(ways, 1))  # (ways, sources)

    def forward(self, newest: Tensor, backend: Backend = "reference") -> tuple[Tensor, Tensor]:
        """Return weights (..., ways, sources), and the newest source, which is used from here
        on."""
        # The norm of the source is folded into the first product.
        z, newest = project_source(newest, self.down, backend=backend)
        weights = project(F.gelu(z), self.up, self.constant.flatten())
        return weights.unflatten(-1, self.constant.shape), newest


@register("muddformer")
class MUDDFormerResidual(LayerwiseResidual):
    """X^c_m = sum_j A^c_{mj} X_j for query, key, value and stream;  A_m = W2 GELU(W1 RMSNorm(X_m)) + a_m, per token.

    Layer m: t = X^r + attention(X^q, X^k, X^v);  X_{m+1} = t + MLP(t). X_j are layer outputs, X_0
    the embedding; the final read has the stream way alone. One pre-norm weight serves query, key
    and value (the paper has three). A short attention before the attention reads X^r, and what it
    writes joins all four.
    `backend`: the sums, and the products that weights are made of, run as in
        `headwater.depth_attention`.
    `norm`: sources are normed, and what the stream reads of them too, so that the stream cannot
        grow by a factor from layer to layer.
    With norms: X^c_m = X_m + sum_j A^c_{mj} RMSNorm_j(X_j) for query, key and
    value, X_m + RMSNorm'_m(sum_j ...) for the stream. The paper
    has these norms as an option, and its authors train language models with them.
    At initialisation: W2 = 0 and a_m is one on the newest output, with norms zero: the plain
    residual exactly.
    Cost: C N D + (C N)^2 + C N parameters per layer with N sources, C = 4 ways, with norms 2 D
    more; the state holds every layer output. MUDDFormer, arXiv 2502.12170.
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
        self.norm = norm
        self.dense = nn.ModuleDict()
        for m in range(1, self.layers + 1):
            # Query, key, value and stream; or the stream only.
            ways = 4 if self.routes(m) else 1
            newest = 0.0 if norm else 1.0
            self.dense[self.key(m)] = DenseWeights(dim, ways, m + 1, newest)
        if norm:
            self.mixes = "channel"
            # Its norms have no kernels, and gain from a compiled model.
            self.fused = False
            keys = [self.key(m) for m in range(self.layers + 1)]
            self.before = nn.ParameterDict({key: torch.ones(dim) for key in keys})
            self.after = nn.ParameterDict({key: torch.full((dim,), 1e-3) for key in keys[1:]})

    def mix(self, bank: State, m: int) -> tuple[Read, Tensor, State]:
        newest = bank[-1]
        if m == 0:
            return newest, newest, (self._source(newest, m),)
        weights, newest = self._dense(m)(newest, self._now())
        sources = (*bank[:-1], self._source(newest, m))
        thread = m < self.layers
        reads, bank = mix_bank(sources, hold(weights), thread=thread, backend=self._now())
        # With norms each way adds to the newest output, and the stream's sum is normed as well.
        if self.norm:
            stream = self._normed(reads[-1], self.after[self.key(m)])
            reads = tuple(newest + read for read in (*reads[:-1], stream))
        if not self.routes(m):
            return reads[0], reads[0], bank
        query, key, value, stream = reads
        return (query, key, value), stream, bank

    def _source(self, output: Tensor, m: int) -> Tensor:
        """Return the output before layer m as reads mix it."""
        if not self.norm:
            return output
        return self._normed(output, self.before[self.key(m)])

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return (wide(x) * hold(rms_scale(x)) * weight).to(x.dtype)

    def routes(self, m: int) -> bool:
        return m > 0 and self.takes_inputs(m)

    def bank_weights(self, bank: State, m: int) -> Tensor:
        """Return weights of the query input, or of the stream where it is the only way."""
        if m == 0:
            return even_weights(bank[0])
        # The first way is the query's, or the only one.
        weights, _ = self._dense(m)(bank[-1])
        weights = weights[..., 0, :].detach()
        weights = weights.movedim(-1, 0).unsqueeze(-1)  # (N, ..., 1)
        return self._with_norms(weights, bank, m) if self.norm else weights

    def _with_norms(self, weights: Tensor, bank: State, m: int) -> Tensor:
        """Return weights channel by channel, for what norms do to the newest output and the sum."""
        newest = bank[-1]
        before = self.before[self.key(m)].detach()
        if not self.routes(m):
            # The stream's sum is normed.
            sources = wide(torch.stack((*bank[:-1], self._normed(newest, before))))
            read = (weights * sources).sum(0)
            weights = weights * rms_scale(read) * self.after[self.key(m)].detach()
        # The newest output is there once as it is, and once normed.
        newest_weight = 1 + weights[-1] * rms_scale(newest) * before
        older = weights[:-1].expand(-1, *newest_weight.shape)
        return torch.cat([older, newest_weight.unsqueeze(0)])

    def flops_per_token(self) -> int:
        operations = 2 * self.dim * self.sublayers
        for m in range(1, self.layers + 1):
            dense = self._dense(m)
            operations += 2 * (dense.down.numel() + dense.up.numel())
            operations += 2 * self.dim * dense.constant.numel()
            # The newest output joins every way.
            if self.norm:
                operations += 2 * self.dim * len(dense.constant)
        if self.norm:
            operations += 5 * self.dim * (2 * self.layers + 1)
        return operations

    def _dense(self, m: int) -> DenseWeights:
        return cast(DenseWeights, self.dense[self.key(m)])
