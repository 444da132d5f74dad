"""Attention Residuals in two phases over the fused operators: what the state holds, and who reads what when.

Sublayers come in spans. When a span opens, all its queries read the finished sources at once (phase 1), and each of its
reads then merges what the span itself has produced so far (phase 2): the running sum of a block, or, for Full Attention
Residuals, the span's own outputs. Scores are computed when a source is finished, for every later query, in one pass.
"""

from itertools import chain
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwater.ops.depth import reference

from .base import Norm, State, apply_norm

FULL_SPAN = 8  # sublayers a span for Full Attention Residuals: N / span + span / 2 reads per sublayer, flat around here

Tensors = tuple[Tensor, ...]


class Span(NamedTuple):
    """The state, named.

    For each finished source its tensor (..., D); for each finished span the scores of its sources for all reads to come
    (..., sources, Q), the embedding being the first. `folded`: query times key weight of all reads, (L + 1, D).
    For each read left in this span: phase 1's output (..., D), its log-sum-exp (...), and the folded query (D,).
    `own`, what the span produced: of a block, the sum but for the newest output (if there is an older one), and the
    newest output; in full, each output, then for each read left in this span the score of each output (..., 1), then of
    each output the scores for later spans (..., Q).
    """

    sources: Tensors
    scores: Tensors
    folded: Tensor
    outs: Tensors = ()
    lses: Tensors = ()
    queries: Tensors = ()
    own: Tensors = ()

    def pack(self) -> State:
        rest = (*self.outs, *self.lses, *self.queries, *self.own)
        return (*self.sources, *self.scores, self.folded, *rest)


class TwoPhase:
    """The schedule for `sublayers` reads in blocks of `block`; block=1 is Full Attention Residuals."""

    def __init__(self, sublayers: int, block: int, eps: float, *, reference: bool = False) -> None:
        self.sublayers, self.eps, self.reference = sublayers, eps, reference
        self.full = block == 1
        self.span = FULL_SPAN if self.full else block

    def operators(self) -> Any:
        """The module that has `score`, `mix` and `merge`: the kernels, or with the same signatures their references."""
        if self.reference:
            return reference
        from headwater.ops.depth import autograd

        return autograd

    def unpack(self, state: State, i: int, *, reading: bool = True) -> Span:
        """The state before read `i`; with reading=False before write `i`, when read `i` has taken its part away."""
        into = self._into(i)
        done = ceil(i / self.span) if i == self.sublayers else i // self.span  # spans
        n = 1 + (i - into if self.full else done)
        scored = n + 1 + done
        rest = state[scored + 1 :]
        if self.full:
            left = (len(rest) - 2 * into) // (3 + into)
        else:
            left = (len(rest) - min(into, 2 if reading else 1)) // 3
        outs, lses, queries = (rest[k * left : (k + 1) * left] for k in range(3))
        return Span(state[:n], state[n:scored], state[scored], outs, lses, queries, rest[3 * left :])

    def _into(self, i: int) -> int:
        """How many sublayers of its span come before read `i`."""
        return 0 if i == self.sublayers else i % self.span

    def begin(self, x: Tensor, folded: Tensor) -> State:
        source, scores = self.operators().score(x.contiguous(), folded, self.eps)
        return Span((source,), (scores.unsqueeze(-2),), folded).pack()

    def read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        span = self.unpack(state, i)
        if i % self.span == 0 or i == self.sublayers:
            return self._open(span, i, norm)
        return self._merge_outputs(span, i, norm) if self.full else self._merge_sum(span, norm)

    def write(self, state: State, i: int, y: Tensor) -> State:
        into = i % self.span
        y = y.to(state[0].dtype).contiguous()
        ends = into == self.span - 1 or i == self.sublayers - 1
        if not ends and not self.full:
            return (*state, y)
        span = self.unpack(state, i, reading=False)
        if self.full:
            return self._write_output(span, i, y, ends=ends)
        source = span.own[0] + y if span.own else y
        source, scores = self.operators().score(source, span.folded[i + 1 :], self.eps)
        return Span((*span.sources, source), (*span.scores, scores.unsqueeze(-2)), span.folded).pack()

    def _write_output(self, span: Span, i: int, y: Tensor, *, ends: bool) -> State:
        into, left = i % self.span, len(span.outs)
        y, scores = self.operators().score(y, span.folded[i + 1 :], self.eps)
        columns = scores.split([*[1] * left, scores.shape[-1] - left], -1)
        groups = [span.own[k * into : (k + 1) * into] for k in range(left + 2)]
        outputs, *scored = [(*group, new) for group, new in zip(groups, (y, *columns), strict=True)]
        if ends:
            return Span((*span.sources, *outputs), (*span.scores, torch.stack(scored[0], -2)), span.folded).pack()
        return Span(*span[:6], (*outputs, *chain(*scored))).pack()

    def settle(self, state: State, i: int) -> State:
        """The plain state of read `i`: its sources alone, which any read can continue from."""
        span = self.unpack(state, i)
        if self.full:
            return (*span.sources, *span.own[: self._into(i)])
        return (*span.sources, sum(span.own[1:], span.own[0])) if span.own else span.sources

    def _open(self, span: Span, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        count = min(self.span, self.sublayers - i) or 1
        pairs = [scores.split([count, scores.shape[-1] - count], -1) for scores in span.scores]
        asked, later = tuple(zip(*pairs))
        weight, eps = folded_norm(norm)
        outs, lses, sources = self.operators().mix(span.sources, torch.cat(asked, -2), weight, eps)
        queries = span.folded[i + 1 : i + count].unbind(0)
        span = Span(sources, later, span.folded, outs[1:], lses[1:], queries)
        return outs[0] if weight is not None else apply_norm(norm, outs[0]), span.pack()

    def _merge_sum(self, span: Span, norm: Norm | None) -> tuple[Tensor, State]:
        *partial, y = span.own
        weight, eps = folded_norm(norm)
        x, total = self.operators().merge(
            y, partial[0] if partial else None, span.outs[0], span.lses[0], span.queries[0], None, weight,
            eps=self.eps, norm_eps=eps,
        )  # fmt: skip
        return x if weight is not None else apply_norm(norm, x), self._next(span, (total,))

    def _merge_outputs(self, span: Span, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        into = self._into(i)
        outputs, asked, later = span.own[:into], span.own[into : 2 * into], span.own[2 * into :]
        z = torch.stack([span.lses[0].unsqueeze(-1), *asked], -2)
        weight, eps = folded_norm(norm)
        x, again = self.operators().merge_outputs(span.outs[0], outputs, z, weight, eps)
        return x if weight is not None else apply_norm(norm, x), self._next(span, (*again, *later))

    def _next(self, span: Span, own: Tensors) -> State:
        taken = (span.outs[1:], span.lses[1:], span.queries[1:])
        return Span(span.sources, span.scores, span.folded, *taken, own).pack()


def folded_norm(norm: Norm | None) -> tuple[Tensor | None, float]:
    """Weight and eps of a norm that a kernel can apply itself, else (None, unused)."""
    if isinstance(norm, nn.RMSNorm) and norm.weight is not None and norm.eps is not None:
        return norm.weight, norm.eps
    return None, 1e-6
