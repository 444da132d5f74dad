"""Block Attention Residuals in two phases (arXiv 2603.15031, algorithm 1).

Queries are parameters, so all S queries of a block can read the N finished blocks at once, and each sublayer then only
merges the block's running sum P into what its query already found:

    phase 1:  out_s, lse_s = softmax attention of query s over the N finished blocks         (S, ..., D), (S, ...)
    phase 2:  b = sigmoid(<query_s, key(P)> - lse_s);   h = out_s + b * (P - out_s)           (..., D)

This equals one softmax over the N + 1 sources. fp32 throughout, one downcast at return; lse stays fp32.
Passes over a (tokens x D) tensor per sublayer: phase 1 N/S reads and one write, phase 2 two reads and one write.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .depth_attention import accumulation_dtype, check_sources, full_precision, rms_norm
from .routing import Backend, use_triton


def attend_blocks(
    sources: Sequence[Tensor],
    queries: Tensor,
    key_weights: Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Phase 1. `sources`: N of (..., D); `queries`, `key_weights`: (S, D). Returns (S, ..., D) and lse (S, ...)."""
    check_sources(sources, queries, heads=1)
    if use_triton(backend, *sources):
        from . import fused

        return fused.attend_blocks(sources, queries, key_weights, eps)
    dtype = accumulation_dtype(sources[0].dtype)
    stack = torch.stack([source.to(dtype) for source in sources])  # (N, ..., D)
    folded = queries.to(dtype) if key_weights is None else queries.to(dtype) * key_weights.to(dtype)
    scale = torch.rsqrt(stack.square().mean(-1, keepdim=True) + eps)  # (N, ..., 1)
    with full_precision(stack):
        logits = ((stack @ folded.T) * scale).movedim(-1, 0)  # (S, N, ...)
        out = torch.einsum("sn...,n...d->s...d", logits.softmax(1), stack)
    return out.to(sources[0].dtype), logits.logsumexp(1)


def merge_partial(
    partial: Tensor,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    key_weight: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> Tensor:
    """Phase 2. `partial`, `out`: (..., D); `lse`: (...); `query`: (D,). Returns the read, normed if asked: (..., D)."""
    check_sources((partial, out), query, heads=1, key_weight=key_weight, norm_weight=norm_weight)
    if use_triton(backend, partial, out):
        from . import fused

        return fused.merge(partial, None, out, lse, query, key_weight, norm_weight, eps=eps, norm_eps=eps, keep=True)[0]
    dtype = accumulation_dtype(partial.dtype)
    p, o = partial.to(dtype), out.to(dtype)
    folded = query.to(dtype) if key_weight is None else query.to(dtype) * key_weight.to(dtype)
    with full_precision(p):
        logit = (p @ folded) * torch.rsqrt(p.square().mean(-1) + eps)  # (...)
    share = torch.sigmoid(logit - lse.to(dtype)).unsqueeze(-1)
    merged = o + share * (p - o)
    if norm_weight is not None:
        merged = rms_norm(merged, norm_weight, eps)
    return merged.to(partial.dtype)


def score(source: Tensor, folded: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The source, to be read in its place, and its logits (..., Q) for the fp32 queries `folded` (Q, D)."""
    v = source.to(accumulation_dtype(source.dtype))
    with full_precision(v):
        return source, (v @ folded.to(v.dtype).T) * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)


def mix(
    sources: Sequence[Tensor], z: Tensor, norm_weight: Tensor | None = None, norm_eps: float = 1e-6
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """S outputs (..., D), the first normed if a weight is given; S log-sum-exps (...); and the sources again.

    `z`: scores (..., N, S) in fp32.
    """
    stack = torch.stack([source.to(z.dtype) for source in sources], -2)  # (..., N, D)
    with full_precision(stack):
        mixed = (z.softmax(-2).mT @ stack).unbind(-2)  # S of (..., D)
    if norm_weight is not None:
        mixed = (rms_norm(mixed[0], norm_weight, norm_eps), *mixed[1:])
    return tuple(out.to(sources[0].dtype) for out in mixed), z.logsumexp(-2).unbind(-1), tuple(sources)


def merge_outputs(
    out: Tensor, own: Sequence[Tensor], z: Tensor, norm_weight: Tensor | None = None, norm_eps: float = 1e-6
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The read of phase 1's output beside the span's own outputs (scores `z`, (..., 1 + own, 1)), and those again."""
    return mix((out, *own), z, norm_weight, norm_eps)[0][0], tuple(own)


def merge(
    y: Tensor,
    partial: Tensor | None,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key_weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The read after `y` joined the block's sum `partial` (None: y opens it), normed if asked, and that sum."""
    total = y if partial is None else partial + y
    read = merge_partial(total, query, out, lse, key_weight, eps=eps, backend="reference")
    if norm_weight is not None:
        read = rms_norm(read.to(accumulation_dtype(read.dtype)), norm_weight, norm_eps).to(read.dtype)
    return read, total
