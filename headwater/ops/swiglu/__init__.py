"""The gate between a feed-forward's products: reference, kernel, and the operator."""

from .operators import swiglu

__all__ = ["swiglu"]
