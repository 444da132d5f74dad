"""The kernels of banks under autograd. Importing this needs triton; `operators` decides when to.

Sources are threaded, and gradients added to in place, as in `ops.depth.autograd`, which says when that is safe.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.ops.depth.autograd import apply, first_order, gathered, mark_buffer

from . import kernel


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        weights, thread, *bank = args  # not one name each: see `_Mix` of depth
        (out,) = kernel.mix_bank(bank, weights)
        ctx.save_for_backward(weights, *bank)
        ctx.set_materialize_grads(False)
        return (*out.unbind(0), *(x.view_as(x) for x in bank if thread))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        first_order()
        weights, *bank = ctx.saved_tensors
        ways = weights.shape[-2]
        douts, later = gradients[:ways], gradients[ways:]
        if all(d is None for d in douts):  # this read was not used
            return None, None, *(later or [None] * len(bank))
        filled = [torch.zeros_like(bank[0]) if d is None else d.contiguous() for d in douts]
        buffers = gathered(later, bank)
        if buffers is None:
            dweights, buffers = kernel.mix_bank_backward(bank, weights, filled)
        else:
            (dweights,) = kernel.mix_bank_backward_(bank, weights, filled, buffers)
        if weights.dim() == 2:
            dweights = dweights.view(-1, *weights.shape).sum(0)
        return dweights, None, *map(mark_buffer, buffers)


def mix_bank(
    bank: Sequence[Tensor], weights: Tensor, thread: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    ways = weights.shape[-2]
    results = apply(_Mix, weights.float().contiguous(), thread, *(x.contiguous() for x in bank))
    return results[:ways], results[ways:] or tuple(bank)
