"""Sinkhorn's iteration in plain PyTorch, forward and backward: the mathematics is in `operators`."""

import torch
from torch import Tensor

FLOOR = 1e-18  # exp(-41): a logit further below its column's largest counts as this far


def exponentials(logits: Tensor) -> Tensor:
    """K, (n, n, M): tokens last, where small matrices are fast on a CPU.

    The first division undoes any scale of a column, so nothing overflows; above FLOOR nothing divides by zero.
    """
    x = logits.permute(1, 2, 0).contiguous()
    return (x - x.amax(0)).exp_().clamp_min_(FLOOR)


def scalings(kernel: Tensor, iterations: int) -> Tensor:
    """Every c and r in turn, (2 iterations, n, M)."""
    history, product = kernel.new_empty(2 * iterations, *kernel.shape[1:]), torch.empty_like(kernel)
    rows = torch.ones_like(history[0])
    for columns, new_rows in zip(history[::2], history[1::2]):
        torch.sum(torch.mul(kernel, rows.unsqueeze(1), out=product), 0, out=columns).reciprocal_()
        rows = torch.sum(torch.mul(kernel, columns, out=product), 1, out=new_rows).reciprocal_()
    return history


def forward(logits: Tensor, iterations: int) -> Tensor:
    """(M, n, n) to (M, n, n)."""
    kernel = exponentials(logits)
    columns, rows = scalings(kernel, iterations)[-2:]
    return (rows.unsqueeze(1) * kernel * columns).permute(2, 0, 1).contiguous()


def by_division(logits: Tensor, iterations: int) -> Tensor:
    """(..., n, n) to (..., n, n) by operators that every transform of torch.func knows, in fp64: autograd's gradient is
    not `centred`."""
    x = logits.double()
    kernel = (x - x.detach().amax(-2, keepdim=True)).exp().clamp_min(FLOOR)
    rows = columns = torch.ones_like(kernel[..., :1])  # (..., n, 1)
    for _ in range(iterations):
        columns = (kernel * rows).sum(-2, keepdim=True).reciprocal()  # (..., 1, n)
        rows = (kernel * columns).sum(-1, keepdim=True).reciprocal()  # (..., n, 1)
    return (rows * kernel * columns).to(logits.dtype)


def centred(gradient: Tensor, matrix: Tensor) -> Tensor:
    """The gradient less each row's mean by its weights. The last division makes rows sum to one, so that a number for a
    whole row changes nothing; near a permutation it is nearly all that there is, and drowns what does."""
    return gradient - (gradient * matrix).sum(1, keepdim=True)


def backward(logits: Tensor, gradient: Tensor, iterations: int) -> Tensor:
    """The gradient of the logits, through every iteration."""
    kernel = exponentials(logits)
    history = scalings(kernel, iterations)
    slopes = history.square().neg_()  # of a reciprocal
    columns, rows = history[-2:]
    gradient = centred(gradient.permute(1, 2, 0), rows.unsqueeze(1) * kernel * columns)
    total = rows.unsqueeze(1) * gradient * columns  # gradient of K
    product = gradient * kernel
    to_rows, to_columns = (product * columns).sum(1), (product * rows.unsqueeze(1)).sum(0)
    for t in range(2 * iterations - 2, -1, -2):
        to_sums = (to_rows * slopes[t + 1]).unsqueeze(1)  # gradient of K c, then below of K^T r
        total.addcmul_(to_sums, history[t])
        to_columns = to_columns + torch.mul(kernel, to_sums, out=product).sum(0)
        to_sums = to_columns * slopes[t]
        total.addcmul_(history[t - 1].unsqueeze(1), to_sums) if t else total.add_(
            to_sums
        )  # r starts at one
        to_rows, to_columns = (
            torch.mul(kernel, to_sums, out=product).sum(1),
            torch.zeros_like(to_sums),
        )
    total.mul_(kernel).masked_fill_(kernel <= FLOOR, 0)
    return total.permute(2, 0, 1).contiguous()
