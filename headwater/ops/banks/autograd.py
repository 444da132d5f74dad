"""The kernels of banks under autograd. Importing this needs triton; `operators` decides when to.

Sources are threaded, and gradients added to in place, as in `ops.depth.autograd`, which says when
that is safe.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.ops.depth.autograd import apply, filled, gathered, mark_buffer
from headwater.ops.routing import refuse_second_derivative

from . import kernel


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        # Arguments have no names of their own: see `_Mix` of depth.
        weights, thread, *bank = args
        (out,) = kernel.mix_bank(bank, weights)
        ctx.save_for_backward(weights, *bank)
        ctx.set_materialize_grads(False)
        again = [x.view_as(x) for x in bank] if thread else []
        return (*out.unbind(0), *again)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("mix_bank")
        weights, *bank = ctx.saved_tensors
        ways = weights.shape[-2]
        douts, later = gradients[:ways], gradients[ways:]
        # If nobody used this read, what later reads gathered passes through.
        if all(d is None for d in douts):
            return None, None, *(later or [None] * len(bank))
        along = filled(douts, bank[0])
        buffers = gathered(later, bank)
        if buffers is None:
            dweights, buffers = kernel.mix_bank_backward(bank, weights, along)
        else:
            (dweights,) = kernel.mix_bank_backward_(bank, weights, along, buffers)
        # Weights for all tokens: the kernel leaves their gradients by token.
        if weights.dim() == 2:
            dweights = dweights.view(-1, *weights.shape).sum(0)
        return dweights, None, *map(mark_buffer, buffers)


def mix_bank(
    bank: Sequence[Tensor], weights: Tensor, thread: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    ways = weights.shape[-2]
    sources = [x.contiguous() for x in bank]
    results = apply(_Mix, weights.float().contiguous(), thread, *sources)
    return results[:ways], results[ways:] or tuple(bank)
