"""Sinkhorn's iteration on small matrices, one per token: alternating division of columns and rows by their sums.

    K = exp(logits), each column less its largest logit;   r = 1
    repeat:   c = 1 / (K^T r);   r = 1 / (K c)
    output  = diag(r) K diag(c)                                              (..., n, n)

mHC, arXiv 2512.24880, eq. 9. Kept as two vectors, so an iteration never forms a matrix. The backward recomputes them
and walks back through every iteration (not through the fixed point, which finitely many have not reached): in all,
gradients cost the logits and nothing else between forward and backward. One node for torch.compile, whose code would
grow with the iterations; on a GPU one launch forward and two backward. fp32 (fp64 stays fp64).
"""

from typing import Any

import torch
from torch import Tensor

from .depth_attention import accumulation_dtype
from .operator import operator
from .routing import Backend, use_triton

FLOOR = 1e-18  # exp(-41): a logit further below its column's largest counts as this far
MAX_SIZE = 16  # a program of the kernel holds whole matrices


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


def _fake(logits: Tensor, iterations: int, triton: bool) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@operator(_fake)
def sinkhorn_forward(logits: Tensor, iterations: int, triton: bool) -> Tensor:
    if triton:
        from .kernels.sinkhorn import forward

        return forward(logits.contiguous(), iterations)
    kernel = exponentials(logits)
    columns, rows = scalings(kernel, iterations)[-2:]
    return (rows.unsqueeze(1) * kernel * columns).permute(2, 0, 1).contiguous()


def _fake_backward(logits: Tensor, gradient: Tensor, iterations: int, triton: bool) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@operator(_fake_backward)
def sinkhorn_backward(logits: Tensor, gradient: Tensor, iterations: int, triton: bool) -> Tensor:
    if triton:
        from .kernels.sinkhorn import backward

        return backward(logits.contiguous(), gradient.contiguous(), iterations)
    kernel = exponentials(logits)
    history = scalings(kernel, iterations)
    slopes = history.square().neg_()  # of a reciprocal
    columns, rows = history[-2:]
    gradient = gradient.permute(1, 2, 0)
    total = rows.unsqueeze(1) * gradient * columns  # gradient of K
    product = gradient * kernel
    to_rows, to_columns = (product * columns).sum(1), (product * rows.unsqueeze(1)).sum(0)
    for t in range(2 * iterations - 2, -1, -2):
        to_sums = (to_rows * slopes[t + 1]).unsqueeze(1)  # gradient of K c, then below of K^T r
        total.addcmul_(to_sums, history[t])
        to_columns = to_columns + torch.mul(kernel, to_sums, out=product).sum(0)
        to_sums = to_columns * slopes[t]
        total.addcmul_(history[t - 1].unsqueeze(1), to_sums) if t else total.add_(to_sums)  # r starts at one
        to_rows, to_columns = torch.mul(kernel, to_sums, out=product).sum(1), torch.zeros_like(to_sums)
    total.mul_(kernel).masked_fill_(kernel <= FLOOR, 0)
    return total.permute(2, 0, 1).contiguous()


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, triton: bool) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.iterations, ctx.triton = iterations, triton
        return sinkhorn_forward(logits, iterations, triton)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # create_graph: what follows would count as a constant, without a word
            raise RuntimeError("sinkhorn has no second derivatives: take its gradients without create_graph")
        (logits,) = ctx.saved_tensors
        return sinkhorn_backward(logits, gradient, ctx.iterations, ctx.triton), None, None


def sinkhorn(logits: Tensor, iterations: int, *, backend: Backend = "auto") -> Tensor:
    """logits (..., n, n). Rows of the result sum to one exactly, columns up to convergence."""
    if logits.dim() < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"sinkhorn takes square matrices (..., n, n), got {tuple(logits.shape)}")
    if iterations < 1:
        raise ValueError(f"sinkhorn's iterations must be at least 1, got {iterations}")
    wide = logits.to(accumulation_dtype(logits.dtype))
    fits = logits.shape[-1] <= MAX_SIZE
    if backend == "triton" and not fits:
        raise ValueError(f"backend='triton' takes matrices of up to {MAX_SIZE} rows, got {tuple(logits.shape)}")
    triton = fits and use_triton(backend, wide)
    return _Sinkhorn.apply(wide.reshape(-1, *wide.shape[-2:]), iterations, triton).view(logits.shape)
