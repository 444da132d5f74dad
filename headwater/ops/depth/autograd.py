"""The kernels under autograd: `score`, `mix`, `merge`. Importing this needs triton; `routing` decides when to.

Sources are threaded: `score` and `mix` return each source again, and the next read takes the returned one; `score`
threads the queries too. Gradients then form a chain instead of a sum: a read's backward receives what later reads have
gathered for a source, in the buffer that the later read's backward made, and adds its own share to it in place.

Adding in place is safe only for a buffer that nobody else holds. Buffers made here carry a mark, and a gradient without
the mark (autograd summed two of them, a hook replaced it, it came from another operator) is copied. Assumed: no tensor
hook and no `autograd.grad` on a threaded source keeps a gradient and reads it after the backward has gone on.
Under torch.compile there are no marks: every gradient is copied, and inductor drops the copies of values that nothing
else uses, which are nearly all. (The backend "aot_eager" makes them.)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwater._torch import apply as apply_with_gradients
from headwater.ops.numerics import rms_norm

from .merge import merge as merge_op
from .merge import merge_backward, norm_backward
from .mix import mix as mix_op
from .mix import mix_backward, mix_backward_
from .read import read as read_op
from .score import score as score_op
from .score import score_backward, score_backward_

_MARK = "_headwater_buffer"


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


def _own(gradient: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        setattr(gradient, _MARK, True)
    return gradient


def _owned(gradient: Tensor) -> bool:
    return not torch.compiler.is_compiling() and getattr(gradient, _MARK, False) and gradient.is_contiguous()


def _to_add_to(gradient: Tensor) -> Tensor:
    return gradient if _owned(gradient) else gradient.clone(memory_format=torch.contiguous_format)


def _first_order() -> None:
    """Raise where a backward is to be differentiated: the kernels would leave the second derivative out in silence."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("the kernels have no second derivative: pass backend='reference' for create_graph=True")


def _vector(name: str, value: Tensor) -> Tensor:
    """Kernels take queries and weights by address: one vector for all tokens, its numbers side by side."""
    if value.dim() != 1:
        raise ValueError(f"backend='triton' takes one {name} for all tokens, (D,), got {tuple(value.shape)}")
    return value.contiguous()


def _optional(name: str, value: Tensor | None) -> Tensor | None:
    return None if value is None else _vector(name, value)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source: Tensor, folded: Tensor, eps: float, start: int, sizes: Sequence[int], rows: int
    ) -> tuple[Tensor, ...]:
        queries = folded[start:] if start else folded
        z, rstd = score_op(source, queries, eps)
        ctx.start, ctx.sizes = start, sizes
        ctx.save_for_backward(source, folded, z, rstd)
        ctx.set_materialize_grads(False)
        pieces = z.unsqueeze(-2).split(sizes, -1)
        asked = queries[1 : 1 + rows].unbind(0) if rows else ()
        return (source.view_as(source), folded.view_as(folded), *pieces, *asked)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, df: Tensor | None, *rest: Tensor | None) -> tuple[Any, ...]:
        _first_order()
        pieces, asked = rest[: len(ctx.sizes)], rest[len(ctx.sizes) :]
        scored, merged = _any(pieces), _any(asked)
        if not scored and not merged:
            return gradient, df, None, None, None, None
        source, folded, z, rstd = ctx.saved_tensors
        df = torch.zeros_like(folded) if df is None else _to_add_to(df)
        share = df[ctx.start :]
        if merged:
            filled = [folded.new_zeros(folded.shape[1:]) if d is None else d for d in asked]
            share[1 : 1 + len(asked)].add_(torch.stack(filled))
        if scored:
            dz = _joined_columns(pieces, ctx.sizes, z)
            gradient, found = _score_into(source, folded[ctx.start :], z, rstd, dz, gradient)
            share.add_(found)
        return gradient, _own(df), None, None, None, None


def _any(gradients: Sequence[Tensor | None]) -> bool:
    return any(gradient is not None for gradient in gradients)


def _joined_columns(pieces: Sequence[Tensor | None], sizes: Sequence[int], z: Tensor) -> Tensor:
    """Gradients (..., Q) of scores from those of their parts, (..., 1, size) each."""
    filled = [z.new_zeros(*z.shape[:-1], 1, n) if d is None else d for d, n in zip(pieces, sizes)]
    return filled[0].contiguous() if len(filled) == 1 else torch.cat(filled, -1)


def _score_into(
    source: Tensor, queries: Tensor, z: Tensor, rstd: Tensor, dz: Tensor, gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The source's gradient, what later reads gathered for it included, and that of the queries."""
    if gradient is not None and (torch.compiler.is_compiling() or _owned(gradient)):
        gradient = _to_add_to(gradient)
        (df,) = score_backward_(source, queries, z, rstd, dz, gradient)
    else:  # none, or one that is not ours: written anew, which is less than to copy it and add
        gradient = None if gradient is None else gradient.contiguous()
        gradient, df = score_backward(source, queries, z, rstd, dz, gradient)
    return _own(gradient), df


def score(
    source: Tensor, folded: Tensor, eps: float, *, start: int = 0, sizes: Sequence[int] | None = None, rows: int = 0
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The source and the fp32 queries `folded` (R, D), to be read in their place; the source's logits for the queries
    from `start` on, in pieces (..., 1, size), one by default; and the `rows` queries after `start`, (D,) each.

    Queries are threaded too: those of a block and their scores add to one buffer of gradients, in place.
    """
    sizes = [len(folded) - start] if sizes is None else sizes
    source, folded, *rest = apply(_Score, source, folded, eps, start, sizes, rows)
    return source, folded, tuple(rest[: len(sizes)]), tuple(rest[len(sizes) :])


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
        _first_order()
        p, *saved = ctx.saved_tensors
        queries = ctx.queries
        douts, dlses, later = gradients[:queries], gradients[queries : 2 * queries], gradients[2 * queries :]
        sources = saved[3:] if ctx.normed else saved
        dg, along = None, None
        if ctx.normed and douts[0] is not None:
            x, rstd, norm_weight = saved[:3]
            exact = queries == 1  # as plain PyTorch: a read by itself takes its shares from dh in fp32
            dh, dg, along = norm_backward(douts[0].contiguous(), x, norm_weight, rstd, ctx.norm_eps, exact)
            douts = (dh, *douts[1:])
        nothing = (None,) * 5
        if ctx.rebuild and along is None:  # this read was not used
            return (None, *nothing, *(None for _ in ctx.sizes), None, *later)
        filled = [torch.zeros_like(sources[0]) if d is None else d.contiguous() for d in douts]
        asked: list[Tensor] = []
        if not ctx.rebuild:  # no one sees that of a rebuilt read
            first = next((n for n, d in enumerate(dlses) if d is not None), queries)
            asked = [p.new_zeros(p.shape[:-2]) if d is None else d.contiguous() for d in dlses[first:]]
        dz, dsources = _gather_into(sources, p, filled, asked, later, along if ctx.rebuild else None)
        return (dg, *nothing, *dz.split(ctx.sizes, -2), *dsources)


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
    if all(g is None for g in later):
        dz, first, made = mix_backward(sources, p, douts, dlses, False, whole)
    else:
        made = [torch.zeros_like(v) if g is None else _to_add_to(g) for g, v in zip(later, sources)]
        dz, first = mix_backward_(sources, p, douts, dlses, made, whole)
    return dz, [_own(g) for g in (made if first is None else [first, *made])]


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
    dtype, count = sources[0].dtype, len(pieces)
    if norm_weight is None or dtype != torch.float16:
        options = (rebuild and norm_weight is not None, False, thread)
        return apply(_Mix, norm_weight, norm_eps, *options, count, *pieces, *sources)
    # fp16 cannot undo a norm (see `_Merge`), which comes outside then; a read by itself reaches it unrounded.
    exact = pieces[0].shape[-1] == 1
    first, *rest = apply(_Mix, None, norm_eps, False, exact, thread, count, *pieces, *sources)
    return (rms_norm(first.float(), norm_weight, norm_eps).to(dtype), *rest)


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
        x, total, stats = merge_op(y, partial, out, lse, query, key_weight, norm_weight, eps, norm_eps)
        if partial is None:
            total = y.view_as(y)
        # Without a norm only a rounded h comes back from x, and fp16 has too small a range to undo a norm.
        kept = out if keep or norm_weight is None or y.dtype == torch.float16 else None
        ctx.opens, ctx.norm_eps = partial is None, norm_eps
        ctx.save_for_backward(x, total, kept, lse, query, key_weight, norm_weight, stats)
        ctx.set_materialize_grads(False)
        return x, total

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        _first_order()
        if dx is None:
            return (dtotal, None if ctx.opens else dtotal, *[None] * 8)
        x, total, kept, lse, query, key_weight, norm_weight, stats = ctx.saved_tensors
        dp, dout, dlse, dquery, dkey, dg = merge_backward(
            dx.contiguous(), None if dtotal is None else dtotal.contiguous(), x, total, kept, lse, query, key_weight,
            norm_weight, stats, ctx.norm_eps,
        )  # fmt: skip
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
    y, out, lse, query = y.contiguous(), out.contiguous(), lse.contiguous(), _vector("query", query)
    key_weight, norm_weight = _optional("key weight", key_weight), _optional("norm weight", norm_weight)
    return apply(_Merge, y, partial, out, lse, query, key_weight, norm_weight, eps, norm_eps, keep)


class _Attend(torch.autograd.Function):
    """Score and mix in one node, for callers that keep no scores: gradients stay in fp32 until the last downcast."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        folded, norm_weight, eps, *sources = args  # as in _Mix
        scores, rstds = zip(*(score_op(source, folded, eps) for source in sources))
        z = torch.stack(scores, -2)
        x, rstd, out, lse, p = mix_op(sources, (z,), norm_weight, eps, False)
        ctx.eps, ctx.count, ctx.normed = eps, len(sources), norm_weight is not None
        ctx.save_for_backward(folded, norm_weight, rstd, p, *sources, *scores, *rstds)
        ctx.set_materialize_grads(False)
        return (x if ctx.normed else out.new_empty(0)), out, lse, z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _first_order()
        dx, dout, dlse, dz_given = gradients
        folded, norm_weight, rstd, p, *rest = ctx.saved_tensors
        count = ctx.count
        sources, scores, rstds = rest[:count], rest[count : 2 * count], rest[2 * count :]
        queries, dg = p.shape[-1], None
        douts = [torch.zeros_like(sources[0], dtype=torch.float32) for _ in range(queries)]
        if dout is not None:
            douts[ctx.normed :] = dout.float().contiguous().unbind(0)
        if ctx.normed and dx is not None:
            douts[0], dg = _norm_backward(dx, rstd, norm_weight, ctx.eps, sources, scores)
        dlses = () if dlse is None else dlse.contiguous().unbind(0)
        dz, _, dsources = mix_backward(sources, p, douts, dlses, True, None)
        dz = dz if dz_given is None else dz + dz_given
        df = torch.zeros_like(folded)
        results = []
        for source, z, r, slope, gradient in zip(sources, scores, rstds, dz.unbind(-2), dsources):
            made, share = score_backward(source, folded, z, r, slope.contiguous(), gradient)
            results.append(made)
            df += share
        return df, dg, None, *results


def _norm_backward(
    dx: Tensor, rstd: Tensor, weight: Tensor, eps: float, sources: Sequence[Tensor], scores: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """dh and the weight's gradient. h is mixed again in fp32: undoing the norm would bring its output's rounding in."""
    h = mix_op(sources, (torch.stack([z[..., :1] for z in scores], -2),), None, eps, True)[2][0]
    normed, d = h * rstd.unsqueeze(-1), dx.float()
    dg = (d * normed).flatten(0, -2).sum(0).to(weight.dtype)
    d = d * weight.float()
    return (d - normed * (d * normed).mean(-1, keepdim=True)) * rstd.unsqueeze(-1), dg


def fold(queries: Tensor, key_weights: Tensor | None) -> Tensor:
    return queries.float() if key_weights is None else queries.float() * key_weights.float()


def attend_blocks(
    sources: Sequence[Tensor], queries: Tensor, key_weights: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    contiguous = [source.contiguous() for source in sources]
    return _Attend.apply(fold(queries, key_weights).contiguous(), None, eps, *contiguous)[1:3]


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    return_weights: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    query, contiguous = _vector("query", query), [source.contiguous() for source in sources]
    key_weight, norm_weight = _optional("key weight", key_weight), _optional("norm weight", norm_weight)
    inputs = [*sources, query, *(t for t in (key_weight, norm_weight) if t is not None)]
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
        x, _, weights = read_op(contiguous, None, query, key_weight, norm_weight, eps, eps, return_weights)
        return (x, weights.unsqueeze(-1)) if return_weights else x
    folded = fold(query, key_weight).unsqueeze(0)
    x, out, _, z = _Attend.apply(folded, norm_weight, eps, *contiguous)
    x = out[0] if norm_weight is None else x
    return (x, z.softmax(-2).movedim(-2, 0)) if return_weights else x


def decode_read(
    sources: Sequence[Tensor],
    y: Tensor,
    query: Tensor,
    key_weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*sources, y, query)):
        raise ValueError("decode_read has no backward: call it under torch.no_grad(), or use depth_attention")
    query, contiguous = _vector("query", query), [source.contiguous() for source in sources]
    key_weight, norm_weight = _optional("key weight", key_weight), _optional("norm weight", norm_weight)
    x, summed, _ = read_op(contiguous, y.contiguous(), query, key_weight, norm_weight, eps, norm_eps, False)
    return x, summed
