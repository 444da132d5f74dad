"""Multi-head latent attention without positions: one narrow vector makes all heads' keys and
values.

    c = RMSNorm(A x), the latent;  s = A' x, a part of the key that all heads share
    q_h = [q_h', q_h''] = Q_h x;  k_h = [B_h c, s];  v_h = C_h c

The cache holds c and s. A few new tokens are decoded without ever forming keys and values
(`absorbed`):

    <q_h', B_h c> = <B_h^T q_h', c>          sum_t a_t C_h c_t = C_h (sum_t a_t c_t)

DeepSeek-V2, arXiv 2405.04434; without rotation as in Kimi Linear, arXiv 2510.26692.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import Latents, Lengths
from .config import ModelConfig
from .norm import RMSNorm
from .part import Part
from .projection import linear, project_together

LATENT_EPS = 1e-6  # transformers'; vLLM takes the model's norm_eps
ABSORBED = 8  # new tokens up to which a cache is read as it is


class MLA(Part):
    """Causal multi-head latent attention over (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.head_dim
        self.heads = config.heads
        self.head_dim = config.mla_head_dim or width
        self.value_dim = config.mla_value_dim or width
        self.shared_dim = config.mla_shared_dim or width // 2
        self.latent_dim = config.mla_latent or 4 * width
        # The cache keeps the latent and the shared part of the keys, side by side.
        self.cached = (self.latent_dim, self.shared_dim)
        # Of each head the channels of its key, then those of its value.
        self.produced = (self.head_dim, self.value_dim)
        self.query = linear(config.dim, self.heads * (self.head_dim + self.shared_dim))
        self.down = linear(config.dim, sum(self.cached))
        self.norm = RMSNorm(self.latent_dim, LATENT_EPS)
        self.up = linear(self.latent_dim, self.heads * sum(self.produced))
        self.output = linear(self.heads * self.value_dim, config.dim)

    def scaled_by_gain(self) -> tuple[Tensor, ...]:
        """The weights that a residual may ask to start smaller, besides the output's."""
        # Keys and values come from one matrix: only the values' rows start smaller.
        return (self._rows_of_heads(self.up.weight)[1],)

    def new_entry(self, lengths: Lengths, dtype: torch.dtype) -> Latents:
        return Latents(lengths, lengths.zeros(sum(self.cached), dtype=dtype))

    def forward(self, x: Tensor, cache: Latents | None = None) -> Tensor:
        # The latent is normed, the shared part of the keys is not: both go to the cache.
        q, latent = project_together(x, self.query, self.down)
        q = q.unflatten(-1, (self.heads, -1))
        q = q.transpose(1, 2)  # (B, H, T, head + shared)
        latent, shared = latent.split(self.cached, -1)
        latent = torch.cat((self.norm(latent), shared), -1)  # (B, T, latent + shared)
        y = self._attend(q, latent, cache)
        return self.output(y.transpose(1, 2).flatten(2))

    def _rows_of_heads(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of the upward matrix that make keys, and those that make values, of each
        head: (H, head, latent) and (H, value, latent)."""
        rows = weight.unflatten(0, (-1, sum(self.produced)))
        return rows.split(self.produced, 1)

    def _attend(self, q: Tensor, latent: Tensor, cache: Latents | None) -> Tensor:
        """Attend with new tokens to themselves and those in the cache, (B, H, T, value_dim)."""
        count = q.shape[-2]
        causal = cache is None or cache.lengths.empty
        mask = None
        if cache is not None:
            # Many tokens are worth forming keys and values for; for a few the latents are read.
            if not causal and count <= ABSORBED:
                return self._absorbed(q, latent, cache)
            mask = cache.mask(count)
            latent = cache.append(latent)
        return self._expanded(q, latent, mask, causal)

    def _expanded(self, q: Tensor, latent: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Attend to keys and values of every head, which are formed here."""
        latent, shared = latent.split(self.cached, -1)
        both = self.up(latent).unflatten(-1, (self.heads, -1))
        both = both.transpose(1, 2)  # (B, H, T, head + value)
        key, value = both.split(self.produced, -1)
        # Every head's key ends with the part that all share.
        shared = shared[:, None].expand(-1, self.heads, -1, -1)
        key = torch.cat((key, shared), -1)
        return F.scaled_dot_product_attention(q, key, value, attn_mask=mask, is_causal=causal)

    def _absorbed(self, q: Tensor, latent: Tensor, cache: Latents) -> Tensor:
        """Attend to the latents, as the keys and values of one head that all queries share."""
        # Each head's matrix for keys moves to the query's side, the one for values behind the sum.
        weight = self.here(self.up.weight).to(q.dtype)
        to_key, to_value = self._rows_of_heads(weight)
        q_head, q_shared = q.split((self.head_dim, self.shared_dim), -1)
        q_latent = torch.einsum("bhtd,hdl->bhtl", q_head, to_key)
        q = torch.cat((q_latent, q_shared), -1)  # (B, H, T, latent + shared)
        scale = (self.head_dim + self.shared_dim) ** -0.5
        mixed = cache.attend_one(q, latent, self.latent_dim, scale)
        # Where no kernel does both, the tokens are written first.
        if mixed is None:
            mask = cache.mask(q.shape[-2])
            keys = cache.append(latent)[:, None]
            values = keys[..., : self.latent_dim]
            options: dict[str, Any] = {"attn_mask": mask, "scale": scale, "enable_gqa": True}
            mixed = F.scaled_dot_product_attention(q, keys, values, **options)
        return torch.einsum("bhtl,hvl->bhtv", mixed, to_value)
