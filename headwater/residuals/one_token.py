"""Residuals for one token of every row, in tensors that stay where they are: for a decoding step.

A read is not computed by itself: a `Reading` is handed to the projections that follow, whose
kernels fold the norm and the merge into their products (`headwater.ops.decode`). A write is folded
into the product that makes the output.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.ops.decode import Merge, Norm, open_span, project
from headwater.ops.numerics import accumulation_dtype
from headwater.ops.routing import Backend

BESIDE = True  # on a GPU, what later reads need is computed beside the sublayer that does not


class Reading(NamedTuple):
    """A read that is not computed yet: x (B, D), which may be merged, and is normed."""

    x: Tensor
    norm: Norm
    merge: Merge | None

    def project(self, *weights: Tensor, gated: bool = False, backend: Backend) -> Tensor:
        return project(
            self.x, weights, norm=self.norm, merge=self.merge, gated=gated, backend=backend
        )


class OneToken(ABC):
    """A residual for one token of every row."""

    backend: Backend

    @abstractmethod
    def begin(self) -> Tensor:
        """Return where the embedding goes, (B, D)."""

    @abstractmethod
    def read(self, i: int, norm: Norm) -> Reading:
        """Prepare what sublayer i reads."""

    @abstractmethod
    def write(self, i: int, y: Tensor, weight: Tensor) -> None:
        """Absorb sublayer i's output, y (B, N) times weight (D, N)."""

    @abstractmethod
    def end(self, norm: Norm) -> Reading:
        """Prepare what the head reads."""


class PlainStream(OneToken):
    """The plain residual: a stream (B, D) to which every output is added."""

    def __init__(self, stream: Tensor, backend: Backend) -> None:
        self.stream, self.backend = stream, backend

    def begin(self) -> Tensor:
        return self.stream

    def read(self, i: int, norm: Norm) -> Reading:
        return Reading(self.stream, norm, None)

    def write(self, i: int, y: Tensor, weight: Tensor) -> None:
        project(y, (weight,), add=self.stream, out=self.stream, backend=self.backend)

    def end(self, norm: Norm) -> Reading:
        return Reading(self.stream, norm, None)


class BlockSources(OneToken):
    """Attention Residuals in two phases: sources, of which the newest is its block's sum so far.

    Every read merges the newest source with what its query reads in the sources before. At the
    start of a block those are the same for the queries of its other sublayers and of the next
    block's first sublayer: one launch reads them for all these queries, beside the block's first
    sublayer, which needs none of it. So no sublayer waits for it, on a GPU.

    Arguments:
        block, eps: sublayers of a block, and eps of the keys' norm.
        queries: of all reads, times the keys' norm weight, (sublayers + 1, D).
        count: sources at the final read.
        stream: any tensor (B, D) with the dtype and the device of the stream.
    """

    def __init__(
        self,
        block: int,
        eps: float,
        queries: Tensor,
        count: int,
        stream: Tensor,
        backend: Backend,
    ) -> None:
        self.block, self.eps, self.queries, self.backend = block, eps, queries, backend
        self.sublayers = len(queries) - 1
        self.sources = stream.new_empty(count, *stream.shape)
        # Two of each: one is written while the next read is still of the other. Rows of `lses`
        # begin at multiples of 16 bytes: kernels are compiled once for such addresses, and once for
        # others.
        rows, span = len(stream), min(block, self.sublayers)
        self.outs = stream.new_empty(2, span, *stream.shape)
        wide = accumulation_dtype(stream.dtype)
        padded = rows + -rows % 4
        lses = torch.empty(2, span, padded, dtype=wide, device=stream.device)
        self.lses = lses[..., :rows]
        self.beside = _stream_beside(stream.device) if BESIDE and stream.is_cuda else None

    def begin(self) -> Tensor:
        return self.sources[0]

    def read(self, i: int, norm: Norm) -> Reading:
        reading = self._newest(i, norm)
        if i % self.block:
            return reading
        if self.beside is None:
            self._open(i)
            return reading
        self.beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.beside):
            self._open(i)
        return reading

    def write(self, i: int, y: Tensor, weight: Tensor) -> None:
        newest = self.sources[1 + i // self.block]
        # The first output of a block is its sum so far.
        add = None if i % self.block == 0 else newest
        project(y, (weight,), add=add, out=newest, backend=self.backend)

    def end(self, norm: Norm) -> Reading:
        return self._newest(self.sublayers, norm)

    def _open(self, i: int) -> None:
        """Read the sources before sublayer i for queries i + 1 to the next block's first."""
        turn = i // self.block % 2
        # One launch for all queries that read these sources.
        queries = self.queries[i + 1 : i + 1 + self.block]
        finished = self.sources[: 1 + i // self.block]
        outs = self.outs[turn, : len(queries)]
        lses = self.lses[turn, : len(queries)]
        open_span(finished, queries, self.eps, outs, lses, backend=self.backend)

    def _newest(self, i: int, norm: Norm) -> Reading:
        """The newest source before sublayer i, and what its query reads in the others."""
        if i == 0:
            return Reading(self.sources[0], norm, None)
        span, place = divmod(i - 1, self.block)
        # The first read that needs what was computed beside waits for it.
        if self.beside is not None and place == 0:
            torch.cuda.current_stream().wait_stream(self.beside)
        out, lse = self.outs[span % 2, place], self.lses[span % 2, place]
        merge = Merge(out, lse, self.queries[i], self.eps)
        return Reading(self.sources[1 + span], norm, merge)


@functools.cache  # one a GPU: what runs there waits for all before it and is waited for
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
