"""The parts of a decoding step in plain PyTorch: one token of each of B rows.

`operators` says what each part computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.ops.depth import reference as depth
from headwater.ops.numerics import accumulation_dtype, rms_norm

from .reading import Merge, Norm


def read(x: Tensor, norm: Norm | None, merge: Merge | None) -> Tensor:
    """Compute what the projections see, (B, D) in the stream's dtype."""
    if merge is not None:
        out, lse, folded, eps = merge
        x = depth.merge_partial(x, folded, out, lse, None, None, eps)
    if norm is None:
        return x
    # fp32 throughout, one rounding at the end.
    wide = x.to(accumulation_dtype(x.dtype))
    weight = norm.weight.to(wide.dtype)
    return rms_norm(wide, weight, norm.eps).to(x.dtype)


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
    if gated:
        gate, up = parts
        y = F.silu(gate) * up
    else:
        y = torch.cat(parts, -1)
    return y if add is None else add + y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (c, c + d / 2) of x (B, H, d) by the angles of its row, (B, d / 2)."""
    left, right = x.chunk(2, -1)
    cos = cos[:, None].to(x.dtype)
    sin = sin[:, None].to(x.dtype)
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
        query_norm, key_norm = norms
        q = rms_norm(q, query_norm.weight.to(q.dtype), query_norm.eps)
        k = rms_norm(k, key_norm.weight.to(k.dtype), key_norm.eps)
    if rotary is not None:
        cos, sin = rotary
        q = rotate(q, cos[lengths], sin[lengths])
        k = rotate(k, cos[lengths], sin[lengths])
    # The new token goes to its row's place in the cache, and is one of those looked at.
    row = torch.arange(len(q), device=q.device)
    keys[row, lengths] = k.to(keys.dtype)
    values[row, lengths] = v.to(values.dtype)
    place = torch.arange(keys.shape[1], device=q.device)
    visible = place <= lengths[:, None]
    if window is not None:
        visible &= place > lengths[:, None] - window
    mixed = F.scaled_dot_product_attention(
        q[:, :, None],
        keys.transpose(1, 2).to(q.dtype),  # (B, KV, room, d)
        values.transpose(1, 2).to(q.dtype),
        attn_mask=visible[:, None, None],
        scale=scale,
        enable_gqa=True,
    )
    return mixed[:, :, 0].flatten(1)


def open_span(sources: Tensor, folded: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return depth.attend_blocks(sources.unbind(0), folded, None, eps)


def likeliest(logits: Tensor) -> Tensor:
    top, places = logits.max(-1)  # which is NaN where one of them is
    return places.masked_fill(top.isnan(), -1)


def philox(
    counters: Sequence[Tensor],
    key: tuple[Tensor, Tensor],
) -> list[Tensor]:
    """Philox 4x32 in ten rounds (Salmon et al., SC 2011): four random numbers.

    Four counters and a key of two, all of 32 bits in int64, whose products wrap around as they
    should.
    """
    low = 0xFFFFFFFF
    a, b, c, d = counters
    k0, k1 = key
    for _ in range(10):
        first = a * 0xD2511F53
        third = c * 0xCD9E8D57
        a = (third >> 32 & low) ^ b ^ k0
        c = (first >> 32 & low) ^ d ^ k1
        b = third & low
        d = first & low
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    return [a, b, c, d]


def exponentials(seeds: Tensor, step: Tensor, count: int) -> Tensor:
    # Each counter gives four numbers, which go to the four quarters of a row.
    quarter = -(-count // 4)
    zero = torch.zeros(1, dtype=torch.long, device=seeds.device)
    place = torch.arange(quarter, device=seeds.device)
    key = seeds[:, None] & 0xFFFFFFFF, seeds[:, None] >> 32 & 0xFFFFFFFF
    quarters = philox((place, step, zero, zero), key)
    bits = torch.cat(quarters, -1)[:, :count]
    u = (bits.to(torch.float32) + 0.5) * 2.0**-32
    # -log(1 - u), whose series is more exact for small u.
    series = u * (1 + u * (0.5 + u * (1 / 3)))
    return torch.where(u < 1e-3, series, -torch.log(1 - u))
