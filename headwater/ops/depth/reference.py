"""Attention over depth in plain PyTorch: what every kernel must equal, and what runs without a GPU.

One read of N sources with one query (Attention Residuals, arXiv 2603.15031, eqs. 1 to 4):

    key_n   = source_n / sqrt(mean(source_n ** 2) + eps) * key_weight        (..., D)
    weight  = softmax over n of  <query, key_n>  per head                    (N, ..., H)
    output  = sum_n weight_n * source_n   (raw values), then an RMSNorm if `norm_weight` is given

The query and the key weight fold into one vector, and the key's norm is one scalar, so normed keys
are never formed. A single pass moves N reads and one write of a (tokens x D) tensor.

In two phases (algorithm 1): queries are parameters, so all S queries of a block can read the N
finished blocks at once, and each sublayer then only merges the block's running sum P into what its
query has read:

    phase 1:  out_s, lse_s = softmax attention of query s over the N blocks  (S, ..., D), (S, ...)
    phase 2:  b = sigmoid(<query_s, key(P)> - lse_s);   h = (1 - b) * out_s + b * P     (..., D)

This equals one softmax over the N + 1 sources. Passes over a (tokens x D) tensor per sublayer:
phase 1 N/S reads and one write, phase 2 two reads and one write. fp32 throughout (fp64 stays fp64),
one downcast at return; lse stays fp32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.ops.numerics import (
    full_precision,
    rms_norm,
    rms_scale,
    shares,
    wide,
)

Tensors = tuple[Tensor, ...]
SMALL = 1024  # numbers in all sums of a token, up to which they are faster source by source


def fold(query: Tensor, key_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the query times the key weight, in `dtype`: its product with a source is the logit."""
    folded = query.to(dtype)
    return folded if key_weight is None else folded * key_weight.to(dtype)


def stack_wide(sources: Sequence[Tensor]) -> Tensor:
    """Stack N sources (..., D) to (N, ..., D) in the dtype that sums are computed in."""
    return torch.stack([wide(source) for source in sources])


def depth_logits(
    stack: Tensor,
    query: Tensor,
    key_weight: Tensor | None,
    *,
    eps: float,
    heads: int = 1,
    key_norm: bool = True,
) -> Tensor:
    """Compute the logits of a read, <query, key_n> per head, in the dtype of the stack.

    Arguments:
        stack: sources (N, ..., D), in fp32 if they are to be exact.
        query: (D,), or one per token, (..., D).
        key_weight: (D,), a gain on the keys, or None.
        eps: of the keys' norm, RMSNorm(v_n); key_norm=False leaves that out.
        heads: H, equal groups of channels, each with logits of its own.

    Returns (N, ..., H).
    """
    folded = fold(query, key_weight, stack.dtype)
    if heads == 1 and folded.dim() == 1:
        with full_precision(stack):
            logits = (stack @ folded).unsqueeze(-1)  # (N, ..., 1)
    else:
        by_head = (stack * folded).unflatten(-1, (heads, -1))
        logits = by_head.sum(-1)  # (N, ..., H)
    if key_norm:
        logits = logits * rms_scale(stack, eps)
    return logits


def depth_weights(
    stack: Tensor,
    query: Tensor,
    key_weight: Tensor | None,
    *,
    eps: float,
    heads: int = 1,
    softmax: bool = True,
    key_norm: bool = True,
) -> Tensor:
    """Compute the weights of a read, (N, ..., H): softmax over N, or sigmoid, of the logits.

    Keys are the last channels of a source in `stack` (N, ..., D), as many as `query` has.
    """
    width = query.shape[-1]
    # A slice's gradient is padded with zeros, so a whole stack is not sliced.
    keys = stack if width == stack.shape[-1] else stack[..., -width:]
    logits = depth_logits(keys, query, key_weight, eps=eps, heads=heads, key_norm=key_norm)
    return logits.softmax(0) if softmax else logits.sigmoid()


def mix_sources(stack: Tensor, weights: Tensor) -> Tensor:
    """Return sum_n weights_n * stack_n, (..., D), of a `stack` (N, ..., D).

    The `weights` (N, ..., H) are spread over H equal groups of channels.
    """
    heads = weights.shape[-1]
    if heads == 1:
        return (stack * weights).sum(0)
    by_head = stack.unflatten(-1, (heads, -1))
    return (by_head * weights.unsqueeze(-1)).sum(0).flatten(-2)


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    heads: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return one read (..., D) in the sources' dtype, and its weights (N, ..., H) in fp32."""
    stack = stack_wide(sources)
    weights = depth_weights(stack, query, key_weight, eps=eps, heads=heads)
    mixed = mix_sources(stack, weights)
    if norm_weight is not None:
        mixed = rms_norm(mixed, norm_weight, eps)
    return mixed.to(sources[0].dtype), weights


def attend_blocks(
    sources: Sequence[Tensor], queries: Tensor, key_weights: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Run phase 1 of queries (S, D): outputs (S, ..., D) and log-sum-exps (S, ...)."""
    stack = stack_wide(sources)
    folded = fold(queries, key_weights, stack.dtype)
    with full_precision(stack):
        logits = (stack @ folded.T) * rms_scale(stack, eps)
        logits = logits.movedim(-1, 0)  # (S, N, ...)
        out = torch.einsum("sn...,n...d->s...d", logits.softmax(1), stack)
    return out.to(sources[0].dtype), logits.logsumexp(1)


def merge_partial(
    partial: Tensor,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """Run phase 2: merge the block's sum `partial` into phase 1's `out`, and norm if asked.

    Returns (..., D).
    """
    p = wide(partial)
    o = out.to(p.dtype)
    folded = fold(query, key_weight, p.dtype)
    with full_precision(p):
        logit = (p @ folded).unsqueeze(-1) * rms_scale(p, eps)  # (..., 1)
    rest, share = shares(logit - lse.to(p.dtype).unsqueeze(-1))
    # Not o + b (p - o): p may be far smaller than o.
    merged = rest * o + share * p
    if norm_weight is not None:
        merged = rms_norm(merged, norm_weight, eps)
    return merged.to(partial.dtype)


def score(
    source: Tensor,
    folded: Tensor,
    eps: float,
    *,
    start: int = 0,
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Score a source (..., D) for the fp32 queries `folded` (R, D).

    Returns the source and the queries, to be read in their place; and the source's logits for the
    queries from `start` on, in pieces (..., 1, size), one by default.
    """
    v = wide(source)
    queries = folded[start:].to(v.dtype)
    with full_precision(v):
        z = (v @ queries.T) * rms_scale(v, eps)
    sizes = [len(queries)] if sizes is None else list(sizes)
    return source, folded, z.unsqueeze(-2).split(sizes, -1)


def mix(
    sources: Sequence[Tensor],
    pieces: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    *,
    thread: bool = True,
) -> tuple[Tensors, Tensors, Tensors]:
    """Mix sources by their scores `pieces`: (..., N, S) in fp32, in parts (..., n, S).

    Returns S outputs (..., D), the first normed if a weight is given; S log-sum-exps (...); and, to
    `thread` them, the sources again.
    """
    z = torch.cat(tuple(pieces), -2)
    values = [source.to(z.dtype) for source in sources]
    mixed = _mixed(z.softmax(-2), values)
    if norm_weight is not None:
        mixed = (rms_norm(mixed[0], norm_weight, norm_eps), *mixed[1:])
    outs = tuple(out.to(sources[0].dtype) for out in mixed)
    again = tuple(sources) if thread else ()
    return outs, z.logsumexp(-2).unbind(-1), again


def _mixed(weights: Tensor, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return S sums (..., D) of N sources, by weights (..., N, S).

    One sum, or small ones, run source by source, which moves the sums N times. Others are a matrix
    product for each token, which a CPU without MKL calls one by one.
    """
    sums = weights.shape[-1]
    if sums > 1 and sums * sources[0].shape[-1] > SMALL:
        with full_precision(weights):
            stack = torch.stack(list(sources), -2)
            return (weights.mT @ stack).unbind(-2)
    first, *later = weights.unsqueeze(-1).unbind(-3)  # (..., S, 1) each
    total = first * sources[0].unsqueeze(-2)
    for weight, source in zip(later, sources[1:], strict=True):
        total = torch.addcmul(total, weight, source.unsqueeze(-2))
    return total.unbind(-2)


def open_block(
    y: Tensor,
    partial: Tensor | None,
    folded: Tensor,
    sources: Sequence[Tensor],
    pieces: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    *,
    eps: float,
    start: int,
    sizes: Sequence[int],
    thread: bool = True,
) -> tuple[Tensors, Tensors, Tensors, Tensor, Tensors, Tensors]:
    """`score` the block that `y` ends, then `mix` for the next block's sizes[0] reads.

    Returns outputs; the log-sum-exps and queries of the reads after the first; the queries and, to
    `thread` them, the sources again; scores for later blocks.
    """
    block = y if partial is None else partial + y
    source, folded, (block_scores, *later_scores) = score(
        block, folded, eps, start=start, sizes=sizes
    )
    outs, lses, again = mix(
        (*sources, source), (*pieces, block_scores), norm_weight, norm_eps, thread=thread
    )
    queries = folded[start + 1 : start + sizes[0]].unbind(0)
    return outs, lses[1:], queries, folded, again, tuple(later_scores)


def merge_outputs(
    out: Tensor,
    outputs: Sequence[Tensor],
    pieces: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Read phase 1's output beside the span's own outputs, by scores (..., 1 + outputs, 1).

    Returns the read, and these outputs again.
    """
    (read,), _, _ = mix((out, *outputs), pieces, norm_weight, norm_eps)
    return read, tuple(outputs)


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
    """Add `y` to the block's sum `partial` (None: y opens it), and merge.

    Returns the read, normed if asked, and the new sum.
    """
    total = y if partial is None else partial + y
    read = merge_partial(total, query, out, lse, key_weight, None, eps)
    if norm_weight is not None:
        read = rms_norm(wide(read), norm_weight, norm_eps).to(read.dtype)
    return read, total
