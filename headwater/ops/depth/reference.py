"""Attention over depth in plain PyTorch: what every kernel must equal, and what runs where there is no GPU.

One read of N sources with one query (Attention Residuals, arXiv 2603.15031, eqs. 1 to 4):

    key_n   = source_n / sqrt(mean(source_n ** 2) + eps) * key_weight        (..., D)
    weight  = softmax over n of  <query, key_n>  per head                    (N, ..., H)
    output  = sum_n weight_n * source_n   (raw values), then an RMSNorm if `norm_weight` is given

The query and the key weight fold into one vector, and the key's norm is one scalar, so normed keys are never formed.
A single pass moves N reads and one write of a (tokens x D) tensor.

In two phases (algorithm 1): queries are parameters, so all S queries of a block can read the N finished blocks at once,
and each sublayer then only merges the block's running sum P into what its query already found:

    phase 1:  out_s, lse_s = softmax attention of query s over the N finished blocks         (S, ..., D), (S, ...)
    phase 2:  b = sigmoid(<query_s, key(P)> - lse_s);   h = (1 - b) * out_s + b * P           (..., D)

This equals one softmax over the N + 1 sources. Passes over a (tokens x D) tensor per sublayer: phase 1 N/S reads and
one write, phase 2 two reads and one write. fp32 throughout (fp64 stays fp64), one downcast at return; lse stays fp32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.ops.numerics import accumulation_dtype, full_precision, rms_norm, rms_scale, shares

Tensors = tuple[Tensor, ...]
SMALL = 1024  # numbers in all sums of a token, up to which they are faster source by source


def fold(query: Tensor, key_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The vector that a source's direction is multiplied with: query times key weight, in `dtype`."""
    return query.to(dtype) if key_weight is None else query.to(dtype) * key_weight.to(dtype)


def stack_wide(sources: Sequence[Tensor]) -> Tensor:
    """N sources (..., D) as one tensor (N, ..., D) in the dtype that sums are computed in."""
    return torch.stack([source.to(accumulation_dtype(source.dtype)) for source in sources])


def depth_logits(
    stack: Tensor,
    query: Tensor,
    key_weight: Tensor | None,
    *,
    eps: float,
    heads: int = 1,
    key_norm: bool = True,
) -> Tensor:
    """The logits of a read, <query, key_n> per head, in the dtype of the stack.

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
        logits = (stack * folded).unflatten(-1, (heads, -1)).sum(-1)  # (N, ..., H)
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
    """The weights of a read, (N, ..., H): softmax over N, or sigmoid, of the logits of keys, which are the last so many
    channels of a source in `stack` (N, ..., D) as `query` has."""
    width = query.shape[-1]
    keys = (
        stack if width == stack.shape[-1] else stack[..., -width:]
    )  # a slice's gradient is padded with zeros
    logits = depth_logits(keys, query, key_weight, eps=eps, heads=heads, key_norm=key_norm)
    return logits.softmax(0) if softmax else logits.sigmoid()


def mix_sources(stack: Tensor, weights: Tensor) -> Tensor:
    """Returns sum_n weights_n * stack_n, (..., D), of a `stack` (N, ..., D); weights (N, ..., H) are spread over H
    equal groups of channels."""
    heads = weights.shape[-1]
    if heads == 1:
        return (stack * weights).sum(0)
    return (stack.unflatten(-1, (heads, -1)) * weights.unsqueeze(-1)).sum(0).flatten(-2)


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    heads: int = 1,
) -> tuple[Tensor, Tensor]:
    """One read (..., D) in the sources' dtype, and its weights (N, ..., H) in fp32."""
    stack = stack_wide(sources)
    weights = depth_weights(stack, query, key_weight, eps=eps, heads=heads)
    mixed = mix_sources(stack, weights)
    if norm_weight is not None:
        mixed = rms_norm(mixed, norm_weight, eps)
    return mixed.to(sources[0].dtype), weights


def attend_blocks(
    sources: Sequence[Tensor], queries: Tensor, key_weights: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Phase 1 of queries (S, D): outputs (S, ..., D) and log-sum-exps (S, ...)."""
    stack = stack_wide(sources)
    folded = fold(queries, key_weights, stack.dtype)
    with full_precision(stack):
        logits = ((stack @ folded.T) * rms_scale(stack, eps)).movedim(-1, 0)  # (S, N, ...)
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
    """Phase 2: the block's sum `partial` merged into phase 1's `out`, normed if asked, (..., D)."""
    dtype = accumulation_dtype(partial.dtype)
    p, o = partial.to(dtype), out.to(dtype)
    folded = fold(query, key_weight, dtype)
    with full_precision(p):
        logit = (p @ folded).unsqueeze(-1) * rms_scale(p, eps)  # (..., 1)
    rest, share = shares(logit - lse.to(dtype).unsqueeze(-1))
    merged = rest * o + share * p  # not o + b (p - o): p may be far smaller than o
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
    """The source and the fp32 queries `folded` (R, D), to be read in their place; and the source's logits for the
    queries from `start` on, in pieces (..., 1, size), one by default."""
    v, queries = source.to(accumulation_dtype(source.dtype)), folded[start:]
    with full_precision(v):
        z = (v @ queries.to(v.dtype).T) * rms_scale(v, eps)
    return (
        source,
        folded,
        z.unsqueeze(-2).split([len(queries)] if sizes is None else list(sizes), -1),
    )


def mix(
    sources: Sequence[Tensor],
    pieces: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    *,
    thread: bool = True,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """S outputs (..., D), the first normed if a weight is given; S log-sum-exps (...); and, to `thread` them, the
    sources again.

    `pieces`: scores (..., N, S) in fp32, in parts (..., n, S).
    """
    z = torch.cat(tuple(pieces), -2)
    mixed = _mixed(z.softmax(-2), [source.to(z.dtype) for source in sources])
    if norm_weight is not None:
        mixed = (rms_norm(mixed[0], norm_weight, norm_eps), *mixed[1:])
    return (
        tuple(out.to(sources[0].dtype) for out in mixed),
        z.logsumexp(-2).unbind(-1),
        tuple(sources) if thread else (),
    )


def _mixed(weights: Tensor, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """S sums (..., D) of N sources, by weights (..., N, S): source by source where there is one, or they are small,
    which moves S sums N times; else as a matrix product for each token, which a CPU without MKL calls one by one."""
    if weights.shape[-1] * sources[0].shape[-1] > SMALL and weights.shape[-1] > 1:
        with full_precision(weights):
            return (weights.mT @ torch.stack(list(sources), -2)).unbind(-2)
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
    """`score` of the block that `y` ends, then `mix` for the next one's sizes[0] reads: outputs; of the reads after the
    first log-sum-exps and queries; the queries and, to `thread` them, the sources again; scores for later blocks."""
    source, folded, scores = score(
        y if partial is None else partial + y, folded, eps, start=start, sizes=sizes
    )
    outs, lses, again = mix(
        (*sources, source), (*pieces, scores[0]), norm_weight, norm_eps, thread=thread
    )
    return outs, lses[1:], folded[start + 1 : start + sizes[0]].unbind(0), folded, again, scores[1:]


def merge_outputs(
    out: Tensor,
    own: Sequence[Tensor],
    pieces: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The read of phase 1's output beside the span's own outputs, by scores (..., 1 + own, 1), and those again."""
    return mix((out, *own), pieces, norm_weight, norm_eps)[0][0], tuple(own)


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
    read = merge_partial(total, query, out, lse, key_weight, None, eps)
    if norm_weight is not None:
        read = rms_norm(read.to(accumulation_dtype(read.dtype)), norm_weight, norm_eps).to(
            read.dtype
        )
    return read, total
