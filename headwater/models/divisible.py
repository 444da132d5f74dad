"""Modules whose weights ranks may divide among them, written for one process."""

from torch import Tensor, nn


class Divisible(nn.Module):
    def here(self, weight: Tensor) -> Tensor:
        """The part of a weight that this process has: all of it, unless ranks divide the model."""
        return weight
