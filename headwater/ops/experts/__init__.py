"""Matrix products for a mixture of experts."""

from .operators import grouped_linear

__all__ = ["grouped_linear"]
