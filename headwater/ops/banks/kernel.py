"""Sums of a bank and their gradients, as operators: the kernels are those that mix depth attention's sources."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.ops.depth.mix import launch_mix_given, launch_mix_given_backward
from headwater.ops.triton.launch import launches
from headwater.ops.triton.registration import writer


def _sums(bank: Sequence[Tensor], weights: Tensor) -> tuple[Tensor]:
    return (bank[0].new_empty(weights.shape[-2], *bank[0].shape),)


@writer(_sums)
def mix_bank(bank: Sequence[Tensor], weights: Tensor, out: Tensor) -> None:
    """N tensors (..., D) and `weights` (..., C, N) or (C, N) in fp32 to `out` (C, ..., D)."""
    launches["mix_bank"] += 1
    launch_mix_given(bank, weights, out)


def _of_weights(bank: Sequence[Tensor], weights: Tensor) -> Tensor:
    return weights.new_empty(*bank[0].shape[:-1], *weights.shape[-2:])


def _gradients(
    bank: Sequence[Tensor], weights: Tensor, douts: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    return _of_weights(bank, weights), [torch.empty_like(x) for x in bank]


@writer(_gradients)
def mix_bank_backward(
    bank: Sequence[Tensor],
    weights: Tensor,
    douts: Sequence[Tensor],
    dweights: Tensor,
    gradients: Sequence[Tensor],
) -> None:
    """The gradients of weights, (..., C, N) by token whichever they are, and of the bank."""
    launches["mix_bank_backward"] += 1
    launch_mix_given_backward(bank, weights, douts, gradients, dweights, fresh=True)


def _gradient_besides(
    bank: Sequence[Tensor], weights: Tensor, douts: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor]:
    return (_of_weights(bank, weights),)


@writer(_gradient_besides, adds_to=("gradients",))
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
