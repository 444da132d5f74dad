"""Sinkhorn's iteration in plain PyTorch, both ways: the mathematics is in `operators`."""

import torch
from torch import Tensor

FLOOR = 1e-18  # exp(-41): a logit further below its column's largest counts as this far


def exponentials(logits: Tensor) -> Tensor:
    """Compute K, (n, n, M): tokens last, where small matrices are fast on a CPU.

    The first division undoes any scale of a column, so nothing overflows; above FLOOR nothing
    divides by zero.
    """
    x = logits.permute(1, 2, 0).contiguous()
    return (x - x.amax(0)).exp_().clamp_min_(FLOOR)


def scalings(kernel: Tensor, iterations: int) -> Tensor:
    """Return every c and r in turn, (2 iterations, n, M)."""
    history = kernel.new_empty(2 * iterations, *kernel.shape[1:])
    product = torch.empty_like(kernel)
    rows = torch.ones_like(history[0])
    for columns, new_rows in zip(history[::2], history[1::2]):
        torch.mul(kernel, rows.unsqueeze(1), out=product)
        torch.sum(product, 0, out=columns).reciprocal_()
        torch.mul(kernel, columns, out=product)
        rows = torch.sum(product, 1, out=new_rows).reciprocal_()
    return history


def forward(logits: Tensor, iterations: int) -> Tensor:
    """Balance (M, n, n) to (M, n, n)."""
    kernel = exponentials(logits)
    columns, rows = scalings(kernel, iterations)[-2:]
    matrices = rows.unsqueeze(1) * kernel * columns
    return matrices.permute(2, 0, 1).contiguous()


def by_division(logits: Tensor, iterations: int) -> Tensor:
    """Balance (..., n, n) by operators that every transform of torch.func knows, in fp64.

    Autograd's gradient of it is not `centred`.
    """
    x = logits.double()
    largest = x.detach().amax(-2, keepdim=True)
    kernel = (x - largest).exp().clamp_min(FLOOR)
    rows = columns = torch.ones_like(kernel[..., :1])  # (..., n, 1)
    for _ in range(iterations):
        columns = (kernel * rows).sum(-2, keepdim=True).reciprocal()  # (..., 1, n)
        rows = (kernel * columns).sum(-1, keepdim=True).reciprocal()  # (..., n, 1)
    return (rows * kernel * columns).to(logits.dtype)


def centred(gradient: Tensor, matrix: Tensor) -> Tensor:
    """Subtract from the gradient each row's mean by the matrix's weights.

    The last division makes rows sum to one, so that adding one number to a whole row changes
    nothing. Near a permutation that number is nearly all there is, and drowns what does matter.
    """
    return gradient - (gradient * matrix).sum(1, keepdim=True)


def backward(logits: Tensor, gradient: Tensor, iterations: int) -> Tensor:
    """Compute the gradient of the logits, through every iteration."""
    kernel = exponentials(logits)
    history = scalings(kernel, iterations)
    slopes = history.square().neg_()  # of a reciprocal
    columns, rows = history[-2:]
    matrix = rows.unsqueeze(1) * kernel * columns
    gradient = centred(gradient.permute(1, 2, 0), matrix)

    # The output is r K c: gradients of K, of the last r and of the last c.
    total = rows.unsqueeze(1) * gradient * columns
    product = gradient * kernel
    to_rows = (product * columns).sum(1)
    to_columns = (product * rows.unsqueeze(1)).sum(0)

    # Back through r = 1 / (K c), then c = 1 / (K^T r), of every iteration.
    for t in range(2 * iterations - 2, -1, -2):
        to_sums = (to_rows * slopes[t + 1]).unsqueeze(1)  # gradient of K c
        total.addcmul_(to_sums, history[t])
        to_columns = to_columns + torch.mul(kernel, to_sums, out=product).sum(0)
        to_sums = to_columns * slopes[t]  # gradient of K^T r
        if t:
            total.addcmul_(history[t - 1].unsqueeze(1), to_sums)
        else:
            total.add_(to_sums)  # the first r is one
        to_rows = torch.mul(kernel, to_sums, out=product).sum(1)
        to_columns = torch.zeros_like(to_sums)
    total.mul_(kernel).masked_fill_(kernel <= FLOOR, 0)
    return total.permute(2, 0, 1).contiguous()
