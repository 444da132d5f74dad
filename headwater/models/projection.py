"""Several projections of one input."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 1024  # tokens


def project_joined(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """`layer(x)` for each linear layer without a bias, (..., N_i) each; on a GPU one tensor (..., sum of N_i) instead,
    with one part behind the other. Layers that something has wrapped or divided are called one by one.

    One product makes it: x is read once, and its gradient is one product instead of a sum of several. For few tokens
    without gradients a copy of the weights would cost more than the products, and these are joined; so that a pass
    which is repeated with gradients goes the same way from here on.
    """
    if not can_join(x, layers):
        return tuple(layer(x) for layer in layers)
    if are_few(x):
        return (torch.cat([layer(x) for layer in layers], -1),)
    return (
        F.linear(x, torch.cat([layer.weight for layer in layers if isinstance(layer, nn.Linear)])),
    )


def project_together(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """`layer(x)` for each linear layer without a bias, by one product where that pays."""
    if are_few(x):
        return tuple(layer(x) for layer in layers)
    parts = project_joined(x, *layers)
    if len(parts) == len(layers):
        return parts
    return parts[0].split(
        [layer.out_features for layer in layers if isinstance(layer, nn.Linear)], -1
    )


def can_join(x: Tensor, layers: tuple[nn.Module, ...]) -> bool:
    return x.is_cuda and all(type(layer) is nn.Linear for layer in layers)


def are_few(x: Tensor) -> bool:
    return not torch.is_grad_enabled() and x.numel() < FEW * x.shape[-1]
