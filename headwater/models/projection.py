"""Several projections of one input."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Tokens below which a copy of the weights costs more than the products.
FEW = 1024


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Make a projection without a bias."""
    return nn.Linear(inputs, outputs, bias=False)


def project_joined(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Apply linear layers to x: tensors (..., N_i), on a GPU one of (..., sum of N_i).

    One product makes that tensor: x is read once, and its gradient is one product instead of a sum
    of several. Layers that something has wrapped or divided are called one by one.
    """
    if not can_join(x, layers):
        return tuple(layer(x) for layer in layers)
    # Results are joined as well, so that a pass that is repeated with gradients goes the same way.
    if are_few(x):
        return (torch.cat([layer(x) for layer in layers], -1),)
    weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
    return (F.linear(x, torch.cat(weights)),)


def project_together(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Apply linear layers to x, (..., N_i) each, by one product where that pays."""
    if are_few(x):
        return tuple(layer(x) for layer in layers)
    parts = project_joined(x, *layers)
    if len(parts) == len(layers):
        return parts
    widths = [layer.out_features for layer in layers if isinstance(layer, nn.Linear)]
    return parts[0].split(widths, -1)


def can_join(x: Tensor, layers: tuple[nn.Module, ...]) -> bool:
    return x.is_cuda and are_plain(*layers)


def are_few(x: Tensor) -> bool:
    return not torch.is_grad_enabled() and x.numel() < FEW * x.shape[-1]


def are_plain(*modules: nn.Module) -> bool:
    """Tell whether all are linear layers, neither wrapped nor divided, and without a bias."""
    return all(type(module) is nn.Linear and module.bias is None for module in modules)
