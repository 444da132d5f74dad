"""SwiGLU's gate, for gate and up that one product has made.

    y = g s u,   s = sigmoid(g);   [g, u] = joined                    joined (..., 2 W), y (..., W)
    du = dy g s;   dg = dy u s (1 + g (1 - s));   djoined = [dg, du]

Shazeer, arXiv 2002.05202. One launch each way, which moves 3 W numbers per token forward and 5 W
backward: both gradients are written where the product's backward takes them. The sigmoid is
computed twice, never kept. fp32, one downcast.
"""

from typing import Any

import torch
from torch import Tensor

from headwater.ops.routing import Backend, refuse_second_derivative, use_triton
from headwater.ops.triton.registration import operator

from . import reference


def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Compute silu(gate) * up.

    Arguments:
        gate: (..., W); or without `up` both side by side, (..., 2 W), which is what the kernel
            takes.
        up: (..., W).
        backend: as in `depth_attention`; separate tensors are multiplied by PyTorch.

    Returns (..., W) in the dtype of gate. Raises ValueError for an odd number of joined channels,
    or a backend that does not run here.

        y = swiglu(x @ torch.cat((gate, up)).T)
    """
    if up is not None:
        if backend == "triton":
            raise ValueError("backend='triton' takes gate and up in one tensor, got two")
        return reference.swiglu(gate, up)
    if gate.shape[-1] % 2:
        raise ValueError(f"swiglu takes gate and up, (..., 2 W), got {tuple(gate.shape)}")
    # One channel is shown, since rows may be wider than those of other operators.
    if use_triton(backend, gate[..., :1]):
        return _SwiGLU.apply(gate)
    return reference.swiglu(*gate.chunk(2, -1))


def _fake(joined: Tensor) -> Tensor:
    *tokens, both = joined.shape
    return joined.new_empty(*tokens, both // 2)


@operator(_fake)
def swiglu_forward(joined: Tensor) -> Tensor:
    from . import kernel

    return kernel.forward(joined.contiguous())


def _fake_backward(joined: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(joined, memory_format=torch.contiguous_format)


@operator(_fake_backward)
def swiglu_backward(joined: Tensor, gradient: Tensor) -> Tensor:
    from . import kernel

    return kernel.backward(joined.contiguous(), gradient.contiguous())


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor) -> Tensor:
        ctx.save_for_backward(joined)
        return swiglu_forward(joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        refuse_second_derivative("swiglu")
        (joined,) = ctx.saved_tensors
        return swiglu_backward(joined, gradient)
