"""Tensors side by side in one, as one product makes them, and the gradient of their parts as one tensor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.ops.triton.registration import operator


def _fake(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].new_empty(*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))


@operator(_fake)
def join_parts(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), -1)


class Split(torch.autograd.Function):
    """`x.split(sizes, -1)`, the gradient of which is one node: the compiler is not to fuse what makes the parts'
    gradients with putting them together. That pays where several steps make them: each element of the whole would go
    through the steps of all parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return x.split(sizes, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return join_parts(gradients), None
