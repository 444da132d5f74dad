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

FLEX_HEAD_DIM = 16  # flex attention's kernels need heads at least this wide


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend with q (B, H, Tq, d) over the window in k and v (B, H_kv, Tk, d), Tq <= Tk."""
    grouped = q.shape[1] != k.shape[1]
    whole = q.shape[-2] == k.shape[-2]
    if q.is_cuda and whole and q.shape[-1] >= FLEX_HEAD_DIM:
        blocks = _block_mask(q.shape[-2], window, q.device)
        return _compiled_flex_attention()(q, k, v, block_mask=blocks, enable_gqa=grouped)
    mask = window_mask(q.shape[-2], k.shape[-2], window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def window_mask(queries: int, keys: int, window: int, device: torch.device | None = None) -> Tensor:
    """True where the query (row), one of the newest positions, may look at the key (column)."""
    causal = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return causal.triu(keys - queries - window + 1)


@lru_cache(maxsize=16)
def _block_mask(length: int, window: int, device: torch.device) -> BlockMask:
    def inside(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < window)

    return create_block_mask(inside, None, None, length, length, device=device)


@lru_cache(maxsize=1)
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention)  # uncompiled, it materialises all scores
