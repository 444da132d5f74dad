"""A read that stands by itself, with the kernels under autograd: `depth_attention`.

It keeps no scores for later reads and threads no sources, so that a caller may read any sources in any order. Without
gradients it is one launch (`inference_read`); with them, the kernels that score and mix. Importing this needs triton.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import first_order, optional, vector
from .inference_read import read as inference_read
from .mix import mix as mix_op
from .mix import mix_backward
from .reference import fold
from .score import score as score_op
from .score import score_backward


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
        dx, dout, dlse, dz_later = gradients
        folded, norm_weight, rstd, p, *rest = ctx.saved_tensors
        count = ctx.count
        sources, scores, rstds = rest[:count], rest[count : 2 * count], rest[2 * count :]
        queries, dg = p.shape[-1], None
        # Outputs leave in fp32 gradients; the first one's comes back through the norm.
        douts = [torch.zeros_like(sources[0], dtype=torch.float32) for _ in range(queries)]
        if dout is not None:
            douts[ctx.normed :] = dout.float().contiguous().unbind(0)
        if ctx.normed and dx is not None:
            douts[0], dg = _norm_backward(dx, rstd, norm_weight, ctx.eps, sources, scores)
        dlses = () if dlse is None else dlse.contiguous().unbind(0)
        dz, _, dsources = mix_backward(sources, p, douts, dlses, True, None)
        dz = dz if dz_later is None else dz + dz_later
        df = torch.zeros_like(folded)
        gradients_of_sources = []
        for source, z, r, slope, gradient in zip(sources, scores, rstds, dz.unbind(-2), dsources):
            dsource, share = score_backward(source, folded, z, r, slope.contiguous(), gradient)
            gradients_of_sources.append(dsource)
            df += share
        return df, dg, None, *gradients_of_sources


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
        x, weights = inference_read(contiguous, query, key_weight, norm_weight, eps, return_weights)
        return (x, weights.unsqueeze(-1)) if return_weights else x
    folded = fold(query, key_weight, torch.float32).unsqueeze(0)
    x, out, _, z = _Attend.apply(folded, norm_weight, eps, *contiguous)
    x = out[0] if norm_weight is None else x
    return (x, z.softmax(-2).movedim(-2, 0)) if return_weights else x
