"""Rotary positions in plain PyTorch."""

import torch
from torch import Tensor

from headwater.ops.splitting import Split


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each channel pair (c, c + head_dim / 2) of x, (B, H, T, head_dim), by its position's angle. Pairs swap by a
    flip, whose gradient is one too, in one kernel."""
    cos, sin = (table.to(x.dtype).unsqueeze(-2) for table in rotary)  # (T, 1, head_dim / 2)
    pairs = x.unflatten(-1, (2, -1))
    return (pairs * cos + pairs.flip(-2) * torch.cat((-sin, sin), dim=-2)).flatten(-2)


def split_heads(parts: tuple[Tensor, ...], counts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Parts (B, T, channels), or one tensor with all of them side by side, as views (B, heads, T, head_dim) with so
    many heads each."""
    if len(parts) == 1:
        width = parts[0].shape[-1] // sum(counts)
        parts = Split.apply(parts[0], [count * width for count in counts])
    return tuple(
        part.unflatten(-1, (count, -1)).transpose(1, 2) for part, count in zip(parts, counts)
    )


def rotate_joined(
    joined: Tensor, rotary: tuple[Tensor, Tensor], heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = split_heads((joined,), (heads, kv_heads, kv_heads))
    return rotate(q, rotary), rotate(k, rotary), v
