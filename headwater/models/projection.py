"""Several projections of one input."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 1024  # tokens


def project_joined(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """`layer(x)` for each linear layer without a bias, (..., N_i) each; where one product makes all, one tensor
    (..., sum of N_i) instead, with one part behind the other."""
    if not one_product(x, layers):
        return tuple(layer(x) for layer in layers)
    return (F.linear(x, torch.cat([layer.weight for layer in layers if isinstance(layer, nn.Linear)])),)


def project_together(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """`layer(x)` for each linear layer without a bias, by one product where that pays."""
    parts = project_joined(x, *layers)
    if len(parts) == len(layers):
        return parts
    return parts[0].split([layer.out_features for layer in layers if isinstance(layer, nn.Linear)], -1)


def one_product(x: Tensor, layers: tuple[nn.Module, ...]) -> bool:
    """On a GPU: x is read once, and its gradient is one product instead of a sum of several. Layers that something has
    wrapped or divided are called one by one; so are all for few tokens without gradients, where a copy of the weights
    would cost more than the product."""
    few = not torch.is_grad_enabled() and x.numel() < FEW * x.shape[-1]
    return not few and x.is_cuda and all(type(layer) is nn.Linear for layer in layers)
