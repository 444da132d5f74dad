"""Attention Residuals in two phases over the fused operators: what the state holds, and who reads what when.

Sublayers come in spans. When a span opens, all its queries read the finished sources at once (phase 1), and each of its
reads then merges what the span itself has produced so far (phase 2): the running sum of a block, or, for Full Attention
Residuals, the span's own outputs. Scores are computed when a source is finished, for every later query, in one pass.

A pipeline stage has the queries of its own reads alone: it takes over the sources as they are (`adopt`), scores them
for its queries, and hands sources on (`settle`).
"""

from itertools import chain
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwater.ops.depth import reference

from .base import Layout, Next, Norm, State, apply_norm

FULL_SPAN = 8  # sublayers a span for Full Attention Residuals: N / span + span / 2 reads per sublayer, flat around here

Tensors = tuple[Tensor, ...]


class Span(NamedTuple):
    """The state, named.

    For each finished source its tensor (..., D). Scores of the sources, of those there were at first together, then of
    each finished span: for each span to come a tensor (..., sources, its reads). `folded`: query times key weight of R
    reads, (R, D).
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


class Counts(NamedTuple):
    """How many tensors of each kind a state holds, `left` being the reads left in its span."""

    sources: int
    scores: int
    left: int
    own: int

    @property
    def layout(self) -> Layout:
        numbered = {"source": self.sources, "scores": self.scores}
        names = [f"{name} {n}" for name, count in numbered.items() for n in range(count)]
        names += ["queries", *(f"{name} {n}" for name in ("out", "lse", "query") for n in range(self.left))]
        return (*names, *(f"own {n}" for n in range(self.own)))


class TwoPhase:
    """The schedule for reads `first` to `stop` of `sublayers` in blocks of `block`; block=1 is the full residual.

    `stop == sublayers` includes the final read. `reference`: with the plain PyTorch operators, which is how a CPU tests
    the schedule.
    """

    def __init__(
        self,
        sublayers: int,
        block: int,
        eps: float,
        *,
        first: int = 0,
        stop: int | None = None,
        reference: bool = False,
    ) -> None:
        self.sublayers, self.eps, self.reference = sublayers, eps, reference
        self.full = block == 1
        self.span = FULL_SPAN if self.full else block
        self.first = first
        self.last = sublayers + 1 if stop is None or stop == sublayers else stop  # reads end before it
        places = range(first, min(self.last, sublayers) + 1)
        self.opens = [i for i in range(first, self.last) if self._into(i) == 0]
        self.table: dict[tuple[Next, int], Counts] = {("read", i): self._counts(i, i) for i in places}
        self.table |= {("write", i): self._counts(i, i + 1) for i in places if i < sublayers}

    def _counts(self, i: int, next_read: int) -> Counts:
        """Before read i, or, with next_read = i + 1, before write i, when read i has taken its part away."""
        into, reading = self._into(i), next_read == i
        sources = 1 + (i - into if self.full else self._done(i))
        left = max(0, self._span_end(i) - next_read) if into or not reading else 0
        if self.full:
            own = into * (left + 2)
        else:
            own = min(into, 1 if i == self.first or not reading else 2)
        groups = 1 + self._done(i) - self._done(self.first)
        return Counts(sources, groups * len(self._reads_to_come(next_read)), left, own)

    def _reads_to_come(self, i: int) -> list[int]:
        """How many reads each span has that opens at read i or later."""
        return [self._reads_of(start) for start in self.opens if start >= i]

    def _reads_of(self, start: int) -> int:
        return 1 if start == self.sublayers else self._span_end(start) - start

    def _into(self, i: int) -> int:
        """How many sublayers of its span come before read `i`."""
        return 0 if i == self.sublayers else i % self.span

    def _done(self, i: int) -> int:
        """Spans finished before read `i`."""
        return ceil(i / self.span) if i == self.sublayers else i // self.span

    def _span_end(self, i: int) -> int:
        """The read after the last one of the span of sublayer i, as far as this schedule goes."""
        return min((i // self.span + 1) * self.span, self.sublayers, self.last)

    def operators(self) -> Any:
        """The module that has `score`, `mix` and `merge`: the kernels, or with the same signatures their references."""
        if self.reference:
            return reference
        from headwater.ops.depth import autograd

        return autograd

    def holds(self, state: State, verb: Next, i: int) -> bool:
        """Whether a state is one of this schedule; the sources alone are always fewer."""
        counts = self.table.get((verb, i))
        return counts is not None and len(state) == sum(counts) + 2 * counts.left + 1

    def layout(self, verb: Next, i: int) -> tuple[Layout, ...]:
        counts = self.table.get((verb, i))
        return () if counts is None else (counts.layout,)

    def unpack(self, state: State, verb: Next, i: int) -> Span:
        """The state before read or write `i`, named."""
        n, pieces, left, _ = self.table[verb, i]
        scored = n + pieces
        rest = state[scored + 1 :]
        outs, lses, queries = rest[:left], rest[left : 2 * left], rest[2 * left : 3 * left]
        return Span(state[:n], state[n:scored], state[scored], outs, lses, queries, rest[3 * left :])

    def begin(self, x: Tensor, folded: Tensor) -> State:
        source, scores = self._score(x.contiguous(), folded)
        return Span((source,), self._by_span(scores.unsqueeze(-2), self.first), folded).pack()

    def enter(self, x: Tensor, folded: Tensor) -> State:
        """The state before write 0, if read 0 was `x` itself: what each query finds in one source is that source."""
        source, scores = self._score(x.contiguous(), folded)
        asked, *later = self._by_span(scores, 0)
        lses = asked[..., 1:].movedim(-1, 0).contiguous().unbind(0)
        later = [piece.unsqueeze(-2) for piece in later]
        queries = folded[1 : self._reads_of(0)].unbind(0)
        return Span((source,), tuple(later), folded, (source,) * len(lses), lses, queries).pack()

    def _by_span(self, scores: Tensor, i: int) -> Tensors:
        """Scores (..., sources, Q) for the reads of all spans that open at read i or later, in a tensor for each."""
        reads = self._reads_to_come(i)
        return scores.split(reads, -1) if reads else ()

    def _score(self, source: Tensor, folded: Tensor) -> tuple[Tensor, Tensor]:
        """The source again, and its scores (..., Q); a stage may have no read left that would ask."""
        if len(folded) == 0:
            return source, source.new_empty(*source.shape[:-1], 0, dtype=torch.float32)
        return self.operators().score(source, folded, self.eps)

    def adopt(self, state: State, folded: Tensor) -> State:
        """The state before read `first` from its sources alone, (..., D) each, the running sum of a block last."""
        counts = self.table["read", self.first]
        plain = [source.contiguous() for source in state]
        finished = [self._score(source, folded) for source in plain[: counts.sources]]
        sources, scores = tuple(source for source, _ in finished), torch.stack([z for _, z in finished], -2)
        own, left = plain[counts.sources :], counts.left
        if not own:
            return Span(sources, self._by_span(scores, self.first), folded).pack()
        asked, later = scores.split([left, scores.shape[-1] - left], -1)
        outs, lses, sources = self.operators().mix(sources, asked.contiguous()) if left else ((), (), sources)
        span = Span(sources, self._by_span(later, self.first), folded, outs, lses, folded[:left].unbind(0))
        if not self.full:
            return Span(*span[:6], (own[0],)).pack()
        for output in own:
            span = self._absorb(span, output, folded)
        return span.pack()

    def read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        span = self.unpack(state, "read", i)
        if self._into(i) == 0:
            return self._open(span, i, norm)
        return self._merge_outputs(span, i, norm) if self.full else self._merge_sum(span, norm)

    def write(self, state: State, i: int, y: Tensor) -> State:
        into = i % self.span
        y = y.to(state[0].dtype).contiguous()
        ends = into == self.span - 1 or i == self.sublayers - 1
        if not ends and not self.full:
            return (*state, y)
        span = self.unpack(state, "write", i)
        queries = span.folded[i + 1 - self.first :]
        if self.full:
            span = self._absorb(span, y, queries)
            if not ends:
                return span.pack()
            count = into + 1
            outputs, scored = span.own[:count], span.own[count:]
            pieces = (*span.scores, *self._by_span(torch.stack(scored, -2), i + 1))
            return Span((*span.sources, *outputs), pieces, span.folded).pack()
        source = span.own[0] + y if span.own else y
        source, scores = self._score(source, queries)
        pieces = (*span.scores, *self._by_span(scores.unsqueeze(-2), i + 1))
        return Span((*span.sources, source), pieces, span.folded).pack()

    def _absorb(self, span: Span, y: Tensor, queries: Tensor) -> Span:
        """In full: one more output of the span, with its scores for the reads left in it and for later spans."""
        left = len(span.outs)
        before = len(span.own) // (left + 2)
        y, scores = self._score(y, queries)
        columns = scores.split([*[1] * left, scores.shape[-1] - left], -1)
        groups = [span.own[k * before : (k + 1) * before] for k in range(left + 2)]
        outputs, *scored = [(*group, new) for group, new in zip(groups, (y, *columns), strict=True)]
        return Span(*span[:6], (*outputs, *chain(*scored)))

    def settle(self, state: State, i: int) -> State:
        """The plain state of read `i`: its sources alone, which any read can continue from."""
        span = self.unpack(state, "read", i)
        if self.full:
            return (*span.sources, *span.own[: self._into(i)])
        return (*span.sources, sum(span.own[1:], span.own[0])) if span.own else span.sources

    def _open(self, span: Span, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        count, spans = self._reads_of(i), len(self._reads_to_come(i))
        later = tuple(piece for n, piece in enumerate(span.scores) if n % spans)
        weight, eps = folded_norm(norm)
        z = self.operators().join(span.scores[::spans])
        ends = i == self.sublayers  # after the final read nobody takes sources from here
        outs, lses, sources = self.operators().mix(span.sources, z, weight, eps, thread=not ends)
        queries = span.folded[i + 1 - self.first : i + count - self.first].unbind(0)
        span = Span(sources or span.sources, later, span.folded, outs[1:], lses[1:], queries)
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
