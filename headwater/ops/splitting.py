"""Split a tensor into parts side by side, and put their gradients together again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.ops.triton.registration import operator


def _fake(parts: Sequence[Tensor]) -> Tensor:
    width = sum(part.shape[-1] for part in parts)
    return parts[0].new_empty(*parts[0].shape[:-1], width)


@operator(_fake)
def join_parts(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), -1)


class Split(torch.autograd.Function):
    """Compute `x.split(sizes, -1)` with a gradient that is one node.

    The compiler must not fuse the steps that make the parts' gradients with joining the parts:
    each element of the whole would go through the steps of all parts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sizes: list[int],
    ) -> tuple[Tensor, ...]:
        return x.split(sizes, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return join_parts(gradients), None
