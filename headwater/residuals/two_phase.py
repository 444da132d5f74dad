"""Attention Residuals in two phases over the fused operators: what the state holds, and who reads
what when.

Sublayers come in spans. When a span opens, all its queries read the finished sources at once
(phase 1). Each of its reads then merges what the span itself has produced so far (phase 2): the
running sum of a block, or, for Full Attention Residuals, the span's own outputs. A source is scored
for every later query in one pass: in full when it is written, in blocks by the read that opens the
next block.

A pipeline stage has the queries of its own reads only: it takes over the sources as they are
(`adopt`), scores them for its queries, and hands sources on (`settle`).
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

# Sublayers per span for Full Attention Residuals: N / span + span / 2 reads per sublayer, flat
# around here.
FULL_SPAN = 8

Tensors = tuple[Tensor, ...]


class Span(NamedTuple):
    """The state, named.

    `sources`: the finished sources, (..., D) each.
    `scores`: for each group of sources a tensor (..., sources, reads) per span to come. The sources
        that there were at first are one group, each span that finished since is another.
    `folded`: query times key weight of all R reads, (R, D).
    `waiting`: the results of phase 1 for the reads that remain in this span, the last read first:
        output (..., D), log-sum-exp (...), and in blocks the folded query (D,).
    `outputs`: what the span itself produced. In blocks: the sum without the newest output, if there
        is an older one, then the newest output, until the next block opens; before the first block,
        the embedding. In full: each output; then for each read that remains in this span the score
        of each output (..., 1, 1); then the scores of each output for later spans (..., 1, Q).
    """

    sources: Tensors
    scores: Tensors
    folded: Tensor
    waiting: Tensors = ()
    outputs: Tensors = ()

    def pack(self) -> State:
        return (*self.sources, *self.scores, self.folded, *self.waiting, *self.outputs)


class Counts(NamedTuple):
    """The number of tensors of each kind in a state, and of the reads that remain in its span."""

    sources: int
    scores: int
    waiting: int
    outputs: int
    remaining: int

    @property
    def length(self) -> int:
        return self.sources + self.scores + 1 + self.waiting + self.outputs

    @property
    def layout(self) -> Layout:
        names = [f"source {n}" for n in range(self.sources)]
        names += [f"scores {n}" for n in range(self.scores)]
        # A read that waits has its output and log-sum-exp, in blocks its query as well.
        names.append("queries")
        kinds = ("out", "lse", "query")[: self.waiting // max(1, self.remaining)]
        for n in reversed(range(self.remaining)):
            names += [f"{kind} {n}" for kind in kinds]
        return (*names, *(f"output {n}" for n in range(self.outputs)))


class TwoPhase:
    """The schedule for reads `first` to `stop` of `sublayers` in blocks of `block`.

    block=1 is the full residual; `stop == sublayers` includes the final read. `backend` triton runs
    over the kernels, reference over the plain PyTorch operators, and auto over the kernels on a GPU
    and the plain operators elsewhere.
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
        self.sublayers = sublayers
        self.eps = eps
        self.backend = backend
        self.full = block == 1
        self.span = FULL_SPAN if self.full else block
        self.first = first
        # Reads end before `last`; the final read belongs to the last stage.
        self.last = sublayers + 1 if stop in (None, sublayers) else stop
        places = range(first, min(self.last, sublayers) + 1)
        opening_reads = [i for i in range(first, self.last) if self._into(i) == 0]

        # For each place: how many reads each span has that opens there or later.
        self.reads_to_come: dict[int, list[int]] = {}
        for i in (*places, places.stop):
            self.reads_to_come[i] = [self._reads_of(read) for read in opening_reads if read >= i]

        self.table: dict[tuple[Next, int], Counts] = {}
        for i in places:
            self.table["read", i] = self._counts(i, i)
            if i < sublayers:
                self.table["write", i] = self._counts(i, i + 1)
        self.lengths = {place: counts.length for place, counts in self.table.items()}

    def _counts(self, i: int, next_read: int) -> Counts:
        """Count a state's tensors before read i, or, with next_read = i + 1, before write i.

        Before the write, read i has taken its part away.
        """
        into = self._into(i)
        reading = next_read == i
        remaining = max(0, self._span_end(i) - next_read)
        # A read that opens a span has yet to make what its other reads wait for.
        if reading and into == 0:
            remaining = 0
        scored = self._scored(i, reading)
        groups = scored - max(0, self._scored(self.first, True) - 1)
        scores = groups * len(self.reads_to_come[next_read])
        if self.full:
            sources, outputs = 1 + i - into, into * (remaining + 2)
            return Counts(sources, scores, 2 * remaining, outputs, remaining)
        # The newest output, and the sum of the older ones, if there are any.
        outputs = min(into, 1)
        if reading:
            outputs = 1 if i == self.first else min(2, (i - 1) % self.span + 1)
        return Counts(scored, scores, 3 * remaining, outputs, remaining)

    def _scored(self, i: int, reading: bool) -> int:
        """Count the sources that have scores before read or write `i`: the embedding and finished
        spans.

        A block is scored when the next one opens.
        """
        opens_block = reading and not self.full and self._into(i) == 0
        return 1 + self._done(i) - opens_block

    def _reads_of(self, start: int) -> int:
        return 1 if start == self.sublayers else self._span_end(start) - start

    def _into(self, i: int) -> int:
        """Count the sublayers of its span that come before read `i`."""
        return 0 if i == self.sublayers else i % self.span

    def _done(self, i: int) -> int:
        """Count the spans that are finished before read `i`."""
        return ceil(i / self.span) if i == self.sublayers else i // self.span

    def _span_end(self, i: int) -> int:
        """Return the read after the last of the span of sublayer i, as far as this schedule
        goes."""
        end = (i // self.span + 1) * self.span
        return min(end, self.sublayers, self.last)

    def plain(self, x: Tensor) -> bool:
        """Return whether tensors like `x` are read by the plain operators."""
        return self.backend == "reference" or (self.backend == "auto" and not x.is_cuda)

    def operators(self, x: Tensor) -> Any:
        """Return the module with `score`, `mix`, `open_block` and `merge` for tensors like `x`.

        It is that of the kernels, or that of their references, which have the same signatures.
        """
        if self.plain(x):
            return reference
        from headwater.ops.depth import autograd

        return autograd

    def holds(self, state: State, verb: Next, i: int) -> bool:
        """Return whether a state is one of this schedule; the sources alone are always fewer."""
        return len(state) == self.lengths.get((verb, i))

    def layout(self, verb: Next, i: int) -> tuple[Layout, ...]:
        counts = self.table.get((verb, i))
        return () if counts is None else (counts.layout,)

    def unpack(self, state: State, verb: Next, i: int) -> Span:
        """Name the tensors of the state before read or write `i`."""
        counts = self.table[verb, i]
        queries = counts.sources + counts.scores
        outputs = queries + 1 + counts.waiting
        return Span(
            sources=state[: counts.sources],
            scores=state[counts.sources : queries],
            folded=state[queries],
            waiting=state[queries + 1 : outputs],
            outputs=state[outputs:],
        )

    def begin(self, x: Tensor, folded: Tensor) -> State:
        # In blocks the embedding counts as an output until the first block opens.
        x = x.contiguous()
        if not self.full:
            return Span((), (), folded, (), (x,)).pack()
        sizes = self.reads_to_come[self.first]
        x, folded, scores = self._score(x, folded, self.first, sizes)
        return Span((x,), scores, folded).pack()

    def enter(self, x: Tensor, folded: Tensor) -> State:
        """Return the state before write 0, if read 0 was `x` itself.

        The result of phase 1 over a single source is that source, for each query.
        """
        sizes = self.reads_to_come[0]
        x, folded, scores = self._score(x.contiguous(), folded, 0, sizes)
        first_span, *later_spans = scores
        # Read 0 is made: the scores of the others, one source's log-sum-exp.
        remaining = first_span.squeeze(-2)[..., 1:]
        lses = remaining.movedim(-1, 0).contiguous().unbind(0)
        queries = folded[1 : 1 + len(lses)].unbind(0)
        waiting = self._wait((x,) * len(lses), lses, queries)
        return Span((x,), tuple(later_spans), folded, waiting).pack()

    def _score(
        self, source: Tensor, folded: Tensor, i: int, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Return the source, `folded`, and scores (..., 1, size) for groups of `sizes` reads from
        read `i` on.

        The source and the queries that are returned take the place of the arguments.
        """
        start = i - self.first
        # A stage may have made all its reads.
        if start == len(folded):
            shape = (*source.shape[:-1], 1, 0)
            nothing = source.new_empty(shape, dtype=torch.float32)
            return source, folded, (nothing,) * len(sizes)
        score = self.operators(source).score
        return score(source, folded, self.eps, start=start, sizes=sizes)

    def _wait(self, outs: Tensors, lses: Tensors, queries: Tensors) -> Tensors:
        """Put together what the remaining reads of a span will take, the last read first."""
        kinds = (outs, lses) if self.full else (outs, lses, queries)
        reads = list(zip(*kinds))
        return tuple(chain.from_iterable(reversed(reads)))

    def adopt(self, state: State, folded: Tensor) -> State:
        """Return the state before read `first` from its sources only, (..., D) each, the running
        sum of a block last."""
        counts = self.table["read", self.first]
        inside = self._into(self.first) > 0
        tensors = [source.contiguous() for source in state]
        finished, outputs = tensors[: counts.sources], tensors[counts.sources :]
        sizes = list(self.reads_to_come[self.first])
        # The reads that remain in this span come first.
        if inside:
            sizes.insert(0, counts.remaining)

        # Each finished source is scored for this stage's queries.
        sources: list[Tensor] = []
        scores_by_source: list[Tensors] = []
        for source in finished:
            source, folded, scores = self._score(source, folded, self.first, sizes)
            sources.append(source)
            scores_by_source.append(scores)
        joined = tuple(torch.cat(pieces, -2) for pieces in zip(*scores_by_source))
        if not inside:
            return Span(tuple(sources), joined, folded, (), tuple(outputs)).pack()

        # Inside a span, phase 1 is made here for the reads that remain in it.
        this_span, later_spans = joined[0], joined[1:]
        waiting: Tensors = ()
        if counts.remaining:
            outs, lses, sources = self.operators(this_span).mix(sources, (this_span,))
            waiting = self._wait(outs, lses, folded[: counts.remaining].unbind(0))
        if not self.full:
            return Span(tuple(sources), later_spans, folded, waiting, (outputs[0],)).pack()
        span = Span(tuple(sources), later_spans, folded, waiting)
        for output in outputs:
            span = self._absorb(span, output, self.first)
        return span.pack()

    def read(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        if self._into(i) == 0:
            return self._open(self.unpack(state, "read", i), i, norm)
        if self.full:
            return self._merge_outputs(self.unpack(state, "read", i), i, norm)
        return self._merge_sum(state, i, norm)

    def write(self, state: State, i: int, y: Tensor) -> State:
        y = y.contiguous()
        if not self.full:
            return (*state, y)
        # Of the full residual each output is scored when it is written.
        span = self._absorb(self.unpack(state, "write", i), y, i + 1)
        if i % self.span < self.span - 1 and i < self.sublayers - 1:
            return span.pack()
        # The span is finished: its outputs become sources, and their scores one more group.
        count = i % self.span + 1
        outputs, scores = span.outputs[:count], span.outputs[count:]
        sizes = self.reads_to_come[i + 1]
        later = torch.cat(scores, -2).split(sizes, -1) if sizes else ()
        sources = (*span.sources, *outputs)
        return Span(sources, (*span.scores, *later), span.folded).pack()

    def _absorb(self, span: Span, y: Tensor, i: int) -> Span:
        """Add an output to a span of the full residual, before read `i`.

        It is scored for each read that remains in the span, and for later spans.
        """
        # Two tensors wait for each read: an output and its log-sum-exp.
        remaining = len(span.waiting) // 2
        before = len(span.outputs) // (remaining + 2)
        later_reads = len(span.folded) - (i - self.first) - remaining
        sizes = [1] * remaining + [later_reads]
        y, folded, scores = self._score(y, span.folded, i, sizes)
        outputs: list[Tensor] = []
        for k, new in enumerate((y, *scores)):
            outputs += [*span.outputs[k * before : (k + 1) * before], new]
        return Span(span.sources, span.scores, folded, span.waiting, tuple(outputs))

    def has_lost_gradients(self, state: State, i: int) -> bool:
        """Return whether the parts of a state that queries went into were made without gradients.

        They are where lower layers are frozen by no_grad, or a state is detached. A read that takes
        such a part would teach its query nothing.
        """
        span = self.unpack(state, "read", i)
        # Outputs of phase 1 have gradients by their sources alone.
        lses_and_queries = span.waiting[1 :: 2 if self.full else 3]
        parts = [span.folded, *span.scores, *lses_and_queries]
        if self.full:
            parts += span.outputs[self._into(i) :]
        return not all(tensor.requires_grad or not tensor.numel() for tensor in parts)

    def settle(self, state: State, i: int) -> State:
        """Return the sources of read `i`, a state that any read can continue from."""
        span = self.unpack(state, "read", i)
        if self.full:
            return (*span.sources, *span.outputs[: self._into(i)])
        return (*span.sources, sum(span.outputs[1:], span.outputs[0]))

    def _open(self, span: Span, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        """Make read `i`, which opens a span: phase 1 for all reads of the span."""
        sizes = self.reads_to_come[i]
        # Each group of sources has scores for this span first, then for later spans.
        pieces = span.scores[:: len(sizes)]
        later = tuple(piece for n, piece in enumerate(span.scores) if n % len(sizes))
        weight, eps = self._folded_norm(norm, span.folded)
        # After the final read nobody takes sources from here.
        thread = i < self.sublayers
        operators = self.operators(span.folded)
        folded = span.folded
        queries: Tensors = ()
        if self.full:
            outs, lses, sources = operators.mix(span.sources, pieces, weight, eps, thread=thread)
            lses = lses[1:]
        else:
            # The block's sum becomes a source, and is scored for later reads.
            *partial, y = span.outputs
            total = partial[0] if partial else None
            start = i - self.first
            options = {"eps": self.eps, "start": start, "sizes": sizes, "thread": thread}
            outs, lses, queries, folded, sources, scores = operators.open_block(
                y, total, folded, span.sources, pieces, weight, eps, **options
            )
            later += scores
        waiting = self._wait(outs[1:], lses, queries)
        # The sources come back with their gradients threaded.
        state = Span(sources or span.sources, later, folded, waiting).pack()
        return outs[0] if weight is not None else apply_norm(norm, outs[0]), state

    def _merge_sum(self, state: State, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        """Make read `i` inside a block: phase 2 with the block's sum, which the newest output
        joins."""
        # The tensors of this read are the last ones of the state: nothing else is unpacked.
        count = 3 + self.table["read", i].outputs
        out, lse, query, *partial, y = state[-count:]
        total = partial[0] if partial else None
        weight, norm_eps = self._folded_norm(norm, y)
        options = {"eps": self.eps, "norm_eps": norm_eps}
        x, total = self.operators(y).merge(y, total, out, lse, query, None, weight, **options)
        return x if weight is not None else apply_norm(norm, x), (*state[:-count], total)

    def _merge_outputs(self, span: Span, i: int, norm: Norm | None) -> tuple[Tensor, State]:
        """Make read `i` inside a span of the full residual: phase 2 with the outputs of the
        span."""
        into = self._into(i)
        outputs, scores = span.outputs[:into], span.outputs[into : 2 * into]
        *waiting, out, lse = span.waiting
        weight, eps = self._folded_norm(norm, out)
        # Phase 1 counts as one more source, whose score is its log-sum-exp.
        pieces = (lse.view(*lse.shape, 1, 1), *scores)
        x, outputs = self.operators(out).merge_outputs(out, outputs, pieces, weight, eps)
        later = span.outputs[2 * into :]
        state = Span(*span[:3], tuple(waiting), (*outputs, *later)).pack()
        return x if weight is not None else apply_norm(norm, x), state

    def _folded_norm(self, norm: Norm | None, x: Tensor) -> tuple[Tensor | None, float]:
        """Return weight and eps of a norm that a kernel can apply itself, else (None, unused).

        It can apply torch's, and those of classes with `folds = True`: the forward of another may
        compute anything. A norm with hooks is called, since FSDP's unsharding is one. So is every
        norm over the plain operators, which would gain nothing.
        """
        if self.plain(x) or not isinstance(norm, nn.RMSNorm) or hooked(norm):
            return None, 1e-6
        folds = type(norm) is nn.RMSNorm or getattr(norm, "folds", False)
        if not folds or norm.weight is None or norm.eps is None:
            return None, 1e-6
        return norm.weight, norm.eps
