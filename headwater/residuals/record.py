"""Looking at a residual while a model runs: its reads, the sublayers' outputs, the mixing matrix.

It lives beside the residuals, not in `analyze`, because the trainer logs by depth as it goes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
from torch import Tensor

from .base import Norm, Read, Residual, State, Watcher, apply_norm, hold_weights, unwatched, watched

Inputs = tuple[Tensor, ...]


@dataclass
class Trace:
    """One forward pass, by depth.

    `sources`: the embedding, then each sublayer's output, (..., D) each. `reads`: what each
        sublayer saw before its norm, the output head last. `weights`: the depth weights of each
        read, (N, ..., H).
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
        # The norm is applied here, behind what is recorded.
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
    """Inside, one eager forward pass of this thread through `residual` fills the trace. Tensors
    keep their graph.

    Returns a context whose value is the `Trace`: reads and sources by depth, empty until the pass
    has been made.
    Raises TypeError for what is no residual, such as the model that has one.

        with torch.no_grad(), record(model.residual) as trace:
            model(tokens)
    """
    # Nothing would go through another module, and the trace would stay empty.
    if not isinstance(residual, Residual):
        kind = type(residual).__name__
        raise TypeError(f"record takes a residual, such as model.residual; got a {kind}")
    trace = Trace()
    with watched(residual, _Recorder(trace)):
        yield trace


def replay(residual: Residual, sources: Sequence[Tensor]) -> list[Read]:
    """Return the reads (without norms, the final read last) that `residual` makes of sources,
    without running a sublayer."""
    state = residual.begin(sources[0])
    reads: list[Read] = []
    for i, y in enumerate(sources[1:]):
        x, state = residual.read(state, i)
        reads.append(x)
        state = residual.write(state, i, y)
    reads.append(residual.end(state))
    return reads


def linear_replay(residual: Residual, sources: Sequence[Tensor]) -> tuple[list[Tensor], list[Read]]:
    """Return leaves with the values of the sources, and the reads that `residual` makes of them
    with its weights held: a graph that is linear in the leaves."""
    with torch.enable_grad(), hold_weights(), unwatched():
        values = [source.detach().float() for source in sources]
        leaves = [value.clone().requires_grad_() for value in values]
        return leaves, replay(residual, leaves)


# The caller may be in inference mode, and what was recorded there has no gradients.
@torch.inference_mode(False)
def mixing(
    residual: Residual, sources: Sequence[Tensor], stream: int = 0, groups: int | None = None
) -> Tensor:
    """Compute the depth-mixing matrix M of h_l = sum_i M[l, i] v_i, per token.

    With its weights held, a residual is linear in its sources, so one vector-Jacobian product per
    read, along random signs, gives M exactly where mixing is the same for all channels, and the
    channel average where each has its own. Where sources pass through matrices, M is how much of a
    source itself is in its share of a read, J v: <v, J v> / <v, v>.

    Arguments:
        residual: any residual; L sublayers.
        sources: L + 1 tensors (..., D), the embedding and each sublayer's output: a trace's
            `sources`.
        stream: picks the query (0), key (1) or value (2) input of residuals that route them
            separately.
        groups: average over each of so many groups of channels apart, such as the heads of a read;
            None: over all.

    Returns (L + 1, L + 1, ...): reads, the output head last, by sources; with `groups`, they are
        the last axis.
    Raises ValueError for another number of sources: a trace has them after one eager forward pass.
    """
    if len(sources) != residual.sublayers + 1:
        raise ValueError(
            f"'{residual.spec}' mixes {residual.sublayers + 1} sources, the embedding and the "
            f"output of each sublayer; got {len(sources)}. A trace has them after one forward pass "
            "inside `record`; a compiled model leaves none"
        )
    if residual.mixes == "operator":
        rows = _own_parts(residual, sources, stream, groups or 1)
    else:
        rows = _along_signs(residual, sources, stream, groups or 1)
    return rows.squeeze(-1) if groups is None else rows


def _along_signs(residual: Residual, sources: Sequence[Tensor], stream: int, groups: int) -> Tensor:
    """Average s (J^T s) over each group of channels, for one draw of random signs s."""
    leaves, reads = linear_replay(residual, sources)
    shape = leaves[0].shape
    generator = torch.Generator().manual_seed(0)
    # Drawn on the CPU, so that they are the same on every device.
    bits = torch.randint(0, 2, shape, generator=generator)
    signs = (2 * bits - 1).to(leaves[0])
    sizes = (len(reads), len(leaves), *shape[:-1], groups)
    rows = torch.zeros(sizes, device=signs.device)
    for row, read in enumerate(reads):
        x = read[stream] if isinstance(read, tuple) else read
        # A read sees the sources before it.
        visible = leaves[: row + 1]
        gradients = torch.autograd.grad(
            x, visible, signs, retain_graph=True, materialize_grads=True
        )
        for column, gradient in enumerate(gradients):
            products = (gradient * signs).unflatten(-1, (groups, -1))
            rows[row, column] = products.mean(-1)
    return rows


@torch.inference_mode(False)
def shares_of(residual: Residual, sources: Sequence[Tensor]) -> list[list[Inputs]]:
    """Return what each read has from each source, J_li v_i of h_l = sum_i J_li v_i with weights
    held, exactly.

    Returns, by source, then by read from the first that can see it, one (..., D) for each input of
    the read.
    """
    leaves, reads = linear_replay(residual, sources)
    return [_column(leaf, reads[i:]) for i, leaf in enumerate(leaves)]


def _column(leaf: Tensor, reads: Sequence[Read]) -> list[Inputs]:
    """Compute J v for each read of one source v.

    The vector-Jacobian product u -> J^T u is linear in u; differentiated along v it gives J v.
    """
    inputs_by_read = [read if isinstance(read, tuple) else (read,) for read in reads]
    inputs = tuple(chain.from_iterable(inputs_by_read))
    along = [torch.zeros_like(x, requires_grad=True) for x in inputs]
    (product,) = torch.autograd.grad(inputs, leaf, along, create_graph=True, allow_unused=True)
    shares = tuple(torch.zeros_like(x) for x in inputs)
    # No product: none of the reads sees the source.
    if product is not None:
        v = leaf.detach()
        shares = torch.autograd.grad(product, along, v, materialize_grads=True)
    remaining = iter(shares)
    return [tuple(islice(remaining, len(read))) for read in inputs_by_read]


def _own_parts(residual: Residual, sources: Sequence[Tensor], stream: int, groups: int) -> Tensor:
    """<v, J v> / <v, v> over each group of channels; a source of zeros has none of itself
    anywhere."""
    tiny = torch.finfo(torch.float32).tiny
    first = sources[0]
    shape = (len(sources), len(sources), *first.shape[:-1], groups)
    rows = torch.zeros(shape, device=first.device)
    for column, shares_by_read in enumerate(shares_of(residual, sources)):
        v = sources[column].detach().float()
        v = v.unflatten(-1, (groups, -1))
        size = v.square().sum(-1).clamp_min(tiny)
        for row, shares in enumerate(shares_by_read, column):
            # A sublayer with one input has one share.
            share = shares[min(stream, len(shares) - 1)]
            share = share.unflatten(-1, (groups, -1))
            rows[row, column] = (share * v).sum(-1) / size
    return rows
