"""A read that stands by itself, with the kernels under autograd: `depth_attention`.

It keeps no scores for later reads and threads no sources, so that a caller may read any sources in
any order. Without gradients it is one launch (`inference_read`); with them, the kernels that score
and mix. Importing this needs triton.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.ops.routing import refuse_second_derivative

from .autograd import optional, vector
from .inference_read import read as inference_read
from .mix import mix as mix_op
from .mix import mix_backward
from .reference import fold
from .score import score as score_op
from .score import score_backward


class _Attend(torch.autograd.Function):
    """Score and mix in one node: gradients stay in fp32 until the last downcast."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        # Arguments have no names of their own: see `autograd._Mix`.
        folded, norm_weight, eps, *sources = args
        scores, rstds = zip(*(score_op(source, folded, eps) for source in sources))
        z = torch.stack(scores, -2)
        x, rstd, out, lse, p = mix_op(sources, (z,), norm_weight, eps, False)
        ctx.eps = eps
        ctx.count = len(sources)
        ctx.normed = norm_weight is not None
        ctx.save_for_backward(folded, norm_weight, rstd, p, *sources, *scores, *rstds)
        ctx.set_materialize_grads(False)
        return (x if ctx.normed else out.new_empty(0)), out, lse, z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the kernel of depth_attention")
        dx, dout, dlse, dz_later = gradients
        folded, norm_weight, rstd, p, *by_source = ctx.saved_tensors
        count = ctx.count
        sources = by_source[:count]
        scores = by_source[count : 2 * count]
        rstds = by_source[2 * count :]

        # Outputs leave in fp32 gradients; the first one's comes back through the norm.
        queries, dg = p.shape[-1], None
        zeros = torch.zeros_like(sources[0], dtype=torch.float32)
        douts = [zeros] * queries
        if dout is not None:
            douts[ctx.normed :] = dout.float().contiguous().unbind(0)
        if ctx.normed and dx is not None:
            douts[0], dg = _norm_backward(dx, rstd, norm_weight, ctx.eps, sources, scores)
        dlses = () if dlse is None else dlse.contiguous().unbind(0)
        dz, _, dsources = mix_backward(sources, p, douts, dlses, True, None)
        if dz_later is not None:
            dz = dz + dz_later

        # Each source's scores add to its gradient.
        df = torch.zeros_like(folded)
        slopes = [slope.contiguous() for slope in dz.unbind(-2)]
        gradients_of_sources = []
        for source, z, r, slope, gradient in zip(sources, scores, rstds, slopes, dsources):
            dsource, share = score_backward(source, folded, z, r, slope, gradient)
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
    """Return dh and the weight's gradient.

    h is mixed again in fp32: undoing the norm would bring its output's rounding in.
    """
    first_scores = torch.stack([z[..., :1] for z in scores], -2)
    _, _, out, _, _ = mix_op(sources, (first_scores,), None, eps, True)
    normed = out[0] * rstd.unsqueeze(-1)
    d = dx.float()
    dg = (d * normed).flatten(0, -2).sum(0).to(weight.dtype)
    d = d * weight.float()
    along = (d * normed).mean(-1, keepdim=True)
    return (d - normed * along) * rstd.unsqueeze(-1), dg


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    return_weights: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    contiguous = [source.contiguous() for source in sources]
    query = vector("query", query)
    key_weight = optional("key weight", key_weight)
    norm_weight = optional("norm weight", norm_weight)
    inputs = [*sources, query, key_weight, norm_weight]
    differentiated = any(t is not None and t.requires_grad for t in inputs)
    if not (torch.is_grad_enabled() and differentiated):
        x, weights = inference_read(contiguous, query, key_weight, norm_weight, eps, return_weights)
        return (x, weights.unsqueeze(-1)) if return_weights else x
    folded = fold(query, key_weight, torch.float32).unsqueeze(0)
    x, out, _, z = _Attend.apply(folded, norm_weight, eps, *contiguous)
    if norm_weight is None:
        x = out[0]
    return (x, z.softmax(-2).movedim(-2, 0)) if return_weights else x
