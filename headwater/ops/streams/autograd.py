"""The kernels of streams under autograd. Importing this needs triton; `operators` decides when to.

The streams' gradient by a read, pre_j dh, is n times as large as its factors. A projection therefore returns a stand-in
for each factor, a single number expanded to its shape, and the read returns the factors as gradients of those two, and
none for the streams. Both are made and used inside one read of a residual: nobody else can hold a stand-in.
"""

from typing import Any

import torch
from torch import Tensor

from headwater.ops.depth.autograd import apply, first_order
from headwater.ops.depth.score import score

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
        dh, pre = x.new_empty(1), z.new_empty(1)
        return z, x.view_as(x), dh.expand(*x.shape[:-2], x.shape[-1]), pre.expand(x.shape[:-1])

    @staticmethod
    def backward(
        ctx: Any, dz: Tensor | None, dx: Tensor | None, dh: Tensor | None, pre: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        first_order()
        x, weight, z, rstd = ctx.saved_tensors
        if dz is None:  # coefficients are held, or made without it
            return _added(dx, dh, pre), None, None
        if dh is None or pre is None:
            dh, pre = torch.zeros_like(x[..., 0, :]), rstd.new_zeros(x.shape[:-1])
        later = None if dx is None else dx.contiguous()
        whole, dweight = kernel.project_streams_backward(
            x, weight, z, rstd, dz.contiguous(), later, dh.contiguous(), pre.contiguous()
        )
        return whole, dweight, None


def _added(dx: Tensor | None, dh: Tensor | None, pre: Tensor | None) -> Tensor | None:
    if dh is None or pre is None:
        return dx
    read = pre.unsqueeze(-1) * dh.unsqueeze(-2)  # in fp32
    return (read if dx is None else dx + read).to(dh.dtype)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, bias: Tensor, scale: Tensor, iterations: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(z, bias, scale)
        ctx.iterations = iterations
        return gates.gate_streams(z, bias, scale, iterations)

    @staticmethod
    def backward(ctx: Any, dpre: Tensor, dpost: Tensor, dres: Tensor) -> tuple[Tensor | None, ...]:
        first_order()
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
        first_order()
        x, pre = ctx.saved_tensors
        dh = dh.contiguous()
        dpre = kernel.read_streams_backward(x, dh)[0] if ctx.needs_input_grad[1] else None
        return (
            (None, dpre, dh, pre) if ctx.by_factors else (_added(None, dh, pre), dpre, None, None)
        )


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, post: Tensor, res: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, post, res)
        return kernel.write_streams(x, y, post, res)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        first_order()
        return kernel.write_streams_backward(gradient.contiguous(), *ctx.saved_tensors)


def project_streams(
    x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    z, x, dh, pre = apply(_Project, x.contiguous(), weight.float().contiguous(), eps)
    return z, x, (dh, pre)


def gate_streams(
    z: Tensor, bias: Tensor, scale: Tensor, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    return apply(_Gate, z.float().contiguous(), bias.contiguous(), scale.contiguous(), iterations)


def read_streams(x: Tensor, pre: Tensor, factors: tuple[Tensor, Tensor] | None) -> Tensor:
    return apply(_Read, x.contiguous(), pre.float().contiguous(), *(factors or (None, None)))


def write_streams(x: Tensor, y: Tensor, post: Tensor, res: Tensor) -> Tensor:
    coefficients = (post.float().contiguous(), res.float().contiguous())
    return apply(_Write, x.contiguous(), y.contiguous(), *coefficients)
