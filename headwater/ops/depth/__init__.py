"""Attention over depth: references, kernels, these under autograd, and the operator over both."""

from .operators import depth_attention
from .reference import depth_logits, mix_sources

__all__ = ["depth_attention", "depth_logits", "mix_sources"]
