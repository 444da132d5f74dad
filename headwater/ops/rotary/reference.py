"""Rotary positions in plain PyTorch."""

import torch
from torch import Tensor

from headwater.ops.splitting import Split


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel pairs of x (B, H, T, head_dim) by their position's angle.

    Channels c and c + head_dim / 2 are a pair. Pairs swap by a flip, whose gradient is a flip too, in one kernel.
    """
    cos, sin = (table.to(x.dtype).unsqueeze(-2) for table in rotary)  # (T, 1, head_dim / 2)
    pairs = x.unflatten(-1, (2, -1))
    signed_sin = torch.cat((-sin, sin), dim=-2)
    return (pairs * cos + pairs.flip(-2) * signed_sin).flatten(-2)


def split_heads(
    parts: tuple[Tensor, ...],
    counts: tuple[int, ...],
) -> tuple[Tensor, ...]:
    """View parts (B, T, channels) as (B, heads, T, head_dim) with `counts` heads each.

    The parts may also be one tensor with all of them side by side.
    """
    if len(parts) == 1:
        width = parts[0].shape[-1] // sum(counts)
        parts = Split.apply(parts[0], [count * width for count in counts])
    views = []
    for part, count in zip(parts, counts):
        by_head = part.unflatten(-1, (count, -1))
        views.append(by_head.transpose(1, 2))
    return tuple(views)


def rotate_joined(
    joined: Tensor, rotary: tuple[Tensor, Tensor], heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = split_heads((joined,), (heads, kv_heads, kv_heads))
    return rotate(q, rotary), rotate(k, rotary), v
