"""Pure tensor functions: one folder an operator, its fp32 reference beside its kernels, one signature."""

from .cross_entropy import linear_cross_entropy
from .depth import (
    attend_blocks,
    decode_read,
    depth_attention,
    depth_logits,
    merge_partial,
    mix_sources,
)
from .numerics import rms_norm
from .routing import Backend
from .sinkhorn import sinkhorn

__all__ = [
    "Backend",
    "attend_blocks",
    "decode_read",
    "depth_attention",
    "depth_logits",
    "linear_cross_entropy",
    "merge_partial",
    "mix_sources",
    "rms_norm",
    "sinkhorn",
]
