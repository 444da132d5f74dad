"""Cross entropy of rows of logits in plain PyTorch; the gradient may take the logits' place."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy_(logits: Tensor, targets: Tensor, scale: float | None) -> Tensor:
    """Losses (M,) in fp32 of logits (M, V) and targets (M,). The logits are used up; with a scale their gradient takes
    their place, scale * (softmax - one at the target), rounded once.

    With d the log-sum-exp of all other logits less the target's, the loss is log(1 + exp d) and softmax - 1 is
    -sigmoid(d): where the target has nearly all of the weight, a difference would have no digits left.
    """
    z, at = logits.float(), targets.unsqueeze(-1)
    target_logit = z.gather(-1, at)
    behind = z.scatter_(-1, at, float("-inf")).logsumexp(-1, keepdim=True) - target_logit
    losses = F.softplus(behind).where(
        target_logit < float("inf"), float("nan")
    )  # not zero: an overflow is no certainty
    if scale is not None:
        gradient = (z - (target_logit + losses)).exp_().scatter_(-1, at, -behind.sigmoid())
        logits.copy_(gradient.mul_(scale))
    return losses.squeeze(-1)
