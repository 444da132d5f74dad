"""Attention Residuals in two phases over the fused operators: what the state holds, and who reads what when.

Sublayers come in spans. When a span opens, all its queries read the finished sources at once (phase 1), and each of its
reads then merges what the span itself has produced so far (phase 2): the running sum of a block, or, for Full Attention
Residuals, the span's own outputs. Scores of a source are computed for every later query in one pass: when an output is
written in full, of a block's sum by the read that opens the next one.

A pipeline stage has the queries of its own reads alone: it takes over the sources as they are (`adopt`), scores them
for its queries, and hands sources on (`settle`).
"""

from collections.abc import Sequence
from itertools import chain
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwater._torch import hooked
from headwater.ops.depth import reference
from headwater.ops.routing import Backend

from .base import Layout, Next, Norm, State, apply_norm

FULL_SPAN = 8  # sublayers a span for Full Attention Residuals: N / span + span / 2 reads per sublayer, flat around here

Tensors = tuple[Tensor, ...]


class Span(NamedTuple):
    """The state, named.

    For each finished source its tensor (..., D). Scores of the sources, of those there were at first together, then of
    each finished span: for each span to come a tensor (..., sources, its reads). `folded`: query times key weight of R
    reads, (R, D).
    `waiting`, what the reads left in this span will take: for each, the last one first, phase 1's output (..., D), its
    log-sum-exp (...), and of a block the folded query (D,).
    `own`, what the span produced: of a block, the sum but for the newest output (if there is an older one), and the
    newest output, until the next block opens (before the first, the embedding); in full, each output, then for each
    read left in this span the score of each output (..., 1, 1), then of each output the scores for later spans
    (..., 1, Q).
    """

    sources: Tensors
    scores: Tensors
    folded: Tensor
    waiting: Tensors = ()
    own: Tensors = ()

    def pack(self) -> State:
        return (*self.sources, *self.scores, self.folded, *self.waiting, *self.own)


class Counts(NamedTuple):
    """How many tensors of each kind a state holds; `left`, not one of them, is the reads left in its span."""

    sources: int
    scores: int
    waiting: int
    own: int
    left: int

    @property
    def length(self) -> int:
        return self.sources + self.scores + 1 + self.waiting + self.own

    @property
    def layout(self) -> Layout:
        numbered = {"source": self.sources, "scores": self.scores}
        names = [f"{name} {n}" for name, count in numbered.items() for n in range(count)]
        kinds = ("out", "lse", "query")[: self.waiting // max(1, self.left)]
        waiting = [f"{kind} {n}" for n in reversed(range(self.left)) for kind in kinds]
        return (*names, "queries", *waiting, *(f"own {n}" for n in range(self.own)))


class TwoPhase:
    """The schedule for reads `first` to `stop` of `sublayers` in blocks of `block`; block=1 is the full residual.

    `stop == sublayers` includes the final read. `backend`: over the kernels (triton), the plain PyTorch operators
    (reference), or, auto, those on a GPU and these elsewhere.
    """

    def __init__(
        self,
        sublayers: int,
        block: int,
        eps: float,
        *,
        first: int = 0,
        stop: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        self.sublayers, self.eps, self.backend = sublayers, eps, backend
        self.full = block == 1
        self.span = FULL_SPAN if self.full else block
        self.first = first
        self.last = (
            sublayers + 1 if stop is None or stop == sublayers else stop
        )  # reads end before it
        places = range(first, min(self.last, sublayers) + 1)
        opens = [i for i in range(first, self.last) if self._into(i) == 0]
        # for each place, how many reads each span has that opens there or later
        self.reads_to_come = {
            i: [self._reads_of(start) for start in opens if start >= i]
            for i in (*places, places.stop)
        }
        self.table: dict[tuple[Next, int], Counts] = {
            ("read", i): self._counts(i, i) for i in places
        }
        self.table |= {("write", i): self._counts(i, i + 1) for i in places if i < sublayers}
        self.lengths = {place: counts.length for place, counts in self.table.items()}

    def _counts(self, i: int, next_read: int) -> Counts:
        """Before read i, or, with next_read = i + 1, before write i, when read i has taken its part away."""
        into, reading = self._into(i), next_read == i
        left = max(0, self._span_end(i) - next_read) if into or not reading else 0
        scored = self._scored(i, reading)
        groups = scored - max(0, self._scored(self.first, True) - 1)
        scores = groups * len(self.reads_to_come[next_read])
        if self.full:
            return Counts(1 + i - into, scores, 2 * left, into * (left + 2), left)
        newest = 1 if i == self.first else min(2, (i - 1) % self.span + 1)
        return Counts(scored, scores, 3 * left, newest if reading else min(into, 1), left)

    def _scored(self, i: int, reading: bool) -> int:
        """Spans finished before read or write `i`, the embedding as one, that have scores: a block has once the next
        one opened."""
        return 1 + self._done(i) - (reading and not self.full and self._into(i) == 0)

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

    def plain(self, x: Tensor) -> bool:
        """Whether tensors like `x` are read by the plain operators."""
        return self.backend == "reference" or (self.backend == "auto" and not x.is_cuda)

    def operators(self, x: Tensor) -> Any:
        """The module that has `score`, `mix`, `open_block` and `merge` for tensors like `x`: the kernels, or with the
        same signatures their references."""
        if self.plain(x):
            return reference
        from headwater.ops.depth import autograd

        return autograd

    def holds(self, state: State, verb: Next, i: int) -> bool:
        """Whether a state is one of this schedule; the sources alone are always fewer."""
        return len(state) == self.lengths.get((verb, i))

    def layout(self, verb: Next, i: int) -> tuple[Layout, ...]:
        counts = self.table.get((verb, i))
        return () if counts is None else (counts.layout,)

    def unpack(self, state: State, verb: Next, i: int) -> Span:
        """The state before read or write `i`, named."""
        counts = self.table[verb, i]
        n = counts.sources
        scored = n + counts.scores
        own = scored + 1 + counts.waiting
        return Span(state[:n], state[n:scored], state[scored], state[scored + 1 : own], state[own:])

    def begin(self, x: Tensor, folded: Tensor) -> State:
        x = x.contiguous()
        if not self.full:
            return Span((), (), folded, (), (x,)).pack()
        x, folded, scores = self._score(x, folded, self.first, self.reads_to_come[self.first])
        return Span((x,), scores, folded).pack()

    def enter(self, x: Tensor, folded: Tensor) -> State:
        """The state before write 0, if read 0 was `x` itself: what each query finds in one source is that source."""
        x, folded, (asked, *later) = self._score(x.contiguous(), folded, 0, self.reads_to_come[0])
        lses = asked.squeeze(-2)[..., 1:].movedim(-1, 0).contiguous().unbind(0)
        waiting = self._wait((x,) * len(lses), lses, folded[1 : 1 + len(lses)].unbind(0))
        return Span((x,), tuple(later), folded, waiting).pack()

    def _score(
        self, source: Tensor, folded: Tensor, i: int, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensors]:
        """The source again, `folded` again, and scores (..., 1, size) for so many reads each from read `i` on; a stage
        may have no read left that would ask."""
        start = i - self.first
        if start == len(folded):
            none = source.new_empty(*source.shape[:-1], 1, 0, dtype=torch.float32)
            return source, folded, (none,) * len(sizes)
        return self.operators(source).score(source, folded, self.eps, start=start, sizes=sizes)

    def _wait(self, outs: Tensors, lses: Tensors, queries: Tensors) -> Tensors:
        """What the reads left in a span will take, the last one's first."""
        taken = zip(outs, lses) if self.full else zip(outs, lses, queries, strict=True)
        return tuple(chain.from_iterable(reversed([*taken])))

    def adopt(self, state: State, folded: Tensor) -> State:
        """The state before read `first` from its sources alone, (..., D) each, the running sum of a block last."""
        counts = self.table["read", self.first]
        plain = [source.contiguous() for source in state]
        own, left, inside = plain[counts.sources :], counts.left, self._into(self.first) > 0
        sizes = [*([left] if inside else []), *self.reads_to_come[self.first]]
        sources, scored = [], []
        for source in plain[: counts.sources]:
            source, folded, scores = self._score(source, folded, self.first, sizes)
            sources.append(source)
            scored.append(scores)
        scores = tuple(torch.cat(pieces, -2) for pieces in zip(*scored, strict=True))
        if not inside:
            return Span(tuple(sources), scores, folded, (), tuple(own)).pack()
        asked, *later = scores
        outs, lses, again = (
            self.operators(asked).mix(sources, (asked,)) if left else ((), (), sources)
        )
        span = Span(
            tuple(again), tuple(later), folded, self._wait(outs, lses, folded[:left].unbind(0))
        )
        if not self.full:
            return Span(*span[:4], (own[0],)).pack()
        for output in own:
            span = self._absorb(span, output, self.first)
        return span.pack()

    def read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        if self._into(i) == 0:
            return self._open(self.unpack(state, "read", i), i, norm)
        return self._merge_outputs(state, i, norm) if self.full else self._merge_sum(state, i, norm)

    def write(self, state: State, i: int, y: Tensor) -> State:
        y = y.contiguous()
        if not self.full:
            return (*state, y)
        span = self._absorb(self.unpack(state, "write", i), y, i + 1)
        if i % self.span < self.span - 1 and i < self.sublayers - 1:
            return span.pack()
        count = i % self.span + 1
        outputs, scored = span.own[:count], span.own[count:]
        sizes = self.reads_to_come[i + 1]
        later = torch.cat(scored, -2).split(sizes, -1) if sizes else ()
        return Span((*span.sources, *outputs), (*span.scores, *later), span.folded).pack()

    def _absorb(self, span: Span, y: Tensor, i: int) -> Span:
        """In full: one more output of the span, with its scores for the reads left in it, of which the next is `i`, and
        for later spans."""
        left = len(span.waiting) // 2
        before = len(span.own) // (left + 2)
        sizes = [*[1] * left, len(span.folded) - (i - self.first) - left]
        y, folded, scores = self._score(y, span.folded, i, sizes)
        groups = [span.own[k * before : (k + 1) * before] for k in range(left + 2)]
        own = chain.from_iterable(
            (*group, new) for group, new in zip(groups, (y, *scores), strict=True)
        )
        return Span(span.sources, span.scores, folded, span.waiting, tuple(own))

    def has_lost_gradients(self, state: State, i: int) -> bool:
        """Whether what queries went into was made without gradients, as where lower layers are frozen by no_grad, or a
        state is detached: a read that takes it would teach its query nothing."""
        span = self.unpack(state, "read", i)
        of_queries = [span.folded, *span.scores, *span.waiting[1 :: 2 if self.full else 3]]
        if self.full:
            of_queries += span.own[self._into(i) :]
        return not all(tensor.requires_grad or not tensor.numel() for tensor in of_queries)

    def settle(self, state: State, i: int) -> State:
        """The plain state of read `i`: its sources alone, which any read can continue from."""
        span = self.unpack(state, "read", i)
        if self.full:
            return (*span.sources, *span.own[: self._into(i)])
        return (*span.sources, sum(span.own[1:], span.own[0]))

    def _open(self, span: Span, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        sizes, spans = self.reads_to_come[i], len(self.reads_to_come[i])
        pieces, later = (
            span.scores[::spans],
            tuple(piece for n, piece in enumerate(span.scores) if n % spans),
        )
        weight, eps = self._folded_norm(norm, span.folded)
        thread = i < self.sublayers  # after the final read nobody takes sources from here
        operators, folded, queries = self.operators(span.folded), span.folded, ()
        if self.full:
            outs, lses, sources = operators.mix(span.sources, pieces, weight, eps, thread=thread)
            lses = lses[1:]
        else:
            *partial, y = span.own
            outs, lses, queries, folded, sources, scores = operators.open_block(
                y, partial[0] if partial else None, folded, span.sources, pieces, weight, eps,
                eps=self.eps, start=i - self.first, sizes=sizes, thread=thread,
            )  # fmt: skip
            later += scores
        state = Span(
            sources or span.sources, later, folded, self._wait(outs[1:], lses, queries)
        ).pack()
        return outs[0] if weight is not None else apply_norm(norm, outs[0]), state

    def _merge_sum(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        taken = 3 + self.table["read", i].own
        out, lse, query, *partial, y = state[-taken:]
        weight, eps = self._folded_norm(norm, y)
        x, total = self.operators(y).merge(
            y,
            partial[0] if partial else None,
            out,
            lse,
            query,
            None,
            weight,
            eps=self.eps,
            norm_eps=eps,
        )
        return x if weight is not None else apply_norm(norm, x), (*state[:-taken], total)

    def _merge_outputs(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        span, into = self.unpack(state, "read", i), self._into(i)
        outputs, asked, later = span.own[:into], span.own[into : 2 * into], span.own[2 * into :]
        *waiting, out, lse = span.waiting
        weight, eps = self._folded_norm(norm, out)
        x, again = self.operators(out).merge_outputs(
            out, outputs, (lse.view(*lse.shape, 1, 1), *asked), weight, eps
        )
        state = Span(*span[:3], tuple(waiting), (*again, *later)).pack()
        return x if weight is not None else apply_norm(norm, x), state

    def _folded_norm(self, norm: Norm | None, x: Tensor) -> tuple[Tensor | None, float]:
        """Weight and eps of a norm that a kernel can apply itself, else (None, unused): torch's, or of a class with
        `folds = True`, since another's forward may compute anything. One with hooks is called, FSDP's unsharding among
        them; so is every norm over the plain operators, which would gain nothing."""
        if (
            self.plain(x)
            or not isinstance(norm, nn.RMSNorm)
            or (weight := norm.weight) is None
            or norm.eps is None
        ):
            return None, 1e-6
        if (type(norm) is not nn.RMSNorm and not getattr(norm, "folds", False)) or hooked(norm):
            return None, 1e-6
        return weight, norm.eps
