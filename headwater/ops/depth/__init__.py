"""Attention over depth: references, kernels (score, mix, merge, read, weigh), these under autograd, and the doors."""

from .operators import attend_blocks, decode_read, depth_attention, merge_partial, weigh_sources
from .reference import depth_logits, mix_sources

__all__ = [
    "attend_blocks",
    "decode_read",
    "depth_attention",
    "depth_logits",
    "merge_partial",
    "mix_sources",
    "weigh_sources",
]
