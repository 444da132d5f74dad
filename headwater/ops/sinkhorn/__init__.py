"""Sinkhorn's iteration: reference, kernel, and the operator over both."""

from .operators import sinkhorn

__all__ = ["sinkhorn"]
