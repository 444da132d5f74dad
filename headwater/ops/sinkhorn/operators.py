"""Sinkhorn's iteration on small matrices: divide columns, then rows, by their sums, over and over.

    K = exp(logits), each column less its largest logit;   r = 1
    repeat:   c = 1 / (K^T r);   r = 1 / (K c)
    output  = diag(r) K diag(c)                                              (..., n, n)

mHC, arXiv 2512.24880, eq. 9. There is one matrix per token. The iteration is kept as two vectors,
so it never forms a matrix. The backward recomputes them and walks back through every iteration (not
through the fixed point, which finitely many have not reached): in all, gradients cost the logits
and nothing else between forward and backward. It is one node for torch.compile, whose code would
grow with the iterations; on a GPU, for up to four rows, one launch each way. fp32 (fp64 stays
fp64).
"""

from typing import Any

import torch
from torch import Tensor

from headwater._torch import transformed
from headwater.ops.numerics import wide
from headwater.ops.routing import Backend, refuse_second_derivative, use_triton
from headwater.ops.triton.registration import operator

from . import reference

MAX_SIZE = 4  # rows of a matrix that a thread of the kernel holds whole


def _fake(logits: Tensor, iterations: int, triton: bool) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@operator(_fake)
def sinkhorn_forward(logits: Tensor, iterations: int, triton: bool) -> Tensor:
    if triton:
        from . import kernel

        return kernel.forward(logits.contiguous(), iterations)
    return reference.forward(logits, iterations)


def _fake_backward(logits: Tensor, gradient: Tensor, iterations: int, triton: bool) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@operator(_fake_backward)
def sinkhorn_backward(logits: Tensor, gradient: Tensor, iterations: int, triton: bool) -> Tensor:
    if triton:
        from . import kernel

        return kernel.backward(logits.contiguous(), gradient.contiguous(), iterations)
    return reference.backward(logits, gradient, iterations)


def _keep(
    ctx: Any,
    inputs: tuple[Tensor, int, bool],
    output: Tensor,
) -> None:
    logits, ctx.iterations, ctx.triton = inputs
    ctx.save_for_backward(logits)


class _Sinkhorn(torch.autograd.Function):
    # A `setup_context` would make a call 100 us longer.
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = sinkhorn_forward(*inputs)
        _keep(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative("sinkhorn")
        (logits,) = ctx.saved_tensors
        return sinkhorn_backward(logits, gradient, ctx.iterations, ctx.triton), None, None


sinkhorn_forward.differentiate(_Sinkhorn.backward, _keep)


def sinkhorn(logits: Tensor, iterations: int, *, backend: Backend = "auto") -> Tensor:
    """Make doubly stochastic matrices by Sinkhorn's iteration on exp(logits).

    Arguments:
        logits: (..., n, n).
        iterations: of a normalisation of columns, then of rows.
        backend: auto (the kernel where one runs, n up to 4), reference, or triton, which raises if
            it cannot run.

    Returns (..., n, n) in fp32 (fp64 for fp64), differentiable through every iteration. Rows sum to
    one exactly, columns up to convergence. Raises ValueError for matrices that are not square, no
    iteration, or a backend that does not run here.
    """
    shape = tuple(logits.shape)
    if len(shape) < 2 or shape[-1] != shape[-2] or iterations < 1:
        raise ValueError(
            "sinkhorn takes square matrices (..., n, n) and at least one iteration, got "
            f"{shape} and {iterations}"
        )
    matrices = wide(logits)
    fits = shape[-1] <= MAX_SIZE
    if backend == "triton" and not fits:
        raise ValueError(f"backend='triton' takes matrices of up to {MAX_SIZE} rows, got {shape}")
    triton = fits and use_triton(backend, matrices)
    # A graph of ONNX has the divisions, since ONNX knows no operator of this name.
    if transformed() or (torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()):
        return reference.by_division(matrices, iterations)
    flat = matrices.reshape(-1, *shape[-2:])
    return _Sinkhorn.apply(flat, iterations, triton).view(shape)
