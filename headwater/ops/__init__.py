"""Pure tensor functions: each operator's fp32 reference beside its kernel, one signature."""

from .decode import decode_read
from .depth_attention import depth_attention, depth_logits, mix_sources, rms_norm
from .routing import Backend
from .sinkhorn import sinkhorn
from .two_phase import attend_blocks, merge_partial

__all__ = [
    "Backend",
    "attend_blocks",
    "decode_read",
    "depth_attention",
    "depth_logits",
    "merge_partial",
    "mix_sources",
    "rms_norm",
    "sinkhorn",
]
