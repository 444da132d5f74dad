"""Measure what a residual is before training: every read against the plain residual's stream.

A pre-norm reader cancels a positive scale, but only down to the eps of its norm. With zero queries Attention Residuals
read the *mean* of n sources, whose mean square is n^2 smaller than their sum's; at the scale of a pretrained embedding
(mean square 1e-4) and an eps of 1e-5, that is not a detail. So a converted model multiplies read i by a fixed number,
n for Attention Residuals, which makes it the plain residual's stream itself, whatever the norms are and wherever
they stand. The numbers are measured on the residual's start, not written down per residual.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.residuals import Residual, build, parse
from headwater.residuals.record import replay


@dataclass(frozen=True)
class Start:
    """`scales[i]` times read i is the stream up to `error` (relative, the worst read); `triples`: reads of three."""

    scales: tuple[float, ...]
    error: float
    triples: tuple[int, ...]

    @property
    def plain(self) -> bool:
        return self.error < 1e-6


def measure_start(spec: str, dim: int, sublayers: int, kinds: Sequence[str] | None) -> Start:
    """Reads of random sources at initialisation, in fp64, against their running sum."""
    name, options = parse(spec)
    words = [word for word in spec.partition(":")[2].split(",") if not word.startswith("backend=")]
    spec = ":".join((name, ",".join(words)))  # kernels have no fp64
    dim = min(
        dim, 256 * options.get("heads", 1)
    )  # a start does not depend on the width; heads must divide it
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.default_generator.manual_seed(
            0
        )  # what a residual draws at random must not change what is said of it
        sources = torch.randn(sublayers + 1, 2, dim, generator=generator, dtype=torch.float64)
        reads = replay(new_residual(spec, dim, sublayers, kinds).double(), list(sources))
    scales: list[float] = []
    errors: list[float] = []
    for read, stream in zip(reads, sources.cumsum(0), strict=True):
        parts: tuple[Tensor, ...] = read if isinstance(read, tuple) else (read,)
        # One scale serves query, key and value; rounded so that a whole number of sources comes out whole.
        scale = round(float((stream * stream).sum() / (parts[0] * stream).sum()), 9)
        scales.append(scale)
        errors.extend(float((part * scale - stream).norm() / stream.norm()) for part in parts)
    triples = tuple(i for i, read in enumerate(reads) if isinstance(read, tuple))
    start = Start(tuple(scales), max(errors), triples)
    return start if start.plain else Start((1.0,) * len(scales), start.error, triples)


def new_residual(spec: str, dim: int, sublayers: int, kinds: Sequence[str] | None) -> Residual:
    """With its start values in fp32, whatever dtype is the default around it: `from_pretrained` sets one."""
    with torch.random.fork_rng(devices=[]), default_fp32():
        return build(spec, dim, sublayers, kinds)


@contextmanager
def default_fp32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
