"""Cross entropy of rows of logits in plain PyTorch; the gradient may take the logits' place."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy_(logits: Tensor, targets: Tensor, scale: float | None) -> Tensor:
    """Return losses (M,) in fp32 of logits (M, V) and targets (M,), and use the logits up.

    With a scale the gradient takes the logits' place: scale * (softmax - one at the target),
    rounded once.

    With d the log-sum-exp of all other logits less the target's, the loss is log(1 + exp d) and
    softmax - 1 is -sigmoid(d). If the target has nearly all of the weight, a difference would have
    no digits left.
    """
    z = logits.float()
    place = targets.unsqueeze(-1)
    target_logit = z.gather(-1, place)
    others = z.scatter_(-1, place, float("-inf"))
    behind = others.logsumexp(-1, keepdim=True) - target_logit
    # A target's logit that has overflowed is no certainty: its loss is NaN, not zero.
    losses = F.softplus(behind).where(target_logit < float("inf"), float("nan"))
    if scale is not None:
        gradient = (z - (target_logit + losses)).exp_()
        gradient.scatter_(-1, place, -behind.sigmoid())
        logits.copy_(gradient.mul_(scale))
    return losses.squeeze(-1)
