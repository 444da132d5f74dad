"""The output head and its loss together, a chunk of tokens at a time: reference, kernel, and the operators."""

from .operators import linear_cross_entropy, token_losses

__all__ = ["linear_cross_entropy", "token_losses"]
