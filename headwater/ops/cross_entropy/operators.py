"""The output head and its loss together, a chunk of tokens at a time.

    logits = x W^T  in the dtype of x                                                     x (M, D)
    loss_m = logsumexp(logits_m) - logits_m[target_m]  in fp32
    dlogits = (softmax(logits) - onehot(target)) / M
    dx = dlogits W;   dW = sum over chunks of dlogits^T x, in fp32

Logits of all tokens never exist at once. The mean's gradient depends on what follows it only by one
factor, so the forward pass makes it as it goes: three products per chunk, none twice, and between
forward and backward only dx and dW are kept. A chunk is as many tokens as make logits of about
128 MiB.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headwater.ops.numerics import full_precision
from headwater.ops.routing import Backend, refuse_second_derivative, use_triton

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
    """Compute the mean cross entropy of `x @ weight.T` without all logits in memory at once.

    Arguments:
        x: (..., D), what the output head sees, in the dtype that the logits are computed in; under
            autocast that is autocast's, as of a linear layer, unless it is fp64.
        weight: (V, D), the head's weight; rounded to the dtype of x for the products, its gradient
            stays as exact as itself.
        targets: (...), the index of the right token, 0 to V - 1.
        chunk: tokens at once; by default as many as make logits of 128 MiB.
        backend: as in `depth_attention`.

    Returns a scalar in fp32, differentiable once in x and weight. Raises ValueError for shapes that
    do not fit.

        loss = linear_cross_entropy(hidden, model.head.weight, tokens[:, 1:])
    """
    rows, flat = _rows(x, weight, targets)
    size = chunk or _chunk(rows, weight)
    return _LinearCrossEntropy.apply(rows, weight, flat, size, use_triton(backend, rows))


def token_losses(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the cross entropy of each token, (...) in fp32, in chunks and without gradients.

    Arguments as in `linear_cross_entropy`. This is for evaluation.
    """
    weight = weight.detach()
    rows, flat = _rows(x.detach(), weight, targets)
    size = chunk or _chunk(rows, weight)
    triton = use_triton(backend, rows)
    low = weight.to(rows.dtype)
    losses = []
    with full_precision(rows):
        for part in _parts(len(rows), size):
            logits = rows[part] @ low.T
            losses.append(_losses(logits, flat[part], None, triton))
    return torch.cat(losses).view(targets.shape)


def _rows(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as (M, D) in the dtype of the products, and targets as (M,).

    The check is needed: the kernel reads a target for each row by address.
    """
    widths_agree = weight.dim() == 2 and x.shape[-1] == weight.shape[1]
    if not widths_agree or x.shape[:-1] != targets.shape or not targets.numel():
        shapes = f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}"
        raise ValueError(
            "cross entropy takes x (..., D), weight (V, D) and targets (...) of at least one "
            f"token; got {shapes}"
        )
    kind = x.device.type
    if kind != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    return x.flatten(0, -2).contiguous(), targets.flatten().contiguous()


def _chunk(rows: Tensor, weight: Tensor) -> int:
    """Return the tokens of equal chunks, a multiple of 128, which the products like."""
    largest = max(128, CHUNK_BYTES // (len(weight) * rows.element_size()))
    count = -(-len(rows) // largest)
    return -(-len(rows) // count // 128) * 128


def _parts(length: int, chunk: int) -> Iterator[slice]:
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))


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
        low = weight.to(x.dtype)
        mean = 1.0 / len(x)
        scale = dx = dw = None
        if any(ctx.needs_input_grad[:2]):
            scale = mean
            dx = torch.empty_like(x)
            dw = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        with full_precision(x):
            for part in _parts(len(x), chunk):
                logits = x[part] @ low.T  # (C, V)
                total += _losses(logits, targets[part], scale, triton).sum()
                # From here on `logits` holds their gradient.
                if dx is not None and dw is not None:
                    torch.mm(logits, low, out=dx[part])
                    dw += logits.T @ x[part]
        ctx.save_for_backward(dx, dw)
        ctx.dtype = weight.dtype
        return total * mean

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_cross_entropy")
        dx, dw = ctx.saved_tensors
        return dx * gradient.to(dx.dtype), (dw * gradient).to(ctx.dtype), None, None, None
