"""Multi-head latent attention without positions: all heads' keys and values from one narrow vector.

    c = RMSNorm(A x), the latent;  s = A' x, a part of the key that all heads share
    q_h = [q_h', q_h''] = Q_h x;  k_h = [B_h c, s];  v_h = C_h c

The cache holds c and s. A few new tokens are decoded without ever forming keys and values
(`absorbed`):

    <q_h', B_h c> = <B_h^T q_h', c>          sum_t a_t C_h c_t = C_h (sum_t a_t c_t)

DeepSeek-V2, arXiv 2405.04434; without rotation as in Kimi Linear, arXiv 2510.26692.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import Latents, Lengths
from .config import ModelConfig
from .norm import RMSNorm
from .part import Part
from .projection import project_together

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
        queries = self.heads * (self.head_dim + self.shared_dim)
        self.query = nn.Linear(config.dim, queries, bias=False)
        self.down = nn.Linear(config.dim, self.latent_dim + self.shared_dim, bias=False)
        self.norm = RMSNorm(self.latent_dim, LATENT_EPS)
        # Of each head the rows of its key, then those of its value.
        keys_values = self.heads * (self.head_dim + self.value_dim)
        self.up = nn.Linear(self.latent_dim, keys_values, bias=False)
        self.output = nn.Linear(self.heads * self.value_dim, config.dim, bias=False)

    def scaled_by_gain(self) -> tuple[Tensor, ...]:
        """The weights that a residual may ask to start smaller, besides the output's."""
        # Keys and values come from one matrix: only the values' rows start smaller.
        rows = self.up.weight.unflatten(0, (self.heads, self.head_dim + self.value_dim))
        return (rows[:, self.head_dim :],)

    def new_entry(self, lengths: Lengths, dtype: torch.dtype) -> Latents:
        shape = (len(lengths.tokens), lengths.room, self.latent_dim + self.shared_dim)
        return Latents(lengths, torch.zeros(shape, dtype=dtype, device=lengths.tokens.device))

    def forward(self, x: Tensor, cache: Latents | None = None) -> Tensor:
        # The latent is normed, the shared part of the keys is not: both go to the cache.
        q, latent = project_together(x, self.query, self.down)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, head + shared)
        latent, shared = latent.split((self.latent_dim, self.shared_dim), -1)
        latent = torch.cat((self.norm(latent), shared), -1)  # (B, T, latent + shared)
        y = self._attend(q, latent, cache)
        return self.output(y.transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, latent: Tensor, cache: Latents | None) -> Tensor:
        """Attention of new tokens over themselves and those in the cache, (B, H, T, value_dim)."""
        if cache is None:
            return self._expanded(q, latent, None, causal=True)
        if cache.lengths.empty:
            return self._expanded(q, cache.append(latent), None, causal=True)
        # Many tokens are worth forming keys and values for; for a few the latents are read.
        count = q.shape[-2]
        if count > ABSORBED:
            mask = cache.mask(count)
            return self._expanded(q, cache.append(latent), mask, causal=False)
        return self._absorbed(q, latent, cache)

    def _expanded(self, q: Tensor, latent: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Attention over keys and values of every head, which are formed here."""
        latent, shared = latent.split((self.latent_dim, self.shared_dim), -1)
        both = self.up(latent).unflatten(-1, (self.heads, -1))
        both = both.transpose(1, 2)  # (B, H, T, head + value)
        key, value = both.split((self.head_dim, self.value_dim), -1)
        shared = shared[:, None].expand(-1, self.heads, -1, -1)
        key = torch.cat((key, shared), -1)
        return F.scaled_dot_product_attention(q, key, value, attn_mask=mask, is_causal=causal)

    def _absorbed(self, q: Tensor, latent: Tensor, cache: Latents) -> Tensor:
        """The same, with the latents as the keys and values of one head that all queries share."""
        # Each head's matrix for keys moves to the query's side, the one for values behind the sum.
        weight = self.here(self.up.weight).to(q.dtype)
        up = weight.unflatten(0, (self.heads, -1))  # (H, head + value, latent)
        to_key, to_value = up.split((self.head_dim, self.value_dim), 1)
        q_head, q_shared = q.split((self.head_dim, self.shared_dim), -1)
        q_latent = torch.einsum("bhtd,hdl->bhtl", q_head, to_key)
        q = torch.cat((q_latent, q_shared), -1)  # (B, H, T, latent + shared)
        scale = (self.head_dim + self.shared_dim) ** -0.5
        mixed = cache.attend_one(q, latent, self.latent_dim, scale)
        if mixed is None:
            mask = cache.mask(q.shape[-2])
            keys = cache.append(latent)[:, None]
            values = keys[..., : self.latent_dim]
            mixed = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
            )
        return torch.einsum("bhtl,hvl->bhtv", mixed, to_value)
