"""The parts of a decoding step, one token of each of B rows: unchecked, without gradients.

`reference` has them in plain PyTorch. The kernels run where the tensors are on a GPU, and a CUDA
graph can record them.
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
    """Project what a sublayer reads.

        h = x, or with `merge` (1 - b) out + b x, b = sigmoid(<folded, x> / rms(x) - lse)
        n = h / rms(h) * weight
        y = [W_1 n, W_2 n, ...], or gated silu(W_1 n) * (W_2 n);   y += add

    Arguments:
        x: (B, D), the stream, or the running sum of a block.
        weights: up to three, (N_i, D) each, none divided or with a bias.
        norm: the reader's; None takes x as it is.
        merge: only with a norm.
        add: (B, N), only with one weight; may be `out`.
        out: (B, N) to write to; None allocates it.
        backend: as in `headwater.depth_attention`.

    Returns (B, N), N the sum of the N_i, or N_1 if gated.
    """
    if not use_triton(backend, x, *weights):
        y = reference.project(x, weights, norm, merge, add, gated)
        return y if out is None else out.copy_(y)
    from . import projection as kernel

    if out is None:
        channels = len(weights[0]) if gated else sum(map(len, weights))
        out = x.new_empty(len(x), channels)
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
    """Attend with a new token of each row to itself and the tokens before; write it to the cache.

    Arguments:
        q, k, v: (B, H, d), (B, KV, d), (B, KV, e); rows may be strided.
        keys, values: (B, room, KV, d) and (B, room, KV, e), contiguous; the new token is written at
            its row's place. Values may be the first e channels of the keys.
        lengths: (B,) int64, the tokens that a row has so far, fewer than room.
        rotary: tables (positions, d / 2) of cosines and sines, to turn q and k by.
        norms: of queries and of keys, each over d, applied before the rotation.
        window: look only at this many last tokens.
        scale: of the logits; None takes d ** -0.5.

    Returns (B, H * e).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not use_triton(backend, q, k, v, keys, values):
        return reference.attend(q, k, v, keys, values, lengths, rotary, norms, window, scale)
    from . import attention as kernel

    y = q.new_empty(len(q), q.shape[1] * values.shape[-1])
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

    Arguments:
        sources: (N, B, D), contiguous.
        folded: (S, D), queries times the key norm's weight.
        eps: of that norm.
        outs, lses: (S, B, D) and (S, B) in fp32, to write reads and log-sum-exps to; rows of lses
            may be strided.
        backend: as in `headwater.depth_attention`.
    """
    if not use_triton(backend, sources, outs):
        read, lse = reference.open_span(sources, folded, eps)
        outs.copy_(read)
        lses.copy_(lse)
        return
    from . import span as kernel

    kernel.open_span(sources, folded, eps, outs, lses)


def take(
    weight: Tensor,
    tokens: Tensor,
    out: Tensor,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Write the rows of weight (V, D) that tokens (B,) int64 name to out (B, D), and return it."""
    if not use_triton(backend, weight):
        return torch.index_select(weight, 0, tokens, out=out)
    from . import token as kernel

    kernel.take(weight, tokens, out)
    return out


def likeliest(logits: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Find the largest of each row of logits (B, V), contiguous: places (B,) int64.

    Of equals it is the first; -1 where one of the logits is NaN.
    """
    if not use_triton(backend, logits[:, :1]):  # rows may be wider than those of other operators
        return reference.likeliest(logits)
    from . import token as kernel

    tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    kernel.likeliest(logits, tokens)
    return tokens


def exponentials(
    seeds: Tensor,
    step: Tensor,
    count: int,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Draw from the exponential distribution, the same on every device but for a last bit.

    Arguments:
        seeds: (B,) int64, one for each row.
        step: (1,) int64, below 2 ** 31; at another step the same seeds have other numbers.
        count: numbers for each row.
        backend: as in `headwater.depth_attention`.

    Returns (B, count) in fp32, above zero; one in 2 ** 25 is infinite.
    """
    noise = torch.empty(len(seeds), count, device=seeds.device)
    if not use_triton(backend, noise[:, :1]):
        return reference.exponentials(seeds, step, count)
    from . import token as kernel

    kernel.exponentials(seeds, step, noise)
    return noise
