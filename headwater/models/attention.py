"""Grouped-query attention with rotary positions and a KV cache."""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.ops.rotary import rotate, rotate_joined, split_heads
from headwater.ops.routing import Backend
from headwater.residuals import Read

from .config import ModelConfig
from .norm import RMSNorm
from .projection import project_joined, project_together
from .window import window_attention


@dataclass
class KVCache:
    """Keys and values of one attention sublayer for the positions seen so far, (B, kv_heads, T, head_dim).

    With a window, only the positions that the next token can see are kept.
    """

    window: int | None = None
    keys: Tensor | None = None
    values: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]

    def mask(self, count: int) -> Tensor | None:
        """Where `count` new tokens may look, if attention cannot know it by itself."""
        if self.keys is None or self.window is not None or count == 1:
            return None
        return continuation_mask(count, len(self), self.keys.device)

    def attend_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Attention of one new token, (B, H, 1, d), where a cache can do that by itself."""
        return None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, and for the next tokens what they can see of them."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat((self.keys, keys), dim=-2)
            values = torch.cat((self.values, values), dim=-2)
        kept = slice(None) if self.window is None else slice(1 - self.window, None)
        self.keys, self.values = keys[..., kept, :], values[..., kept, :]
        return keys, values


class Rotary(nn.Module):
    """Rotary position tables up to `context` positions; made for any length asked, never saved."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, context: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        for name, table in zip(("cos", "sin"), self.tables(context), strict=True):
            self.register_buffer(name, table, persistent=False)

    def tables(self, context: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        frequency = self.theta ** (
            -torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
        )
        angle = torch.outer(
            torch.arange(context, dtype=torch.float64, device=device), frequency
        )  # (T, head_dim / 2)
        return angle.cos().float(), angle.sin().float()

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        """As every move of a module; what comes from the meta device is empty, and no checkpoint has it."""
        empty = self.cos.is_meta
        super()._apply(*args, **kwargs)
        if empty and not self.cos.is_meta:
            self.cos, self.sin = (
                table.to(self.cos) for table in self.tables(len(self.cos), torch.device("cpu"))
            )
        return self

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        if start + length > len(self.cos):
            raise ValueError(
                f"{start + length} positions exceed the model's context of {len(self.cos)}"
            )
        return self.cos[start : start + length], self.sin[start : start + length]

    def at(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """For rows at positions (B, T) of their own."""
        return self.cos[places][:, None], self.sin[places][:, None]  # (B, 1, T, head_dim / 2)


class Attention(nn.Module):
    """Causal grouped-query attention, over all earlier tokens or a window of them. Takes one input, or separate query,
    key and value inputs; `mixes_values`: also the values of the network's first attention."""

    backend: Backend = "auto"
    """Of the rotation, where one product makes queries, keys and values, and no norm is between."""

    def __init__(
        self, config: ModelConfig, window: int | None = None, mixes_values: bool = False
    ) -> None:
        super().__init__()
        self.window = window
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.qk_norm = config.qk_norm
        self.query = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.output = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)
        self.query_norm = (
            RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        )
        self.key_norm = (
            RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        )
        self.value_mix = nn.Parameter(torch.full((2,), 0.5)) if mixes_values else None

    def forward(
        self,
        x: Read,
        rotary: tuple[Tensor, Tensor],
        cache: KVCache | None = None,
        first_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output, and the values of the tokens given."""
        q, k, v = self._turned(x, rotary, cached=cache is not None)
        if self.value_mix is not None and first_values is not None:
            first_share, own_share = self.value_mix.to(v.dtype)
            v = first_share * first_values + own_share * v
        y = self._attend_cached(q, k, v, cache)
        return self.output(y.transpose(1, 2).flatten(2)), v

    def scaled_by_gain(self) -> tuple[Tensor, ...]:
        """The weights that a residual may ask to start smaller, besides the output's."""
        return (self.value.weight,)

    def _turned(
        self, x: Read, rotary: tuple[Tensor, Tensor], cached: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned by their positions, and values, (B, heads, T, d) each."""
        parts = self._project(x, cached)
        if len(parts) == 1 and not (self.qk_norm or cached):
            return rotate_joined(parts[0], rotary, self.heads, self.kv_heads, backend=self.backend)
        q, k, v = split_heads(parts, (self.heads, self.kv_heads, self.kv_heads))
        return rotate(self.query_norm(q), rotary), rotate(self.key_norm(k), rotary), v

    def _project(self, x: Read, cached: bool) -> tuple[Tensor, ...]:
        """Queries, keys and values, (B, T, heads times head_dim) each, or in one tensor side by side."""
        if isinstance(x, tuple):
            return self.query(x[0]), self.key(x[1]), self.value(x[2])
        project = project_together if cached else project_joined
        return project(x, self.query, self.key, self.value)

    def _attend_cached(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None) -> Tensor:
        """(B, H, T, d): of the tokens given, over themselves and those that the cache has seen."""
        if cache is None:
            return self._attend(q, k, v, None, causal=True)
        if (y := cache.attend_one(q, k, v)) is not None:
            return y
        causal, mask = not len(cache), cache.mask(q.shape[-2])
        return self._attend(q, *cache.append(k, v), mask, causal)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        if self.window is not None and mask is None:
            return window_attention(q, k, v, self.window)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.heads != self.kv_heads
        )


def continuation_mask(length: int, past: int, device: torch.device) -> Tensor:
    """True where a new token (row) may look: at everything past and at new tokens up to itself. On a GPU a mask that is
    never written out: scores of a portion of a long prompt would take all memory."""
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # which imports triton

        return causal_lower_right(length, past + length)
    return torch.ones(length, past + length, dtype=torch.bool, device=device).tril(diagonal=past)
