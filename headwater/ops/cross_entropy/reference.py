"""Cross entropy of rows of logits in plain PyTorch; the gradient may take the logits' place."""

import torch
from torch import Tensor


def cross_entropy_(logits: Tensor, targets: Tensor, scale: float | None) -> Tensor:
    """Losses (M,) in fp32 of logits (M, V) and targets (M,). With a scale, the logits become their gradient in place:
    scale * (softmax - one at the target), rounded once."""
    z = logits.float()
    lse = z.logsumexp(-1)
    losses = lse - z.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if scale is not None:
        gradient = (z - lse.unsqueeze(-1)).exp_()
        gradient.scatter_add_(-1, targets.unsqueeze(-1), torch.full_like(gradient[:, :1], -1.0))
        logits.copy_(gradient.mul_(scale))
    return losses
