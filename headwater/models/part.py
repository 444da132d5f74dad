"""A part of a decoder, with the answers of a part that keeps nothing and has no fused step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwater.ops.routing import Backend
from headwater.residuals.one_token import Reading

from .cache import Entry, Lengths

Angles = tuple[Tensor, Tensor]  # cosines and sines of positions


class Part(nn.Module):
    """A part of a decoder, written for one process."""

    def here(self, weight: Tensor) -> Tensor:
        """Return this process's part of a weight: all of it, unless ranks divide the model."""
        return weight

    def new_entry(self, lengths: Lengths, dtype: torch.dtype) -> Entry | None:
        """Allocate what this part keeps of a cache's tokens; None if it mixes channels."""
        return None

    def can_step(self) -> bool:
        """Tell whether this part has a `step`, by its options and by what its modules are."""
        return False

    def step(
        self,
        reading: Reading,
        rotary: Angles,
        cache: Entry | None,
        backend: Backend,
    ) -> Tensor:
        """Run one token of every row up to the output projection, (B, N), in fused launches.

        `rotary`: the tables of all positions.
        """
        raise NotImplementedError
