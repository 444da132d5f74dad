"""Streams in plain PyTorch: the mathematics is in `operators`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.ops.numerics import full_precision, project_normed, wide
from headwater.ops.sinkhorn import sinkhorn


def streams_of(bias: Tensor) -> int:
    """Return n of n^2 + 2 n logits."""
    return math.isqrt(bias.shape[0] + 1) - 1


def mix_streams(weights: Tensor, x: Tensor) -> Tensor:
    """Return weights (..., m, n) @ x (..., n, D), both fp32 or wider.

    On a GPU this is a batched product, one pass. PyTorch's batched product on a CPU calls a matrix
    product per token, and its compiler does not fuse it: a running sum over the n streams is
    several times faster there.
    """
    if x.is_cuda and not torch.compiler.is_compiling():
        with full_precision(x):
            return weights @ x
    columns = weights.unsqueeze(-1).unbind(-2)  # (..., m, 1)
    streams = x.unsqueeze(-3).unbind(-2)  # (..., 1, D)
    total = columns[0] * streams[0]
    for column, stream in zip(columns[1:], streams[1:], strict=True):
        total = torch.addcmul(total, column, stream)
    return total


def project_streams(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    by_stream = weight.shape[-1] == x.shape[-1]
    return project_normed(x if by_stream else wide(x).flatten(-2), weight, eps)


def gate_logits(
    z: Tensor,
    bias: Tensor,
    scale: Tensor,
    sizes: Sequence[int],
) -> list[Tensor]:
    """Return scale z + bias of each part of z (..., sum of sizes); each part has its own scale."""
    z, dtype = z.split(sizes, -1), z.dtype
    logits = []
    for part, offset, factor in zip(z, bias.split(sizes), scale, strict=True):
        logits.append(factor.to(dtype) * part + offset.to(dtype))
    return logits


def gate_streams(
    z: Tensor, bias: Tensor, scale: Tensor, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    n = streams_of(bias)
    pre, post, res = gate_logits(wide(z), bias, scale, (n, n, n * n))
    mixed = sinkhorn(res.unflatten(-1, (n, n)), iterations, backend="reference")
    return pre.sigmoid(), 2 * post.sigmoid(), mixed


def read_streams(x: Tensor, pre: Tensor) -> Tensor:
    h = mix_streams(pre.unsqueeze(-2), wide(x)).squeeze(-2)
    return h.to(x.dtype)


def write_streams(x: Tensor, y: Tensor, post: Tensor, res: Tensor) -> Tensor:
    mixed = mix_streams(res, wide(x))
    total = torch.addcmul(mixed, post.unsqueeze(-1), wide(y).unsqueeze(-2))
    return total.to(x.dtype)
