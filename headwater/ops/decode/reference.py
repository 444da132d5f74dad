"""The parts of a decoding step in plain PyTorch: one token of each of B rows. `operators` says what each computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.ops.depth import reference as depth
from headwater.ops.numerics import accumulation_dtype, rms_norm

from .reading import Merge, Norm


def read(x: Tensor, norm: Norm | None, merge: Merge | None) -> Tensor:
    """What the projections see, (B, D) in the stream's dtype."""
    if merge is not None:
        x = depth.merge_partial(x, merge.folded, merge.out, merge.lse, None, None, merge.eps)
    if norm is None:
        return x
    wide = x.to(accumulation_dtype(x.dtype))
    return rms_norm(wide, norm.weight.to(wide.dtype), norm.eps).to(x.dtype)


def project(
    x: Tensor,
    weights: Sequence[Tensor],
    norm: Norm | None,
    merge: Merge | None,
    add: Tensor | None,
    gated: bool,
) -> Tensor:
    x = read(x, norm, merge)
    parts = [F.linear(x, weight.to(x.dtype)) for weight in weights]
    y = F.silu(parts[0]) * parts[1] if gated else torch.cat(parts, -1)
    return y if add is None else add + y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (c, c + d / 2) of x (B, H, d) by the angles of its row, (B, d / 2)."""
    left, right = x.chunk(2, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    norms: tuple[Norm, Norm] | None,
    window: int | None,
    scale: float,
) -> Tensor:
    if norms is not None:
        q, k = (rms_norm(x, norm.weight.to(x.dtype), norm.eps) for x, norm in zip((q, k), norms))
    if rotary is not None:
        cos, sin = (table[lengths] for table in rotary)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    row = torch.arange(len(q), device=q.device)
    keys[row, lengths], values[row, lengths] = k.to(keys.dtype), v.to(values.dtype)
    place = torch.arange(keys.shape[1], device=q.device)
    seen = place <= lengths[:, None]
    if window is not None:
        seen &= place > lengths[:, None] - window
    heads, kept = (t.transpose(1, 2).to(q.dtype) for t in (keys, values))  # (B, kv_heads, room, d)
    mixed = F.scaled_dot_product_attention(
        q[:, :, None], heads, kept, attn_mask=seen[:, None, None], scale=scale, enable_gqa=True
    )
    return mixed[:, :, 0].flatten(1)


def open_span(sources: Tensor, folded: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return depth.attend_blocks(sources.unbind(0), folded, None, eps)


def likeliest(logits: Tensor) -> Tensor:
    top, places = logits.max(-1)  # which is NaN where one of them is
    return places.masked_fill(top.isnan(), -1)


def philox(counters: Sequence[Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Philox 4x32 in ten rounds (Salmon et al., SC 2011): four random numbers for four counters and a key of two, all
    of 32 bits in int64, whose products wrap around as they should."""
    low = 0xFFFFFFFF
    (a, b, c, d), (k0, k1) = counters, key
    for _ in range(10):
        first, third = a * 0xD2511F53, c * 0xCD9E8D57
        a, c = (third >> 32 & low) ^ b ^ k0, (first >> 32 & low) ^ d ^ k1
        b, d = third & low, first & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return [a, b, c, d]


def exponentials(seeds: Tensor, step: Tensor, count: int) -> Tensor:
    quarter = -(-count // 4)
    zero = torch.zeros(1, dtype=torch.long, device=seeds.device)
    place = torch.arange(quarter, device=seeds.device)
    key = seeds[:, None] & 0xFFFFFFFF, seeds[:, None] >> 32 & 0xFFFFFFFF
    bits = torch.cat(philox((place, step, zero, zero), key), -1)[:, :count]
    u = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return torch.where(u < 1e-3, u * (1 + u * (0.5 + u * (1 / 3))), -torch.log(1 - u))
