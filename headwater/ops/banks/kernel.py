# mypy: allow-untyped-defs
"""Sums of a bank and their gradients, as operators.

The kernels are those that mix depth attention's sources (`ops.depth.mix`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.ops.depth.mix import launch_mix_given, launch_mix_given_backward
from headwater.ops.triton.launch import launches
from headwater.ops.triton.registration import writer


def _sums(bank, weights):
    ways, source = weights.shape[-2], bank[0]
    return (source.new_empty(ways, *source.shape),)


@writer(_sums, writes=("out",))
def mix_bank(bank: Sequence[Tensor], weights: Tensor, out: Tensor) -> None:
    """Sum N tensors (..., D) by `weights` (..., C, N) or (C, N) in fp32 to `out` (C, ..., D)."""
    launches["mix_bank"] += 1
    launch_mix_given(bank, weights, out)


def _gradient_of_weights(bank, weights, *_):
    tokens = bank[0].shape[:-1]
    return (weights.new_empty(*tokens, *weights.shape[-2:]),)


def _gradients(bank, weights, douts):
    (dweights,) = _gradient_of_weights(bank, weights)
    return dweights, [torch.empty_like(x) for x in bank]


@writer(_gradients, writes=("dweights", "gradients"))
def mix_bank_backward(
    bank: Sequence[Tensor],
    weights: Tensor,
    douts: Sequence[Tensor],
    dweights: Tensor,
    gradients: Sequence[Tensor],
) -> None:
    """Write the gradients of the weights, always by token (..., C, N), and of the bank."""
    launches["mix_bank_backward"] += 1
    launch_mix_given_backward(bank, weights, douts, gradients, dweights, fresh=True)


@writer(_gradient_of_weights, writes=("dweights",), adds_to=("gradients",))
def mix_bank_backward_(
    bank: Sequence[Tensor],
    weights: Tensor,
    douts: Sequence[Tensor],
    gradients: Sequence[Tensor],
    dweights: Tensor,
) -> None:
    """Do as `mix_bank_backward` does, adding into `gradients` in place."""
    launches["mix_bank_backward"] += 1
    launch_mix_given_backward(bank, weights, douts, gradients, dweights, fresh=False)
