"""Several projections of one input."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwater.ops.triton.registration import operator

FEW = 1024  # tokens


def project_together(x: Tensor, *layers: nn.Module, whole_gradient: bool = False) -> tuple[Tensor, ...]:
    """`layer(x)` for each linear layer without a bias. On a GPU as one product: x is read once, and its gradient is one
    product instead of a sum of several. Layers that something has wrapped or divided are called one by one; so are all
    for few tokens without gradients, where a copy of the weights would cost more than the product.

    `whole_gradient`: the compiler is not to fuse what makes the parts' gradients with putting them together. That pays
    where several steps make them: each element of the whole would go through the steps of all parts."""
    few = not torch.is_grad_enabled() and x.numel() < FEW * x.shape[-1]
    if few or not (x.is_cuda and all(type(layer) is nn.Linear for layer in layers)):
        return tuple(layer(x) for layer in layers)
    weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
    whole, sizes = F.linear(x, torch.cat(weights)), [len(weight) for weight in weights]
    return Split.apply(whole, sizes) if whole_gradient else whole.split(sizes, -1)


def _fake(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].new_empty(*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))


@operator(_fake)
def join_parts(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), -1)


class Split(torch.autograd.Function):
    """`x.split(sizes, -1)`, the gradient of which is one node for the compiler."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return x.split(sizes, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return join_parts(gradients), None
