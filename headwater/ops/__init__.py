"""Pure tensor functions: a folder per operator, its fp32 reference beside its kernels."""

from .cross_entropy import linear_cross_entropy
from .depth import depth_attention, depth_logits, mix_sources
from .numerics import rms_norm
from .routing import Backend
from .sinkhorn import sinkhorn

__all__ = [
    "Backend",
    "depth_attention",
    "depth_logits",
    "linear_cross_entropy",
    "mix_sources",
    "rms_norm",
    "sinkhorn",
]
