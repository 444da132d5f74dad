"""Reads by themselves under autograd, with the kernels: `depth_attention`, `attend_blocks`, `decode_read`, and
`weigh_sources`, which threads its sources.

The others keep no scores and thread no sources: a caller may take any of them, in any order. Importing this needs
triton.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import apply, first_order, gathered, optional, own, vector
from .mix import mix as mix_op
from .mix import mix_backward
from .read import read as read_op
from .reference import fold
from .score import score as score_op
from .score import score_backward
from .weigh import weigh, weigh_backward, weigh_backward_


class _Attend(torch.autograd.Function):
    """Score and mix in one node, for callers that keep no scores: gradients stay in fp32 until the last downcast."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        folded, norm_weight, eps, *sources = args  # as in `autograd._Mix`
        scores, rstds = zip(*(score_op(source, folded, eps) for source in sources))
        z = torch.stack(scores, -2)
        x, rstd, out, lse, p = mix_op(sources, (z,), norm_weight, eps, False)
        ctx.eps, ctx.count, ctx.normed = eps, len(sources), norm_weight is not None
        ctx.save_for_backward(folded, norm_weight, rstd, p, *sources, *scores, *rstds)
        ctx.set_materialize_grads(False)
        return (x if ctx.normed else out.new_empty(0)), out, lse, z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        first_order()
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
    dx: Tensor,
    rstd: Tensor,
    weight: Tensor,
    eps: float,
    sources: Sequence[Tensor],
    scores: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """dh and the weight's gradient. h is mixed again in fp32: undoing the norm would bring its output's rounding in."""
    h = mix_op(sources, (torch.stack([z[..., :1] for z in scores], -2),), None, eps, True)[2][0]
    normed, d = h * rstd.unsqueeze(-1), dx.float()
    dg = (d * normed).flatten(0, -2).sum(0).to(weight.dtype)
    d = d * weight.float()
    return (d - normed * (d * normed).mean(-1, keepdim=True)) * rstd.unsqueeze(-1), dg


def attend_blocks(
    sources: Sequence[Tensor], queries: Tensor, key_weights: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    contiguous = [source.contiguous() for source in sources]
    return _Attend.apply(
        fold(queries, key_weights, torch.float32).contiguous(), None, eps, *contiguous
    )[1:3]


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    return_weights: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    query, contiguous = vector("query", query), [source.contiguous() for source in sources]
    key_weight, norm_weight = (
        optional("key weight", key_weight),
        optional("norm weight", norm_weight),
    )
    inputs = [*sources, query, *(t for t in (key_weight, norm_weight) if t is not None)]
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
        x, _, weights = read_op(
            contiguous, None, query, key_weight, norm_weight, eps, eps, return_weights
        )
        return (x, weights.unsqueeze(-1)) if return_weights else x
    folded = fold(query, key_weight, torch.float32).unsqueeze(0)
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
        raise ValueError(
            "decode_read has no backward: call it under torch.no_grad(), or use depth_attention"
        )
    query, contiguous = vector("query", query), [source.contiguous() for source in sources]
    key_weight, norm_weight = (
        optional("key weight", key_weight),
        optional("norm weight", norm_weight),
    )
    x, summed, _ = read_op(
        contiguous, y.contiguous(), query, key_weight, norm_weight, eps, norm_eps, False
    )
    return x, summed


class _Weigh(torch.autograd.Function):
    """Sources are threaded, and gradients added to in place, as in `autograd`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        folded, eps, heads, softmax, norm, thread, *sources = args  # as in `autograd._Mix`
        ctx.options = (eps, heads, softmax, norm)
        x, largest = weigh(sources, folded, *ctx.options)
        ctx.save_for_backward(folded, largest, *sources)
        ctx.set_materialize_grads(False)
        return (x, *(source.view_as(source) for source in sources if thread))

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, *later: Tensor | None) -> tuple[Tensor | None, ...]:
        first_order()
        folded, largest, *sources = ctx.saved_tensors
        nothing = (None,) * 5
        if dx is None:  # this read was not used
            return None, *nothing, *(later or [None] * len(sources))
        given, made = (
            (sources, folded, *ctx.options, largest, dx.contiguous()),
            gathered(later, sources),
        )
        if made is None:
            made, df = weigh_backward(*given)
        else:
            (df,) = weigh_backward_(*given, made)
        return df, *nothing, *map(own, made)


def weigh_sources(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    eps: float,
    heads: int,
    softmax: bool,
    key_norm: bool,
    thread: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    folded = fold(query, key_weight, torch.float32).contiguous()
    contiguous = [source.contiguous() for source in sources]
    x, *again = apply(_Weigh, folded, eps, heads, softmax, key_norm, thread, *contiguous)
    return x, tuple(again or sources)
