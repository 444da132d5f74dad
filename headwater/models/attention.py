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
from .part import Angles, Part
from .projection import are_plain, linear, project_joined, project_together
from .window import window_attention


class Rotary(nn.Module):
    """Tables of rotary positions, up to `context` of them; they are never saved."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, context: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        cos, sin = self.tables(context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def tables(self, context: int, device: torch.device | None = None) -> Angles:
        # In fp64: in fp32 the angles of late positions would be off.
        options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        exponents = -torch.arange(0, self.head_dim, 2, **options) / self.head_dim
        positions = torch.arange(context, **options)
        angles = torch.outer(positions, self.theta**exponents)  # (T, head_dim / 2)
        return angles.cos().float(), angles.sin().float()

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        """Fill the tables when they come from the meta device: no checkpoint has them."""
        empty = self.cos.is_meta
        super()._apply(*args, **kwargs)
        if empty and not self.cos.is_meta:
            cos, sin = self.tables(len(self.cos), torch.device("cpu"))
            self.cos, self.sin = cos.to(self.cos), sin.to(self.cos)
        return self

    def forward(self, start: int, length: int) -> Angles:
        """Return the tables of positions from `start` on, (length, head_dim / 2)."""
        stop = start + length
        if stop > len(self.cos):
            raise ValueError(f"{stop} positions exceed the model's context of {len(self.cos)}")
        return self.cos[start:stop], self.sin[start:stop]

    def at(self, positions: Tensor) -> Angles:
        """Return the tables of positions (B, T), which each row has of its own, (B, 1, T,
        head_dim / 2)."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


class Attention(Part):
    """Causal grouped-query attention, over all earlier tokens or a window of them.

    It reads one input, or separate inputs of queries, keys and values; with `mixes_values` also the
    values of the network's first attention.
    """

    backend: Backend = "auto"
    """Backend of the rotation, used where one product makes queries, keys and values without a norm between."""

    def __init__(
        self, config: ModelConfig, window: int | None = None, mixes_values: bool = False
    ) -> None:
        super().__init__()
        self.window = window
        self.heads = config.heads
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        self.qk_norm = config.qk_norm
        inner = self.heads * self.head_dim
        kv_inner = self.kv_heads * self.head_dim
        self.query = linear(config.dim, inner)
        self.key = linear(config.dim, kv_inner)
        self.value = linear(config.dim, kv_inner)
        self.output = linear(inner, config.dim)
        self.query_norm = self._head_norm(config)
        self.key_norm = self._head_norm(config)
        self.value_mix = nn.Parameter(torch.full((2,), 0.5)) if mixes_values else None

    def _head_norm(self, config: ModelConfig) -> nn.Module:
        return RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        x: Read,
        rotary: Angles,
        cache: KeysValues | None = None,
        first_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output, and the values of the tokens in x."""
        q, k, v = self._turned(x, rotary, cached=cache is not None)
        # The first attention's values join these, with two learned shares.
        if self.value_mix is not None and first_values is not None:
            first_share, share = self.value_mix.to(v.dtype)
            v = first_share * first_values + share * v
        y = self._attend_cached(q, k, v, cache)
        return self.output(y.transpose(1, 2).flatten(2)), v

    def new_entry(self, lengths: Lengths, dtype: torch.dtype) -> KeysValues:
        keys = lengths.zeros(self.kv_heads, self.head_dim, dtype=dtype)
        values = lengths.zeros(self.kv_heads, self.head_dim, dtype=dtype)
        return KeysValues(lengths, keys, values, self.window)

    def can_step(self) -> bool:
        # Kernels read the weights of linear layers and norms, and pair the channels of a head.
        if self.window is not None or self.value_mix is not None or self.head_dim % 2:
            return False
        norms = {type(self.query_norm), type(self.key_norm)}
        plain = are_plain(self.query, self.key, self.value, self.output)
        return plain and norms <= {RMSNorm, nn.Identity}

    def step(
        self,
        reading: Reading,
        rotary: Angles,
        cache: Entry | None,
        backend: Backend,
    ) -> Tensor:
        # First the projections; then one launch norms, turns, writes to the cache and attends.
        weights = self.query.weight, self.key.weight, self.value.weight
        joined = reading.project(*weights, backend=backend)  # (B, (heads + 2 kv_heads) d)
        heads = joined.unflatten(1, (-1, self.head_dim))
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = heads.split(sizes, 1)  # (B, heads, d), views
        norms = None
        if isinstance(self.query_norm, RMSNorm) and isinstance(self.key_norm, RMSNorm):
            norms = self.query_norm.for_kernels(), self.key_norm.for_kernels()
        stored = cast(KeysValues, cache)
        places = stored.keys, stored.values, stored.lengths.tokens
        return attend(q, k, v, *places, rotary=rotary, norms=norms, backend=backend)

    def scaled_by_gain(self) -> tuple[Tensor, ...]:
        """The weights that a residual may ask to start smaller, besides the output's."""
        return (self.value.weight,)

    def _turned(self, x: Read, rotary: Angles, cached: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries and keys, turned by their positions, and values, (B, heads, T, d) each."""
        parts = self._project(x, cached)
        # One kernel splits and turns what one product made, unless a norm or a cache is between.
        if len(parts) == 1 and not (self.qk_norm or cached):
            return rotate_joined(parts[0], rotary, self.heads, self.kv_heads, backend=self.backend)
        q, k, v = split_heads(parts, (self.heads, self.kv_heads, self.kv_heads))
        q = rotate(self.query_norm(q), rotary)
        return q, rotate(self.key_norm(k), rotary), v

    def _project(self, x: Read, cached: bool) -> tuple[Tensor, ...]:
        """Make queries, keys and values, (B, T, heads d) each, or side by side in one tensor."""
        if isinstance(x, tuple):
            query, key, value = x
            return self.query(query), self.key(key), self.value(value)
        project = project_together if cached else project_joined
        return project(x, self.query, self.key, self.value)

    def _attend_cached(self, q: Tensor, k: Tensor, v: Tensor, cache: KeysValues | None) -> Tensor:
        """Attend with new tokens to themselves and those in the cache, (B, H, T, d)."""
        if cache is None:
            return self._attend(q, k, v, None, causal=True)
        # One token of every row: on a GPU a kernel writes it and attends.
        y = cache.attend_one(q, k, v)
        if y is not None:
            return y
        # Else the tokens are written, and look at what the rows then have.
        mask = cache.mask(q.shape[-2])
        keys, values = cache.append(k, v)
        return self._attend(q, keys, values, mask, causal=cache.lengths.empty)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        # A window that no mask describes has its own attention.
        if self.window is not None and mask is None:
            return window_attention(q, k, v, self.window)
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": causal}
        grouped = self.heads != self.kv_heads
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **options)
