"""The kernels of streams under autograd. Importing this needs triton; `operators` decides when to.

A read gives the streams a gradient pre_j dh, which is n times as large as its two factors. A
projection therefore returns a stand-in for each factor, a single number expanded to its shape. The
read returns the factors as gradients of those two, and none for the streams. Stand-ins are made and
used inside one read of a residual: nobody else can hold one.
"""

from typing import Any

import torch
from torch import Tensor

from headwater.ops.depth.autograd import apply
from headwater.ops.depth.score import score
from headwater.ops.routing import refuse_second_derivative

from . import gates, kernel
from .kernel import by_row


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z, rstd = score(by_row(x, weight), weight, eps)
        ctx.save_for_backward(x, weight, z, rstd)
        ctx.set_materialize_grads(False)
        *tokens, streams, width = x.shape
        dh = x.new_empty(1).expand(*tokens, width)
        pre = z.new_empty(1).expand(*tokens, streams)
        return z, x.view_as(x), dh, pre

    @staticmethod
    def backward(
        ctx: Any,
        dz: Tensor | None,
        dx: Tensor | None,
        dh: Tensor | None,
        pre: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        refuse_second_derivative("project_streams")
        x, weight, z, rstd = ctx.saved_tensors
        # Coefficients may be held, or made without z.
        if dz is None:
            return _add_read(dx, dh, pre), None, None
        if dh is None or pre is None:
            dh = torch.zeros_like(x[..., 0, :])
            pre = rstd.new_zeros(x.shape[:-1])
        later = None if dx is None else dx.contiguous()
        factors = (dh.contiguous(), pre.contiguous())
        whole, dweight = kernel.project_streams_backward(
            x, weight, z, rstd, dz.contiguous(), later, *factors
        )
        return whole, dweight, None


def _add_read(
    dx: Tensor | None,
    dh: Tensor | None,
    pre: Tensor | None,
) -> Tensor | None:
    """Add pre_j dh, if there is a read, to the streams' gradient dx."""
    if dh is None or pre is None:
        return dx
    total = pre.unsqueeze(-1) * dh.unsqueeze(-2)  # in fp32
    if dx is not None:
        total = dx + total
    return total.to(dh.dtype)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, bias: Tensor, scale: Tensor, iterations: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(z, bias, scale)
        ctx.iterations = iterations
        return gates.gate_streams(z, bias, scale, iterations)

    @staticmethod
    def backward(
        ctx: Any,
        dpre: Tensor,
        dpost: Tensor,
        dres: Tensor,
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("gate_streams")
        gradients = (dpre.contiguous(), dpost.contiguous(), dres.contiguous())
        return *gates.gate_streams_backward(*ctx.saved_tensors, *gradients, ctx.iterations), None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pre: Tensor, dh: Tensor | None, factor: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, pre)
        ctx.by_factors = dh is not None
        return kernel.read_streams(x, pre)[0]

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("read_streams")
        x, pre = ctx.saved_tensors
        dh = dh.contiguous()
        dpre = kernel.read_streams_backward(x, dh)[0] if ctx.needs_input_grad[1] else None
        if ctx.by_factors:
            return None, dpre, dh, pre
        return _add_read(None, dh, pre), dpre, None, None


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        post: Tensor,
        res: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, y, post, res)
        return kernel.write_streams(x, y, post, res)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        refuse_second_derivative("write_streams")
        return kernel.write_streams_backward(gradient.contiguous(), *ctx.saved_tensors)


def project_streams(
    x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    weight = weight.float().contiguous()
    z, x, dh, pre = apply(_Project, x.contiguous(), weight, eps)
    return z, x, (dh, pre)


def gate_streams(
    z: Tensor, bias: Tensor, scale: Tensor, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = (z.float().contiguous(), bias.contiguous(), scale.contiguous())
    return apply(_Gate, *tensors, iterations)


def read_streams(
    x: Tensor,
    pre: Tensor,
    factors: tuple[Tensor, Tensor] | None,
) -> Tensor:
    dh, factor = factors or (None, None)
    pre = pre.float().contiguous()
    return apply(_Read, x.contiguous(), pre, dh, factor)


def write_streams(x: Tensor, y: Tensor, post: Tensor, res: Tensor) -> Tensor:
    coefficients = (post.float().contiguous(), res.float().contiguous())
    return apply(_Write, x.contiguous(), y.contiguous(), *coefficients)
