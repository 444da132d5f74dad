"""Looking at a residual while a model runs: what each read returned, what each sublayer wrote, and the mixing matrix.

It lives beside the residuals, not in `analyze`, because the trainer logs by depth as it goes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .base import Norm, Read, Residual, State, Watcher, apply_norm, hold_weights, unwatched, watched


@dataclass
class Trace:
    """One forward pass, by depth.

    `sources`: the embedding, then each sublayer's output, (..., D) each. `reads`: what each sublayer saw before its
    norm, the output head last. `weights`: the depth weights of each read, (N, ..., H).
    """

    sources: list[Tensor] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


class _Recorder(Watcher):
    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def begin(self, residual: Residual, x: Tensor) -> State:
        self.trace.sources.append(x)
        return super().begin(residual, x)

    def read(
        self, residual: Residual, state: State, i: int, norm: Norm | None
    ) -> tuple[Read, State]:
        self.trace.weights.append(residual.weights(state, i))
        x, state = super().read(residual, state, i, None)
        self.trace.reads.append(x)
        return apply_norm(norm, x), state

    def write(self, residual: Residual, state: State, i: int, y: Tensor) -> State:
        self.trace.sources.append(y)
        return super().write(residual, state, i, y)

    def end(self, residual: Residual, state: State, norm: Norm | None) -> Tensor:
        self.trace.weights.append(residual.weights(state, residual.sublayers))
        x = super().end(residual, state, None)
        self.trace.reads.append(x)
        return apply_norm(norm, x)


@contextmanager
def record(residual: Residual) -> Iterator[Trace]:
    """Inside, one eager forward pass of this thread through `residual` fills the trace. Tensors keep their graph.

    Returns a context whose value is the `Trace`: reads and sources by depth, empty until the pass has been made.
    Raises TypeError for what is no residual, such as the model that has one.

    with torch.no_grad(), record(model.residual) as trace:
        model(tokens)
    """
    _check_residual(residual, "record")
    trace = Trace()
    with watched(residual, _Recorder(trace)):
        yield trace


def _check_residual(residual: Residual, verb: str) -> None:
    if not isinstance(residual, Residual):
        kind = type(residual).__name__
        raise TypeError(f"headwater.{verb} takes a residual, such as model.residual; got a {kind}")


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


def linear_replay(residual: Residual, sources: Sequence[Tensor]) -> tuple[list[Tensor], list[Read]]:
    """Leaves with the values of the sources, and the reads that `residual` makes of them with its weights held: a graph
    that is linear in the leaves."""
    with torch.enable_grad(), hold_weights(), unwatched():
        leaves = [source.detach().float().clone().requires_grad_() for source in sources]
        return leaves, replay(residual, leaves)


@torch.inference_mode(
    False
)  # the caller may be in it, and what was recorded there has no gradients
def mixing(
    residual: Residual, sources: Sequence[Tensor], stream: int = 0, groups: int | None = None
) -> Tensor:
    """The depth-mixing matrix M of h_l = sum_i M[l, i] v_i, per token.

    With its weights held, a residual is linear in its sources, so one vector-Jacobian product per read, along random
    signs, gives M exactly where mixing is the same for all channels, and the channel average where each has its own.
    Where sources pass through matrices, M is how much of a source itself is in its share of a read, J v:
    <v, J v> / <v, v>.

    Arguments:
        residual: any residual; L sublayers.
        sources: L + 1 tensors (..., D), the embedding and each sublayer's output: a trace's `sources`.
        stream: picks the query (0), key (1) or value (2) input of residuals that route them separately.
        groups: average over each of so many groups of channels apart, such as the heads of a read; None: over all.

    Returns (L + 1, L + 1, ...): reads, the output head last, by sources; with `groups`, they are the last axis.
    Raises ValueError for another number of sources: a trace has them after one eager forward pass.
    """
    _check_residual(residual, "mixing")
    sources = tuple(sources)
    if len(sources) != residual.sublayers + 1:
        raise ValueError(
            f"'{residual.spec}' mixes {residual.sublayers + 1} sources, the embedding and the output of each sublayer; "
            f"got {len(sources)}. A trace has them after one forward pass inside `record`; a compiled model leaves none"
        )
    if residual.mixes == "operator":
        return _own_parts(shares_of(residual, sources), sources, stream, groups)
    leaves, all_inputs = linear_replay(residual, sources)
    reads = [read[stream] if isinstance(read, tuple) else read for read in all_inputs]
    generator = torch.Generator().manual_seed(0)
    shape = leaves[0].shape
    signs = (torch.randint(0, 2, shape, generator=generator) * 2 - 1).to(leaves[0])
    rows = torch.zeros(len(reads), len(leaves), *shape[:-1], groups or 1, device=signs.device)
    for row, read in enumerate(reads):
        gradients = torch.autograd.grad(
            read, leaves[: row + 1], signs, retain_graph=True, allow_unused=True
        )
        for column, gradient in enumerate(gradients):
            if gradient is not None:
                rows[row, column] = (gradient * signs).unflatten(-1, (groups or 1, -1)).mean(-1)
    return rows.squeeze(-1) if groups is None else rows


@torch.inference_mode(False)
def shares_of(residual: Residual, sources: Sequence[Tensor]) -> list[list[tuple[Tensor, ...]]]:
    """Return what each read has from each source, J_li v_i of h_l = sum_i J_li v_i with weights held, exactly.

    Returns, by source, then by read from the first that can see it, one (..., D) for each input of the read. The
    vector-Jacobian product u -> J^T u is linear in u; differentiated along v it gives J v.
    """
    leaves, reads = linear_replay(residual, sources)
    return [_column(leaf, reads[i:]) for i, leaf in enumerate(leaves)]


def _column(leaf: Tensor, reads: Sequence[Read]) -> list[tuple[Tensor, ...]]:
    parts = [read if isinstance(read, tuple) else (read,) for read in reads]
    flat = [part for read in parts for part in read]
    along = [torch.zeros_like(part, requires_grad=True) for part in flat]
    (pulled,) = torch.autograd.grad(flat, leaf, along, create_graph=True, allow_unused=True)
    pushed = (
        [None] * len(flat)
        if pulled is None
        else torch.autograd.grad(pulled, along, leaf.detach(), allow_unused=True)
    )
    shares = iter(
        torch.zeros_like(part) if share is None else share for part, share in zip(flat, pushed)
    )
    return [tuple(next(shares) for _ in read) for read in parts]


def _own_parts(
    columns: list[list[tuple[Tensor, ...]]],
    sources: Sequence[Tensor],
    stream: int,
    groups: int | None,
) -> Tensor:
    """<v, J v> / <v, v> over each group of channels; a source of zeros has none of itself anywhere."""
    shape = (len(sources), len(sources), *sources[0].shape[:-1], groups or 1)
    rows = torch.zeros(shape, device=sources[0].device)
    for column, reads in enumerate(columns):
        v = sources[column].detach().float().unflatten(-1, (groups or 1, -1))
        size = v.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
        for row, parts in enumerate(reads, column):
            share = parts[min(stream, len(parts) - 1)]
            rows[row, column] = (share.unflatten(-1, (groups or 1, -1)) * v).sum(-1) / size
    return rows.squeeze(-1) if groups is None else rows
