"""Several projections of one input."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 1024  # tokens


def project_together(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """`layer(x)` for each linear layer without a bias. On a GPU as one product: x is read once, and its gradient is one
    product instead of a sum of several. Layers that something has wrapped or divided are called one by one; so are all
    for few tokens without gradients, where a copy of the weights would cost more than the product."""
    few = not torch.is_grad_enabled() and x.numel() < FEW * x.shape[-1]
    if few or not (x.is_cuda and all(type(layer) is nn.Linear for layer in layers)):
        return tuple(layer(x) for layer in layers)
    weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
    return F.linear(x, torch.cat(weights)).split([len(weight) for weight in weights], -1)
