"""The parts of a decoding step, one token of each of B rows, for inference alone: no gradients, nothing is checked.

`reference` has them in plain PyTorch; the kernels, which a CUDA graph can record, run where the tensors are on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.ops.routing import Backend, use_triton

from . import reference
from .reading import Merge, Norm


def project(
    x: Tensor,
    weights: Sequence[Tensor],
    *,
    norm: Norm | None = None,
    merge: Merge | None = None,
    add: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Linear maps of what a sublayer reads.

        h = x, or with `merge` (1 - b) out + b x, b = sigmoid(<folded, x> / rms(x) - lse);   n = h / rms(h) * weight
        y = [W_1 n, W_2 n, ...], or gated silu(W_1 n) * (W_2 n);   y += add

    Arguments:
        x: (B, D), the stream, or the running sum of a block.
        weights: up to three, (N_i, D) each, none divided or with a bias.
        norm: the reader's; None takes x as it is.
        merge: with a norm alone.
        add: (B, N), with one weight alone; may be `out`.
        out: (B, N) to write to, else it is made.
        backend: as in `headwater.depth_attention`.

    Returns (B, N), N the sum of the N_i, or N_1 if gated.
    """
    if not use_triton(backend, x, *weights):
        y = reference.project(x, weights, norm, merge, add, gated)
        return y if out is None else out.copy_(y)
    from . import projection as kernel

    if out is None:
        out = x.new_empty(len(x), len(weights[0]) if gated else sum(map(len, weights)))
    kernel.project(x, weights, norm, merge, add, gated, out)
    return out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Norm, Norm] | None = None,
    window: int | None = None,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attention of a new token of each row over those before it and itself, which is written to the cache.

    Arguments:
        q, k, v: (B, H, d), (B, KV, d), (B, KV, e); rows may be strided.
        keys, values: (B, room, KV, d) and (B, room, KV, e), contiguous; the new token is written at its row's place.
            Values may be the first e channels of the keys.
        lengths: (B,) int64, the tokens that a row has so far, fewer than room.
        rotary: tables (positions, d / 2) of cosines and sines, to turn q and k by.
        norms: of queries and of keys, each over d, applied before the rotation.
        window: look at the last so many tokens alone.
        scale: of the logits; d ** -0.5 unless told.

    Returns (B, H * e).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not use_triton(backend, q, k, v, keys, values):
        return reference.attend(q, k, v, keys, values, lengths, rotary, norms, window, scale)
    from . import attention as kernel

    y = torch.empty(len(q), q.shape[1] * values.shape[-1], dtype=q.dtype, device=q.device)
    kernel.attend(q, k, v, keys, values, lengths, rotary, norms, window, scale, y)
    return y


def open_span(
    sources: Tensor,
    folded: Tensor,
    eps: float,
    outs: Tensor,
    lses: Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Phase 1 of Block Attention Residuals: each of S queries reads all sources.

    Arguments: sources (N, B, D), contiguous; folded (S, D), queries times the key norm's weight; eps of that norm;
    outs (S, B, D) and lses (S, B), fp32, to write to: what is read, and the log-sum-exps. Rows of lses may be strided.
    """
    if not use_triton(backend, sources, outs):
        read, lse = reference.open_span(sources, folded, eps)
        outs.copy_(read)
        lses.copy_(lse)
        return
    from . import span as kernel

    kernel.open_span(sources, folded, eps, outs, lses)


def take(weight: Tensor, tokens: Tensor, out: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Rows of weight (V, D) by tokens (B,) int64, into out (B, D), which is returned."""
    if not use_triton(backend, weight):
        return torch.index_select(weight, 0, tokens, out=out)
    from . import token as kernel

    kernel.take(weight, tokens, out)
    return out


def likeliest(logits: Tensor, *, backend: Backend = "auto") -> Tensor:
    """The largest of each row of logits (B, V), contiguous: places (B,) int64, of equals the first; -1 where one of the
    logits is NaN."""
    if not use_triton(backend, logits[:, :1]):  # rows may be wider than those of other operators
        return reference.likeliest(logits)
    from . import token as kernel

    tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    kernel.likeliest(logits, tokens)
    return tokens


def exponentials(seeds: Tensor, step: Tensor, count: int, *, backend: Backend = "auto") -> Tensor:
    """Random numbers of the exponential distribution, the same on every device but for the logarithm's last bit.

    Arguments: seeds (B,) int64, one for each row; step (1,) int64, below 2 ** 31, the same seeds have other numbers at
    another; count, how many for a row. Returns (B, count) in fp32, above zero, one in 2 ** 25 infinite.
    """
    noise = torch.empty(len(seeds), count, device=seeds.device)
    if not use_triton(backend, noise[:, :1]):
        return reference.exponentials(seeds, step, count)
    from . import token as kernel

    kernel.exponentials(seeds, step, noise)
    return noise
