"""The kernels under autograd: `score`, `mix`, `open_block`, `merge`.

Importing this needs triton; `routing` decides when to.

Sources are threaded: `score`, `mix` and `open_block` return each source again, and the next read
takes the returned one; queries are threaded too. Gradients then form a chain instead of a sum: a
read's backward receives what later reads have gathered for a source, in the buffer that the later
read's backward made, and adds its own share to it in place.

Adding in place is safe only for a buffer that nobody else holds. Buffers made here carry a mark. A
gradient without the mark is copied (autograd summed two of them, a hook replaced it, it came from
another operator), and so is one that others hold too: a later read took the sum of a source and
something else, or `autograd.grad` is to return it. Assumed: no tensor hook on a threaded source
keeps a gradient and reads it after the backward has gone on.

Under torch.compile there are no marks: every gradient is copied, and inductor drops the copies of
values that nothing else uses, which are nearly all. (The backend "aot_eager" makes them.)
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from headwater._torch import alone
from headwater._torch import apply as apply_with_gradients
from headwater.ops.numerics import rms_norm
from headwater.ops.routing import refuse_second_derivative

from .merge import merge as merge_op
from .merge import merge_backward, norm_backward
from .mix import mix as mix_op
from .mix import mix_backward, mix_backward_
from .score import score as score_op
from .score import score_backward, score_backward_

_MARK = "_headwater_buffer"

Tensors = tuple[Tensor, ...]
Gradients = Sequence[Tensor | None]


class _Forgetful:
    """The context of a forward pass that has no backward."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Run function.apply(*args), or without gradients only its forward.

    The latter spares the host a third of a prompt's reads.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return apply_with_gradients(function, *args)
    return function.forward(_Forgetful(), *args)


def mark_buffer(gradient: Tensor) -> Tensor:
    """Mark a gradient that was made here, so that an earlier read may add to it."""
    if not torch.compiler.is_compiling():
        setattr(gradient, _MARK, True)
    return gradient


def _owned(gradient: Tensor) -> bool:
    """Return whether a gradient may be added to in place."""
    if torch.compiler.is_compiling() or not getattr(gradient, _MARK, False):
        return False
    return gradient.is_contiguous() and alone(gradient)


def _to_add_to(gradient: Tensor) -> Tensor:
    """Return the gradient itself, or a copy if somebody else holds it."""
    if not _owned(gradient):
        return gradient.clone(memory_format=torch.contiguous_format)
    # If a later read took the sum of two sources, both have this one gradient: the first takes it.
    setattr(gradient, _MARK, False)
    return gradient


def gathered(later: Gradients, sources: Sequence[Tensor]) -> list[Tensor] | None:
    """Return buffers to add to, with what later reads have gathered for each source.

    None if no later read has gathered anything.
    """
    if all(g is None for g in later):
        return None
    buffers = []
    for gradient, source in zip(later, sources):
        buffers.append(torch.zeros_like(source) if gradient is None else _to_add_to(gradient))
    return buffers


def filled(gradients: Gradients, like: Tensor) -> list[Tensor]:
    """Return gradients that kernels can read: contiguous, and zeros for those that are None."""
    return [torch.zeros_like(like) if d is None else d.contiguous() for d in gradients]


def vector(name: str, value: Tensor) -> Tensor:
    """Return one vector for all tokens, its numbers side by side: kernels take it by address."""
    if value.dim() != 1:
        shape = tuple(value.shape)
        raise ValueError(f"backend='triton' takes one {name} for all tokens, (D,), got {shape}")
    return value.contiguous()


def optional(name: str, value: Tensor | None) -> Tensor | None:
    return None if value is None else vector(name, value)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        folded: Tensor,
        eps: float,
        start: int,
        sizes: Sequence[int],
    ) -> tuple[Tensor, ...]:
        z, rstd = score_op(source, folded[start:] if start else folded, eps)
        ctx.start = start
        ctx.sizes = sizes
        ctx.save_for_backward(source, folded, z, rstd)
        ctx.set_materialize_grads(False)
        pieces = z.unsqueeze(-2).split(sizes, -1)
        return source.view_as(source), folded.view_as(folded), *pieces

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, df: Tensor | None, *pieces: Tensor | None
    ) -> tuple[Any, ...]:
        refuse_second_derivative("the kernel of score")
        if all(piece is None for piece in pieces):
            return gradient, df, None, None, None
        gradient, df = _score_into(ctx.saved_tensors, ctx.start, ctx.sizes, pieces, gradient, df)
        return gradient, df, None, None, None


def _score_into(
    saved: Sequence[Tensor],
    start: int,
    sizes: Sequence[int],
    pieces: Gradients,
    gradient: Tensor | None,
    df: Tensor | None,
    asked: Gradients = (),
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a source and of all queries.

    Arguments:
        saved: the source, the queries, their scores and the source's 1/rms.
        start, sizes: the scores are for the queries from `start` on, in pieces of these sizes.
        pieces: gradients of these scores, (..., 1, size) each.
        gradient, df: what later reads gathered for the source and the queries; the result includes
            it.
        asked: gradients of the queries after the first, from reads that took them.
    """
    source, folded, z, rstd = saved
    slopes = []
    for piece, size in zip(pieces, sizes):
        slopes.append(z.new_zeros(*z.shape[:-1], 1, size) if piece is None else piece)
    dz = slopes[0].contiguous() if len(slopes) == 1 else torch.cat(slopes, -1)

    df = torch.zeros_like(folded) if df is None else _to_add_to(df)
    queries, share = (folded[start:], df[start:]) if start else (folded, df)
    if any(d is not None for d in asked):
        rows = torch.stack(filled(asked, folded[0]))
        share[1 : 1 + len(asked)].add_(rows)

    if gradient is not None and (torch.compiler.is_compiling() or _owned(gradient)):
        gradient = _to_add_to(gradient)
        (dqueries,) = score_backward_(source, queries, z, rstd, dz, gradient)
    else:
        # A gradient that is not ours is written anew: that costs less than to copy it and add.
        gradient = None if gradient is None else gradient.contiguous()
        gradient, dqueries = score_backward(source, queries, z, rstd, dz, gradient)
    share.add_(dqueries)
    return mark_buffer(gradient), mark_buffer(df)


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
    queries from `start` on, in pieces (..., 1, size), one by default. Since queries are threaded
    too, the scores of all sources add to one buffer of gradients, in place.
    """
    sizes = [len(folded) - start] if sizes is None else sizes
    source, folded, *pieces = apply(_Score, source, folded, eps, start, sizes)
    return source, folded, tuple(pieces)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        # Arguments have no names of their own: without gradients dynamo drops ctx if it counts one
        # argument more than parameters.
        norm_weight, norm_eps, rebuild, exact, thread, count, *tensors = args
        pieces, sources = tensors[:count], tensors[count:]
        x, rstd, out, lse, p = mix_op(sources, pieces, norm_weight, norm_eps, exact)
        normed = norm_weight is not None
        ctx.queries = p.shape[-1]
        ctx.normed = normed
        ctx.norm_eps = norm_eps
        ctx.rebuild = rebuild
        ctx.sizes = [piece.shape[-2] for piece in pieces]
        # A rebuilt read does not keep its first source.
        kept_sources = sources[rebuild:]
        of_norm = (x, rstd, norm_weight) if normed else ()
        ctx.save_for_backward(p, *of_norm, *kept_sources)
        ctx.set_materialize_grads(False)
        outs = (*((x,) if normed else ()), *out.unbind(0))
        again = [source.view_as(source) for source in kept_sources] if thread else []
        return (*outs, *lse.unbind(0), *again)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the kernel of mix")
        nothing = (None,) * 5
        douts, dlses, later = _cut(gradients, ctx.queries, ctx.queries)
        # If nobody used this read, what later reads gathered passes through.
        if ctx.rebuild and douts[0] is None:
            return (None, *nothing, *(None for _ in ctx.sizes), None, *later)
        options = (ctx.normed, ctx.norm_eps, ctx.rebuild)
        dg, dz, dsources = _mix_into(ctx.saved_tensors, *options, douts, dlses, later)
        return (dg, *nothing, *dz.split(ctx.sizes, -2), *dsources)


def _mix_into(
    saved: Sequence[Tensor],
    normed: bool,
    norm_eps: float,
    rebuild: bool,
    douts: Gradients,
    dlses: Gradients,
    later: Gradients,
) -> tuple[Tensor | None, Tensor, list[Tensor]]:
    """Return the gradients of the norm's weight, of the scores, and of the sources.

    The last include what `later` reads gathered. `saved`: the weights; with a norm its output,
    1/rms and weight; the sources.
    """
    p, *saved = saved
    dg, along, sources = None, None, saved[3:] if normed else saved
    if normed and douts[0] is not None:
        x, rstd, norm_weight = saved[:3]
        # As in plain PyTorch, a read by itself takes its shares from dh in fp32.
        exact = len(douts) == 1
        dx = douts[0].contiguous()
        dh, dg, along = norm_backward(dx, x, norm_weight, rstd, norm_eps, exact)
        douts = (dh, *douts[1:])
    # The kernel takes log-sum-exps' gradients from the first on that has one. Nobody sees the
    # log-sum-exp of a rebuilt read.
    asked_dlses: list[Tensor] = []
    if not rebuild:
        used = [n for n, d in enumerate(dlses) if d is not None]
        asked_dlses = filled(dlses[used[0] :], p[..., 0, 0]) if used else []
    whole = along if rebuild else None
    douts = filled(douts, sources[0])
    dz, dsources = _gather_into(sources, p, douts, asked_dlses, later, whole)
    return dg, dz, dsources


def _gather_into(
    sources: Sequence[Tensor],
    p: Tensor,
    douts: Sequence[Tensor],
    dlses: Sequence[Tensor],
    later: Gradients,
    whole: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """Return dz, and for each source its gradient from later reads plus this read's share.

    With `whole`, the first gradient is that of the source that was not kept.
    """
    buffers = gathered(later, sources)
    if buffers is None:
        dz, first, buffers = mix_backward(sources, p, douts, dlses, False, whole)
    else:
        dz, first = mix_backward_(sources, p, douts, dlses, buffers, whole)
    if first is not None:
        buffers = [first, *buffers]
    return dz, [mark_buffer(buffer) for buffer in buffers]


def mix(
    sources: Sequence[Tensor],
    pieces: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    *,
    thread: bool = True,
) -> tuple[Tensors, Tensors, Tensors]:
    """Mix sources by their scores `pieces`: (..., N, S) in fp32, in parts (..., n, S).

    Returns S outputs (..., D), the first normed if a weight is given; S log-sum-exps (...); and the
    sources again. thread=False, for the last read of all: no sources again. Compiled, their
    gradients would be zeros that are written, and then added to.
    """
    queries = pieces[0].shape[-1]
    results = _mix(sources, pieces, norm_weight, norm_eps, thread=thread)
    outs, lses, again = _cut(results, queries, queries)
    return outs, lses, again


def merge_outputs(
    out: Tensor,
    outputs: Sequence[Tensor],
    pieces: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Read phase 1's output beside the span's own outputs, normed if asked.

    Returns the read, and these outputs again. `pieces`: scores (..., 1 + outputs, 1) in parts. If
    the norm can be undone, `out` is not kept for the backward: <dh, h> is the sum of all shares, so
    that its own is what the others leave.
    """
    x, _, *rest = _mix((out, *outputs), pieces, norm_weight, norm_eps, rebuild=True)
    return x, tuple(rest[-len(outputs) :])


def _mix(
    sources: Sequence[Tensor],
    pieces: Sequence[Tensor],
    norm_weight: Tensor | None,
    norm_eps: float,
    *,
    rebuild: bool = False,
    thread: bool = True,
) -> tuple[Tensor, ...]:
    dtype = sources[0].dtype
    weight, exact = _inside(norm_weight, dtype, pieces[0].shape[-1])
    options = (norm_eps, rebuild and weight is not None, exact, thread)
    first, *rest = apply(_Mix, weight, *options, len(pieces), *pieces, *sources)
    return (_outside(first, weight, norm_weight, norm_eps, dtype), *rest)


# fp16 cannot undo a norm (see `_Merge`), which comes outside then; a read by itself reaches it
# unrounded.
def _inside(
    norm_weight: Tensor | None, dtype: torch.dtype, queries: int
) -> tuple[Tensor | None, bool]:
    """Return the weight of a norm that the kernel applies, and whether outputs leave it in fp32."""
    if norm_weight is None or dtype != torch.float16:
        return norm_weight, False
    return None, queries == 1


def _outside(
    first: Tensor,
    inside: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Apply the norm that the kernel did not apply."""
    if inside is norm_weight:
        return first
    return rms_norm(first.float(), norm_weight, eps).to(dtype)


class _Open(torch.autograd.Function):
    """`_Score` of what a block summed to, then `_Mix` for the next block, in one node.

    Eager, each node and each tensor that passes between two takes the host some microseconds.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        # Arguments have no names of their own: see `_Mix`.
        y, partial, folded, norm_weight, *options = args[:11]
        eps, norm_eps, exact, thread, start, sizes, count = options
        pieces_before, sources_before = args[11 : 11 + count], args[11 + count :]
        # The block that ends becomes a source, scored for all blocks to come.
        source = y if partial is None else partial + y
        z, scale = score_op(source, folded[start:] if start else folded, eps)
        block_scores, *later_scores = z.unsqueeze(-2).split(sizes, -1)
        pieces = (*pieces_before, block_scores)
        sources = (*sources_before, source)
        x, rstd, out, lse, p = mix_op(sources, pieces, norm_weight, norm_eps, exact)
        normed = norm_weight is not None
        ctx.normed = normed
        ctx.norm_eps = norm_eps
        ctx.opens = partial is None
        ctx.start = start
        ctx.sizes = sizes
        ctx.shares = [piece.shape[-2] for piece in pieces]
        of_norm = (x, rstd, norm_weight) if normed else ()
        ctx.save_for_backward(folded, z, scale, p, *of_norm, *sources)
        ctx.set_materialize_grads(False)
        outs = (*((x,) if normed else ()), *out.unbind(0))
        if not thread:
            return outs
        block_queries = folded[start + 1 : start + sizes[0]].unbind(0)
        again = [v.view_as(v) for v in (folded, *sources_before)]
        # An operator of autograd may not return its argument itself.
        source_again = y.view_as(y) if partial is None else source
        lses = lse.unbind(0)[1:]
        return (*outs, *lses, *block_queries, *again, source_again, *later_scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the kernel of open_block")
        folded, z, scale, *saved = ctx.saved_tensors
        reads, count = ctx.sizes[0], sum(ctx.shares)
        douts, dlses, dqueries, dthreaded = _cut(gradients, reads, reads - 1, reads - 1)
        df, *later = dthreaded or (None,) * (1 + count)
        options = (ctx.normed, ctx.norm_eps, False)
        # The block's first read has no log-sum-exp.
        dlses = (None, *dlses)
        dg, dz, dsources = _mix_into(saved, *options, douts, dlses, later[:count])
        # The last source is the block: its scores add to its gradient.
        *dpieces, dblock_scores = dz.split(ctx.shares, -2)
        *dsources_before, gradient = dsources
        dscores = (dblock_scores, *later[count:])
        saved_scores = (saved[-1], folded, z, scale)
        gradient, df = _score_into(
            saved_scores, ctx.start, ctx.sizes, dscores, gradient, df, dqueries
        )
        dpartial = None if ctx.opens else gradient
        return gradient, dpartial, df, dg, *[None] * 7, *dpieces, *dsources_before


def _cut(
    tensors: tuple[Any, ...],
    *sizes: int,
) -> list[tuple[Any, ...]]:
    """Cut tensors into parts of these sizes, and the rest."""
    ends = [0, *accumulate(sizes), len(tensors)]
    return [tensors[start:end] for start, end in pairwise(ends)]


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
    """Run the reads of a block over all sources.

    First `y` joins `partial`, the sum of the block before (None: y is it). That sum becomes a
    source: it is scored for the queries of `folded` (R, D) from `start` on, sizes[0] of them this
    block's, and mixed with the other `sources` by `pieces`, their scores for this block, as in
    `mix`.

    Returns outputs as `mix` does; the log-sum-exps and the queries (D,) of the reads after the
    first; the queries and the sources again; and the new source's scores for later blocks,
    (..., 1, size) each. thread=False: only outputs.
    """
    reads = sizes[0]
    weight, exact = _inside(norm_weight, y.dtype, reads)
    options = (eps, norm_eps, exact, thread, start, sizes, len(pieces))
    first, *rest = apply(_Open, y, partial, folded, weight, *options, *pieces, *sources)
    results = (_outside(first, weight, norm_weight, norm_eps, y.dtype), *rest)
    if not thread:
        return results, (), (), folded, (), ()
    parts = _cut(results, reads, reads - 1, reads - 1, 1, len(sources) + 1)
    outs, lses, queries, (folded,), threaded, scores = parts
    return outs, lses, queries, folded, threaded, scores


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        partial: Tensor | None,
        out: Tensor,
        lse: Tensor,
        query: Tensor,
        key_weight: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        norm_eps: float,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        weights = (query, key_weight, norm_weight)
        x, total, stats = merge_op(y, partial, out, lse, *weights, eps, norm_eps)
        if partial is None:
            total = y.view_as(y)
        # Without a norm x gives back only a rounded h, and fp16 has too small a range to undo a
        # norm.
        keep = keep or norm_weight is None or y.dtype == torch.float16
        ctx.opens = partial is None
        ctx.norm_eps = norm_eps
        ctx.save_for_backward(x, total, out if keep else None, lse, *weights, stats)
        ctx.set_materialize_grads(False)
        return x, total

    @staticmethod
    def backward(
        ctx: Any,
        dx: Tensor | None,
        dtotal: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the kernel of merge")
        if dx is None:
            return (dtotal, None if ctx.opens else dtotal, *[None] * 8)
        dtotal = None if dtotal is None else dtotal.contiguous()
        dp, *others = merge_backward(dx.contiguous(), dtotal, *ctx.saved_tensors, ctx.norm_eps)
        return dp, None if ctx.opens else dp, *others, None, None, None


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
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add `y` to the block's sum `partial` (None: y opens it), and merge.

    Returns the read, normed if asked, and the new sum. The backward undoes the norm to find its
    input, whose rounding it then carries; `keep` keeps `out` alive instead.
    """
    partial = None if partial is None else partial.contiguous()
    query = vector("query", query)
    key_weight = optional("key weight", key_weight)
    norm_weight = optional("norm weight", norm_weight)
    tensors = (y.contiguous(), partial, out.contiguous(), lse.contiguous())
    weights = (query, key_weight, norm_weight)
    return apply(_Merge, *tensors, *weights, eps, norm_eps, keep)
