"""Rotary positions of queries and keys: reference, kernel, operator for a joined projection."""

from .operators import rotate_joined
from .reference import rotate, split_heads

__all__ = ["rotate", "rotate_joined", "split_heads"]
