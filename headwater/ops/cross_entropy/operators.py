"""The output head and its loss together, a chunk of tokens at a time: logits of all tokens never exist at once.

    logits = x W^T  in the dtype of x;   loss_m = logsumexp(logits_m) - logits_m[target_m]  in fp32         x (M, D)
    dlogits = (softmax(logits) - onehot(target)) / M;   dx = dlogits W;   dW = sum over chunks of dlogits^T x, in fp32

The mean's gradient does not depend on what follows it but for one factor, so the forward pass makes it as it goes:
three products a chunk, none twice, and between forward and backward only dx and dW are kept. A chunk is as many tokens
as make logits of about 128 MiB.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headwater.ops.numerics import full_precision
from headwater.ops.routing import Backend, use_triton

from . import reference

CHUNK_BYTES = 128 * 2**20


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The mean cross entropy of `x @ weight.T`, without the logits of all tokens in memory at once.

    Arguments:
        x: (..., D), what the output head sees, in the dtype that the logits are computed in; under autocast that is
            autocast's, as of a linear layer, unless it is fp64.
        weight: (V, D), the head's weight; rounded to the dtype of x for the products, its gradient stays as exact as
            itself.
        targets: (...), the index of the right token, 0 to V - 1.
        chunk: tokens at once; by default as many as make logits of 128 MiB.
        backend: as in `depth_attention`.

    Returns a scalar in fp32, differentiable once in x and weight. Raises ValueError for shapes that do not fit.

        loss = linear_cross_entropy(hidden, model.head.weight, tokens[:, 1:])
    """
    rows, flat = _rows(x, weight, targets)
    options = (chunk or _chunk(rows, weight), use_triton(backend, rows))
    return _LinearCrossEntropy.apply(rows, weight, flat, *options)


def token_losses(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The cross entropy of each token, (...) in fp32, in chunks and without gradients: for evaluation.

    Arguments as in `linear_cross_entropy`.
    """
    rows, flat = _rows(x.detach(), weight.detach(), targets)
    size, triton = chunk or _chunk(rows, weight), use_triton(backend, rows)
    low = weight.detach().to(rows.dtype)
    with full_precision(rows):
        losses = [
            _losses(rows[part] @ low.T, flat[part], None, triton)
            for part in _parts(len(rows), size)
        ]
    return torch.cat(losses).view(targets.shape)


def _rows(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if (
        weight.dim() != 2
        or x.shape[-1] != weight.shape[1]
        or x.shape[:-1] != targets.shape
        or not targets.numel()
    ):
        raise ValueError(
            "cross entropy takes x (..., D), weight (V, D) and targets (...) of at least one token; got "
            f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}"
        )
    kind = x.device.type
    if kind != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    return x.flatten(0, -2).contiguous(), targets.flatten().contiguous()


def _chunk(rows: Tensor, weight: Tensor) -> int:
    """Equal chunks, each a multiple of 128 tokens, which the products like."""
    largest = max(128, CHUNK_BYTES // (len(weight) * rows.element_size()))
    count = -(-len(rows) // largest)
    return -(-len(rows) // count // 128) * 128


def _parts(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))


def _losses(logits: Tensor, targets: Tensor, scale: float | None, triton: bool) -> Tensor:
    if triton:
        from . import kernel

        return kernel.cross_entropy_(logits, targets, scale)
    return reference.cross_entropy_(logits, targets, scale)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, triton: bool
    ) -> Tensor:
        low, scale = weight.to(x.dtype), 1.0 / len(x)
        differentiated = any(ctx.needs_input_grad[:2])
        dx = torch.empty_like(x) if differentiated else None
        dw = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
            if differentiated
            else None
        )
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        with full_precision(x):
            for part in _parts(len(x), chunk):
                logits = x[part] @ low.T  # (C, V)
                total += _losses(
                    logits, targets[part], scale if differentiated else None, triton
                ).sum()
                if dx is not None and dw is not None:
                    torch.mm(logits, low, out=dx[part])
                    dw += logits.T @ x[part]
        ctx.save_for_backward(dx, dw)
        ctx.dtype = weight.dtype
        return total * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy has no second derivative: take the logits and F.cross_entropy"
            )
        dx, dw = ctx.saved_tensors
        return dx * gradient.to(dx.dtype), (dw * gradient).to(ctx.dtype), None, None, None
