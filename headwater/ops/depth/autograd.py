"""The kernels under autograd: `score`, `mix`, `open_block`, `merge`. Importing this needs triton; `routing` decides
when to.

Sources are threaded: `score`, `mix` and `open_block` return each source again, and the next read takes the returned
one; queries are threaded too. Gradients then form a chain instead of a sum: a read's backward receives what later reads
have gathered for a source, in the buffer that the later read's backward made, and adds its own share to it in place.

Adding in place is safe only for a buffer that nobody else holds. Buffers made here carry a mark, and a gradient without
the mark (autograd summed two of them, a hook replaced it, it came from another operator) is copied, and so is one that
others have too: a later read took the sum of a source and something else, `autograd.grad` is to return it. Assumed: no
tensor hook on a threaded source keeps a gradient and reads it after the backward has gone on.
Under torch.compile there are no marks: every gradient is copied, and inductor drops the copies of values that nothing
else uses, which are nearly all. (The backend "aot_eager" makes them.)
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from headwater._torch import alone
from headwater._torch import apply as apply_with_gradients
from headwater.ops.numerics import rms_norm

from .merge import merge as merge_op
from .merge import merge_backward, norm_backward
from .mix import mix as mix_op
from .mix import mix_backward, mix_backward_
from .score import score as score_op
from .score import score_backward, score_backward_

_MARK = "_headwater_buffer"

Tensors = tuple[Tensor, ...]


class _Forgetful:
    """The context of a forward pass that has no backward."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """function.apply(*args); without gradients its forward alone, which spares the host a third of a prompt's reads."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return apply_with_gradients(function, *args)
    return function.forward(_Forgetful(), *args)


def mark_buffer(gradient: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        setattr(gradient, _MARK, True)
    return gradient


def _owned(gradient: Tensor) -> bool:
    if torch.compiler.is_compiling() or not getattr(gradient, _MARK, False):
        return False
    return gradient.is_contiguous() and alone(gradient)


def _to_add_to(gradient: Tensor) -> Tensor:
    if not _owned(gradient):
        return gradient.clone(memory_format=torch.contiguous_format)
    setattr(
        gradient, _MARK, False
    )  # it may be another source's of this read, where a later one took the sum of both
    return gradient


def gathered(later: Sequence[Tensor | None], sources: Sequence[Tensor]) -> list[Tensor] | None:
    """Buffers to add to, of what later reads have gathered for each source; None where they have for none."""
    if all(g is None for g in later):
        return None
    return [torch.zeros_like(v) if g is None else _to_add_to(g) for g, v in zip(later, sources)]


def first_order() -> None:
    """Raise where a backward is to be differentiated: the kernels would leave the second derivative out in silence."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "the kernels have no second derivative: pass backend='reference' for create_graph=True"
        )


def vector(name: str, value: Tensor) -> Tensor:
    """Kernels take queries and weights by address: one vector for all tokens, its numbers side by side."""
    if value.dim() != 1:
        raise ValueError(
            f"backend='triton' takes one {name} for all tokens, (D,), got {tuple(value.shape)}"
        )
    return value.contiguous()


def optional(name: str, value: Tensor | None) -> Tensor | None:
    return None if value is None else vector(name, value)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source: Tensor, folded: Tensor, eps: float, start: int, sizes: Sequence[int]
    ) -> tuple[Tensor, ...]:
        z, rstd = score_op(source, folded[start:] if start else folded, eps)
        ctx.start, ctx.sizes = start, sizes
        ctx.save_for_backward(source, folded, z, rstd)
        ctx.set_materialize_grads(False)
        return (source.view_as(source), folded.view_as(folded), *z.unsqueeze(-2).split(sizes, -1))

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, df: Tensor | None, *pieces: Tensor | None
    ) -> tuple[Any, ...]:
        first_order()
        if all(piece is None for piece in pieces):
            return gradient, df, None, None, None
        source, folded, z, rstd = ctx.saved_tensors
        gradient, df = _score_into(
            source, folded, z, rstd, ctx.start, ctx.sizes, pieces, gradient, df
        )
        return gradient, df, None, None, None


def _score_into(
    source: Tensor,
    folded: Tensor,
    z: Tensor,
    rstd: Tensor,
    start: int,
    sizes: Sequence[int],
    pieces: Sequence[Tensor | None],
    gradient: Tensor | None,
    df: Tensor | None,
    asked: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Tensor]:
    """The gradients of a source and of all queries, what later reads gathered for them in `gradient` and `df` included.

    `pieces`: those of the scores for the queries from `start` on, (..., 1, size) each; `asked`: those of the queries
    after that one, from reads that took them.
    """
    filled = [z.new_zeros(*z.shape[:-1], 1, n) if d is None else d for d, n in zip(pieces, sizes)]
    dz = filled[0].contiguous() if len(filled) == 1 else torch.cat(filled, -1)
    df = torch.zeros_like(folded) if df is None else _to_add_to(df)
    queries, share = (folded[start:], df[start:]) if start else (folded, df)
    if any(d is not None for d in asked):
        rows = [folded.new_zeros(folded.shape[1:]) if d is None else d for d in asked]
        share[1 : 1 + len(asked)].add_(torch.stack(rows))
    if gradient is not None and (torch.compiler.is_compiling() or _owned(gradient)):
        gradient = _to_add_to(gradient)
        (dqueries,) = score_backward_(source, queries, z, rstd, dz, gradient)
    else:  # none, or one that is not ours: written anew, which is less than to copy it and add
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
    """The source and the fp32 queries `folded` (R, D), to be read in their place; and the source's logits for the
    queries from `start` on, in pieces (..., 1, size), one by default.

    Queries are threaded too: the scores of all sources add to one buffer of gradients, in place.
    """
    sizes = [len(folded) - start] if sizes is None else sizes
    source, folded, *pieces = apply(_Score, source, folded, eps, start, sizes)
    return source, folded, tuple(pieces)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        # Not one name each: without gradients dynamo drops ctx where it counts one argument more than parameters.
        norm_weight, norm_eps, rebuild, exact, thread, count, *tensors = args
        pieces, sources = tensors[:count], tensors[count:]
        x, rstd, out, lse, p = mix_op(sources, pieces, norm_weight, norm_eps, exact)
        normed = norm_weight is not None
        ctx.queries, ctx.normed, ctx.norm_eps, ctx.rebuild = p.shape[-1], normed, norm_eps, rebuild
        ctx.sizes = [piece.shape[-2] for piece in pieces]
        ctx.save_for_backward(p, *((x, rstd, norm_weight) if normed else ()), *sources[rebuild:])
        ctx.set_materialize_grads(False)
        outs = ((x,) if normed else ()) + out.unbind(0)
        again = (source.view_as(source) for source in sources[rebuild:]) if thread else ()
        return (*outs, *lse.unbind(0), *again)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        first_order()
        queries, nothing = ctx.queries, (None,) * 5
        douts, dlses, later = (
            gradients[:queries],
            gradients[queries : 2 * queries],
            gradients[2 * queries :],
        )
        if ctx.rebuild and douts[0] is None:  # this read was not used
            return (None, *nothing, *(None for _ in ctx.sizes), None, *later)
        dg, dz, dsources = _mix_into(
            ctx.saved_tensors, ctx.normed, ctx.norm_eps, ctx.rebuild, douts, dlses, later
        )
        return (dg, *nothing, *dz.split(ctx.sizes, -2), *dsources)


def _mix_into(
    saved: Sequence[Tensor],
    normed: bool,
    norm_eps: float,
    rebuild: bool,
    douts: Sequence[Tensor | None],
    dlses: Sequence[Tensor | None],
    later: Sequence[Tensor | None],
) -> tuple[Tensor | None, Tensor, list[Tensor]]:
    """The gradients of the norm's weight, of the scores, and of the sources, what later reads gathered included, from
    what a read over them saved: its weights, with a norm its output, 1/rms and weight, and the sources."""
    p, *saved = saved
    dg, along, sources = None, None, saved[3:] if normed else saved
    if normed and douts[0] is not None:
        x, rstd, norm_weight = saved[:3]
        exact = (
            len(douts) == 1
        )  # as plain PyTorch: a read by itself takes its shares from dh in fp32
        dh, dg, along = norm_backward(douts[0].contiguous(), x, norm_weight, rstd, norm_eps, exact)
        douts = (dh, *douts[1:])
    filled = [torch.zeros_like(sources[0]) if d is None else d.contiguous() for d in douts]
    asked_dlses: list[Tensor] = []
    if not rebuild:  # no one sees that of a rebuilt read
        first = next((n for n, d in enumerate(dlses) if d is not None), len(dlses))
        asked_dlses = [
            p.new_zeros(p.shape[:-2]) if d is None else d.contiguous() for d in dlses[first:]
        ]
    return dg, *_gather_into(sources, p, filled, asked_dlses, later, along if rebuild else None)


def _gather_into(
    sources: Sequence[Tensor],
    p: Tensor,
    douts: Sequence[Tensor],
    dlses: Sequence[Tensor],
    later: Sequence[Tensor | None],
    whole: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """dz, and for each source its gradient from later reads plus this one's share; with `whole`, first that of the
    source that was not kept."""
    buffers = gathered(later, sources)
    if buffers is None:
        dz, first, buffers = mix_backward(sources, p, douts, dlses, False, whole)
    else:
        dz, first = mix_backward_(sources, p, douts, dlses, buffers, whole)
    return dz, [mark_buffer(g) for g in (buffers if first is None else [first, *buffers])]


def mix(
    sources: Sequence[Tensor],
    pieces: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    *,
    thread: bool = True,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """S outputs (..., D), the first normed if a weight is given; S log-sum-exps (...); and the sources again.

    `pieces`: scores (..., N, S) in fp32, in parts (..., n, S). thread=False, for the last read of all: no sources
    again. Compiled, their gradients would be zeros that are written, and then added to.
    """
    queries = pieces[0].shape[-1]
    results = _mix(sources, pieces, norm_weight, norm_eps, thread=thread)
    return results[:queries], results[queries : 2 * queries], results[2 * queries :]


def merge_outputs(
    out: Tensor,
    own: Sequence[Tensor],
    pieces: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The read of phase 1's output beside the span's own outputs, normed if asked, and those outputs again.

    `pieces`: scores (..., 1 + own, 1) in parts. Where the norm can be undone, `out` is not kept for the backward:
    <dh, h> is the sum of all shares, so that its own is what the others leave.
    """
    x, _, *rest = _mix((out, *own), pieces, norm_weight, norm_eps, rebuild=True)
    return x, tuple(rest[-len(own) :])


def _mix(
    sources: Sequence[Tensor],
    pieces: Sequence[Tensor],
    norm_weight: Tensor | None,
    norm_eps: float,
    *,
    rebuild: bool = False,
    thread: bool = True,
) -> tuple[Tensor, ...]:
    weight, exact = _inside(norm_weight, sources[0].dtype, pieces[0].shape[-1])
    options = (norm_eps, rebuild and weight is not None, exact, thread)
    first, *rest = apply(_Mix, weight, *options, len(pieces), *pieces, *sources)
    return (_outside(first, weight, norm_weight, norm_eps, sources[0].dtype), *rest)


# fp16 cannot undo a norm (see `_Merge`), which comes outside then; a read by itself reaches it unrounded.
def _inside(
    norm_weight: Tensor | None, dtype: torch.dtype, queries: int
) -> tuple[Tensor | None, bool]:
    """The weight of a norm that the kernel applies, and whether outputs are to leave it in fp32."""
    if norm_weight is None or dtype != torch.float16:
        return norm_weight, False
    return None, queries == 1


def _outside(
    first: Tensor, inside: Tensor | None, norm_weight: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    if inside is norm_weight:
        return first
    return rms_norm(first.float(), norm_weight, eps).to(dtype)


class _Open(torch.autograd.Function):
    """`_Score` of what a block summed to, then `_Mix` for the next block, in one node: eager, each node and each tensor
    that passes between two takes the host some microseconds."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        (
            y,
            partial,
            folded,
            norm_weight,
            eps,
            norm_eps,
            exact,
            thread,
            start,
            sizes,
            count,
            *tensors,
        ) = args  # see _Mix
        source = y if partial is None else partial + y
        z, scale = score_op(source, folded[start:] if start else folded, eps)
        block_scores, *later_scores = z.unsqueeze(-2).split(sizes, -1)
        pieces, sources = (*tensors[:count], block_scores), (*tensors[count:], source)
        x, rstd, out, lse, p = mix_op(sources, pieces, norm_weight, norm_eps, exact)
        ctx.normed, ctx.norm_eps, ctx.opens = norm_weight is not None, norm_eps, partial is None
        ctx.start, ctx.sizes, ctx.shares = start, sizes, [piece.shape[-2] for piece in pieces]
        ctx.save_for_backward(
            folded, z, scale, p, *((x, rstd, norm_weight) if ctx.normed else ()), *sources
        )
        ctx.set_materialize_grads(False)
        outs = ((x,) if ctx.normed else ()) + out.unbind(0)
        if not thread:
            return outs
        block_queries = folded[start + 1 : start + sizes[0]].unbind(0)
        threaded = [v.view_as(v) for v in (folded, *tensors[count:])]
        return (
            *outs,
            *lse.unbind(0)[1:],
            *block_queries,
            *threaded,
            y.view_as(y) if partial is None else source,
            *later_scores,
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        first_order()
        folded, z, scale, *saved = ctx.saved_tensors
        reads, count = ctx.sizes[0], sum(ctx.shares)
        douts, dlses, dqueries, dthreaded = _cut(gradients, reads, reads - 1, reads - 1)
        df, *later = dthreaded or (None,) * (1 + count)
        dg, dz, dsources = _mix_into(
            saved, ctx.normed, ctx.norm_eps, False, douts, (None, *dlses), later[:count]
        )
        *dpieces, dblock_scores = dz.split(ctx.shares, -2)
        pieces, (*dsources_before, gradient) = (dblock_scores, *later[count:]), dsources
        gradient, df = _score_into(
            saved[-1], folded, z, scale, ctx.start, ctx.sizes, pieces, gradient, df, dqueries
        )
        return (
            gradient,
            None if ctx.opens else gradient,
            df,
            dg,
            *[None] * 7,
            *dpieces,
            *dsources_before,
        )


def _cut(tensors: tuple[Any, ...], *sizes: int) -> list[tuple[Any, ...]]:
    """The first so many, the next so many, ..., and the rest."""
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
    """The reads of a block over all sources, after `y` joined `partial`, the sum of the block before (None: y is it).

    That sum becomes a source: it is scored for the queries of `folded` (R, D) from `start` on, sizes[0] of them this
    block's, and mixed with the other `sources` by `pieces`, their scores for this block, as in `mix`.
    Returns outputs as `mix` does; of the reads after the first the log-sum-exps and the queries (D,); the queries and
    the sources again; and the new one's scores for later blocks, (..., 1, size) each. thread=False: outputs alone.
    """
    reads = sizes[0]
    weight, exact = _inside(norm_weight, y.dtype, reads)
    options = (eps, norm_eps, exact, thread, start, sizes, len(pieces))
    first, *rest = apply(_Open, y, partial, folded, weight, *options, *pieces, *sources)
    results = (_outside(first, weight, norm_weight, norm_eps, y.dtype), *rest)
    if not thread:
        return results, (), (), folded, (), ()
    outs, lses, queries, (folded,), threaded, scores = _cut(
        results, reads, reads - 1, reads - 1, 1, len(sources) + 1
    )
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
        x, total, stats = merge_op(
            y, partial, out, lse, query, key_weight, norm_weight, eps, norm_eps
        )
        if partial is None:
            total = y.view_as(y)
        # Without a norm only a rounded h comes back from x, and fp16 has too small a range to undo a norm.
        saved_out = out if keep or norm_weight is None or y.dtype == torch.float16 else None
        ctx.opens, ctx.norm_eps = partial is None, norm_eps
        ctx.save_for_backward(x, total, saved_out, lse, query, key_weight, norm_weight, stats)
        ctx.set_materialize_grads(False)
        return x, total

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        first_order()
        if dx is None:
            return (dtotal, None if ctx.opens else dtotal, *[None] * 8)
        x, total, saved_out, lse, query, key_weight, norm_weight, stats = ctx.saved_tensors
        dtotal = None if dtotal is None else dtotal.contiguous()
        weights = (query, key_weight, norm_weight)
        dp, dout, dlse, dquery, dkey, dg = merge_backward(
            dx.contiguous(), dtotal, x, total, saved_out, lse, *weights, stats, ctx.norm_eps
        )
        return dp, None if ctx.opens else dp, dout, dlse, dquery, dkey, dg, None, None, None


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
    """The read after `y` joined the block's sum `partial` (None: y opens it), normed if asked, and that sum.

    The backward undoes the norm to find its input, whose rounding it then carries; `keep` keeps `out` alive instead.
    """
    partial = None if partial is None else partial.contiguous()
    y, out, lse, query = y.contiguous(), out.contiguous(), lse.contiguous(), vector("query", query)
    key_weight, norm_weight = (
        optional("key weight", key_weight),
        optional("norm weight", norm_weight),
    )
    return apply(_Merge, y, partial, out, lse, query, key_weight, norm_weight, eps, norm_eps, keep)
