"""Looking at a residual while a model runs: what each read returned, what each sublayer wrote, and the mixing matrix.

It lives beside the residuals, not in `analyze`, because the trainer logs by depth as it goes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .base import Norm, Read, Residual, State, apply_norm, hold_weights


@dataclass
class Trace:
    """sources: the embedding, then each sublayer's output. reads: each read before its norm, the final one last."""

    sources: list[Tensor] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


@contextmanager
def record(residual: Residual) -> Iterator[Trace]:
    """Inside, one eager forward pass through `residual` fills the trace. Tensors keep their graph."""
    trace = Trace()
    begin, read, write, end = residual.begin, residual.read, residual.write, residual.end

    def recorded_begin(x: Tensor) -> State:
        trace.sources.append(x)
        return begin(x)

    def recorded_read(state: State, i: int, norm: Norm | None = None) -> tuple[Read, State]:
        trace.weights.append(residual.weights(state, i))
        x, state = read(state, i)
        trace.reads.append(x)
        return apply_norm(norm, x), state

    def recorded_write(state: State, i: int, y: Tensor) -> State:
        trace.sources.append(y)
        return write(state, i, y)

    def recorded_end(state: State, norm: Norm | None = None) -> Tensor:
        trace.weights.append(residual.weights(state, residual.sublayers))
        x = end(state)
        trace.reads.append(x)
        return apply_norm(norm, x)

    recorded = {"begin": recorded_begin, "read": recorded_read, "write": recorded_write, "end": recorded_end}
    residual.__dict__.update(recorded)  # instance attributes shadow the methods; nothing of the class changes
    try:
        yield trace
    finally:
        for name in recorded:
            del residual.__dict__[name]


def replay(residual: Residual, sources: Sequence[Tensor]) -> list[Read]:
    """The reads (un-normed, the final one last) that `residual` makes of given sources, without running a sublayer."""
    state = residual.begin(sources[0])
    reads: list[Read] = []
    for i, y in enumerate(sources[1:]):
        x, state = residual.read(state, i)
        reads.append(x)
        state = residual.write(state, i, y)
    reads.append(residual.end(state))
    return reads


def mixing(residual: Residual, sources: Sequence[Tensor], stream: int = 0) -> Tensor:
    """The depth-mixing matrix M of h_l = sum_i M[l, i] v_i, per token: (L + 1, L + 1, ...).

    With its weights held, a residual is linear in its sources, so one vector-Jacobian product per read, along random
    signs, gives M exactly where mixing is the same for all channels, and the channel average where it is not.
    `stream` picks the query, key or value input of residuals that route them separately.
    """
    leaves = [source.detach().float().requires_grad_() for source in sources]
    with torch.enable_grad(), hold_weights():
        reads = [read[stream] if isinstance(read, tuple) else read for read in replay(residual, leaves)]
    generator = torch.Generator().manual_seed(0)
    shape = leaves[0].shape
    signs = (torch.randint(0, 2, shape, generator=generator) * 2 - 1).to(leaves[0])
    rows = torch.zeros(len(reads), len(leaves), *shape[:-1], device=signs.device)
    for row, read in enumerate(reads):
        gradients = torch.autograd.grad(read, leaves[: row + 1], signs, retain_graph=True, allow_unused=True)
        for column, gradient in enumerate(gradients):
            if gradient is not None:
                rows[row, column] = (gradient * signs).mean(-1)
    return rows
