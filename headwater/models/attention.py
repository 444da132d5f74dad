"""Grouped-query attention with rotary positions."""

from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.ops.decode import attend
from headwater.ops.rotary import rotate, rotate_joined, split_heads
from headwater.ops.routing import Backend
from headwater.residuals import Read
from headwater.residuals.one_token import Reading

from .cache import Entry, KeysValues, Lengths
from .config import ModelConfig
from .norm import RMSNorm
from .part import Part, are_plain
from .projection import project_joined, project_together
from .window import window_attention


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


class Attention(Part):
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
        cache: KeysValues | None = None,
        first_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output, and the values of the tokens given."""
        q, k, v = self._turned(x, rotary, cached=cache is not None)
        if self.value_mix is not None and first_values is not None:
            first_share, own_share = self.value_mix.to(v.dtype)
            v = first_share * first_values + own_share * v
        y = self._attend_cached(q, k, v, cache)
        return self.output(y.transpose(1, 2).flatten(2)), v

    def new_entry(self, lengths: Lengths, dtype: torch.dtype) -> KeysValues:
        shape = (len(lengths.tokens), lengths.room, self.kv_heads, self.head_dim)
        device = lengths.tokens.device
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return KeysValues(lengths, keys, values, self.window)

    def can_step(self) -> bool:
        norms = (type(self.query_norm), type(self.key_norm))
        plain = are_plain(self.query, self.key, self.value, self.output)
        usual = self.window is None and self.value_mix is None and self.head_dim % 2 == 0
        return plain and usual and {*norms} <= {RMSNorm, nn.Identity}

    def step(
        self,
        reading: Reading,
        rotary: tuple[Tensor, Tensor],
        cache: Entry | None,
        backend: Backend,
    ) -> Tensor:
        weights = self.query.weight, self.key.weight, self.value.weight
        qkv = reading.project(*weights, backend=backend)
        heads = self.heads, self.kv_heads, self.kv_heads
        parts = qkv.split([count * self.head_dim for count in heads], 1)
        q, k, v = (
            part.unflatten(1, (count, self.head_dim)) for part, count in zip(parts, heads)
        )  # (B, heads, d)
        norms = None
        if isinstance(self.query_norm, RMSNorm) and isinstance(self.key_norm, RMSNorm):
            norms = self.query_norm.for_kernels(), self.key_norm.for_kernels()
        stored = cast(KeysValues, cache)
        lengths = stored.lengths.tokens
        return attend(
            q,
            k,
            v,
            stored.keys,
            stored.values,
            lengths,
            rotary=rotary,
            norms=norms,
            backend=backend,
        )

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

    def _attend_cached(self, q: Tensor, k: Tensor, v: Tensor, cache: KeysValues | None) -> Tensor:
        """(B, H, T, d): of the tokens given, over themselves and those that the cache has seen."""
        if cache is None:
            return self._attend(q, k, v, None, causal=True)
        if (y := cache.attend_one(q, k, v)) is not None:
            return y
        mask = cache.mask(q.shape[-2])
        keys, values = cache.append(k, v)
        return self._attend(q, keys, values, mask, causal=cache.lengths.empty)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        if self.window is not None and mask is None:
            return window_attention(q, k, v, self.window)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.heads != self.kv_heads
        )
