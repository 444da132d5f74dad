"""Attention over the last `window` tokens: masked, or flex attention for whole sequences on a GPU.

    y_t = sum_s softmax_s(<q_t, k_s> / sqrt(d)) v_s  over  t - window < s <= t

The queries are the newest positions of the keys, so cached decoding is the same call.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

# Flex attention's kernels need heads at least this wide.
FLEX_HEAD_DIM = 16


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend with q (B, H, Tq, d) over the window in k and v (B, H_kv, Tk, d), Tq <= Tk."""
    queries, keys = q.shape[-2], k.shape[-2]
    grouped = q.shape[1] != k.shape[1]
    # Whole sequences on a GPU skip the blocks of keys outside of the window.
    if q.is_cuda and queries == keys and q.shape[-1] >= FLEX_HEAD_DIM:
        blocks = _block_mask(queries, window, q.device)
        attend = _compiled_flex_attention()
        return attend(q, k, v, block_mask=blocks, enable_gqa=grouped)
    mask = window_mask(queries, keys, window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def window_mask(queries: int, keys: int, window: int, device: torch.device | None = None) -> Tensor:
    """Say where the queries (rows), the newest positions, may look at the keys (columns)."""
    everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
    # The last query looks at the last key.
    behind = keys - queries
    return everything.tril(behind).triu(behind - window + 1)


@lru_cache(maxsize=16)
def _block_mask(length: int, window: int, device: torch.device) -> BlockMask:
    def inside(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < window)

    return create_block_mask(inside, None, None, length, length, device=device)


@lru_cache(maxsize=1)
def _compiled_flex_attention() -> Any:
    # Uncompiled, it materialises all scores.
    return torch.compile(flex_attention)
