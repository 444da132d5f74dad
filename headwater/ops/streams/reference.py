"""Streams in plain PyTorch: the mathematics is in `operators`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.ops.numerics import full_precision, project_normed, wide
from headwater.ops.sinkhorn import sinkhorn


def streams_of(bias: Tensor) -> int:
    """n of n^2 + 2 n logits."""
    return math.isqrt(bias.shape[0] + 1) - 1


def mix_streams(weights: Tensor, x: Tensor) -> Tensor:
    """weights (..., m, n) @ x (..., n, D), both fp32 or wider.

    On a GPU a batched product, one pass. PyTorch's batched product on a CPU calls a matrix product a token, and its
    compiler does not fuse it: a running sum over the n streams is several times faster there.
    """
    if x.is_cuda and not torch.compiler.is_compiling():
        with full_precision(x):
            return weights @ x
    columns, streams = (
        weights.unsqueeze(-1).unbind(-2),
        x.unsqueeze(-3).unbind(-2),
    )  # (..., m, 1), (..., 1, D)
    total = columns[0] * streams[0]
    for column, stream in zip(columns[1:], streams[1:], strict=True):
        total = torch.addcmul(total, column, stream)
    return total


def project_streams(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return project_normed(
        x if weight.shape[-1] == x.shape[-1] else wide(x).flatten(-2), weight, eps
    )


def gate_logits(z: Tensor, bias: Tensor, scale: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """scale z + bias of each part of z (..., sum of sizes), with a number of `scale` for each."""
    parts = zip(z.split(sizes, -1), bias.split(sizes), scale, strict=True)
    return [factor.to(part.dtype) * part + offset.to(part.dtype) for part, offset, factor in parts]


def gate_streams(
    z: Tensor, bias: Tensor, scale: Tensor, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    n = streams_of(bias)
    pre, post, res = gate_logits(wide(z), bias, scale, (n, n, n * n))
    mixed = sinkhorn(res.unflatten(-1, (n, n)), iterations, backend="reference")
    return pre.sigmoid(), 2 * post.sigmoid(), mixed


def read_streams(x: Tensor, pre: Tensor) -> Tensor:
    return mix_streams(pre.unsqueeze(-2), wide(x)).squeeze(-2).to(x.dtype)


def write_streams(x: Tensor, y: Tensor, post: Tensor, res: Tensor) -> Tensor:
    mixed = mix_streams(res, wide(x))
    return torch.addcmul(mixed, post.unsqueeze(-1), wide(y).unsqueeze(-2)).to(x.dtype)
