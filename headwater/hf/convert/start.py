"""Measure what a residual is before training: every read against the plain residual's stream.

A pre-norm reader cancels a positive scale, but only down to the eps of its norm. With zero queries Attention Residuals
read the *mean* of n sources, whose mean square is n^2 smaller than their sum's; at the scale of a pretrained embedding
(mean square 1e-4) and an eps of 1e-5, that is not a detail. So a converted model multiplies read i by a fixed number,
n for Attention Residuals, which makes it the plain residual's stream itself, whatever the norms are and wherever
they stand. The numbers are measured on the residual's start, not written down per residual.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.residuals import Residual, build, parse
from headwater.residuals.record import replay


@dataclass(frozen=True)
class Start:
    """Scales with which reads are the stream up to a relative `error`, of the worst read; and reads of three."""

    scales: tuple[float, ...]
    error: float
    triples: tuple[int, ...]

    @property
    def plain(self) -> bool:
        return self.error < 1e-6


def measure_start(spec: str, dim: int, sublayers: int, kinds: Sequence[str] | None) -> Start:
    """Compare the reads of random sources at initialisation, in fp64, with their running sum."""
    name, options = parse(spec)
    words = [word for word in spec.partition(":")[2].split(",") if not word.startswith("backend=")]
    spec = ":".join((name, ",".join(words)))  # kernels have no fp64
    # A start does not depend on the width; heads must divide it.
    dim = min(dim, 256 * options.get("heads", 1))
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        # What a residual draws at random must not change what is said of it.
        torch.default_generator.manual_seed(0)
        sources = torch.randn(sublayers + 1, 2, dim, generator=generator, dtype=torch.float64)
        reads = replay(new_residual(spec, dim, sublayers, kinds).double(), list(sources))
    # Read i of the plain residual is the sum of the first i + 1 sources.
    scales: list[float] = []
    errors: list[float] = []
    for read, stream in zip(reads, sources.cumsum(0), strict=True):
        parts: tuple[Tensor, ...] = read if isinstance(read, tuple) else (read,)
        # One scale serves query, key and value; rounded so that a whole number of sources comes out whole.
        ratio = (stream * stream).sum() / (parts[0] * stream).sum()
        scale = round(float(ratio), 9)
        scales.append(scale)
        for part in parts:
            errors.append(float((part * scale - stream).norm() / stream.norm()))
    triples = tuple(i for i, read in enumerate(reads) if isinstance(read, tuple))
    start = Start(tuple(scales), max(errors), triples)
    return start if start.plain else Start((1.0,) * len(scales), start.error, triples)


def new_residual(spec: str, dim: int, sublayers: int, kinds: Sequence[str] | None) -> Residual:
    """Build a residual with its start values in fp32, whatever dtype is the default around it."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_default_dtype()  # from_pretrained sets one
        torch.set_default_dtype(torch.float32)
        try:
            return build(spec, dim, sublayers, kinds)
        finally:
            torch.set_default_dtype(before)
