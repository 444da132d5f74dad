"""Residuals that keep one running stream and differ only in how a sublayer's output joins it."""

import torch
from torch import Tensor

from .base import Norm, Residual, State, apply_norm


class StreamResidual(Residual):
    """Every read is the stream; `write` is what a subclass defines."""

    def begin(self, x: Tensor) -> State:
        return (x,)

    def read(self, state: State, i: int, norm: Norm | None = None) -> tuple[Tensor, State]:
        return apply_norm(norm, state[0]), state

    def end(self, state: State, norm: Norm | None = None) -> Tensor:
        return apply_norm(norm, state[0])

    def weights(self, state: State, i: int) -> Tensor:
        return torch.ones(1, *state[0].shape[:-1], 1, device=state[0].device)
