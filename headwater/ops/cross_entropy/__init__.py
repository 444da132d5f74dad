"""The output head and its loss, a chunk of tokens at a time: reference, kernel, operators."""

from .operators import linear_cross_entropy, token_losses

__all__ = ["linear_cross_entropy", "token_losses"]
