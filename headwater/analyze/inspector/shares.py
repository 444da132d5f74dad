"""The share of a source in a read: what the read would lose if the source were taken away and no weight changed.

With its weights held, a residual is linear in its sources: h_l = sum_i J_li v_i. The share is J_li v_i. Where mixing is
scalar, J_li is the weight M[l, i] of each token; elsewhere the product is taken exactly, by differentiating the
vector-Jacobian product u -> J_li^T u, which is linear in u, along v_i.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.residuals import Read, Residual, mixing
from headwater.residuals.record import linear_replay

STREAMS = ("query", "key", "value")


class Shares:
    """Of every source in every read of one pass, as `residual` mixed its `sources` into `reads`, (1, T, D) each."""

    def __init__(self, residual: Residual, sources: Sequence[Tensor], reads: Sequence[Read]) -> None:
        self.sources = [source[0].float() for source in sources]
        self.inputs = max(len(read) if isinstance(read, tuple) else 1 for read in reads)  # one, or query, key and value
        self.mixes = residual.mixes
        self._mixing = [mixing(residual, sources, stream)[:, :, 0] for stream in range(self.inputs)]
        self._columns: list[list[tuple[Tensor, ...]]] | None = None
        if self.mixes != "scalar":
            leaves, held = linear_replay(residual, sources)
            self._columns = [_column(leaves[i], held[i:]) for i in range(len(leaves))]

    def of(self, read: int, source: int, stream: int) -> Tensor:
        """What a read has from a source, (T, D). `stream`: which of its inputs, 0 where it has one."""
        if self._columns is not None:
            parts = self._columns[source][read - source]
            return parts[min(stream, len(parts) - 1)]
        return self._mixing[stream][read, source][:, None] * self.sources[source]

    def weights(self, stream: int) -> Tensor:
        """(reads, sources, T). One weight for all channels, or their average; where sources pass through matrices, how
        much of the source itself is in its share, <v, J v> / <v, v>: `mixing` would estimate, which one token shows."""
        if self.mixes != "operator":
            return self._mixing[stream]
        found = torch.zeros_like(self._mixing[stream])
        for source, v in enumerate(self.sources):
            for read in range(source, len(self.sources)):
                found[read, source] = (self.of(read, source, stream) * v).sum(-1) / v.square().sum(-1)
        return found


def _column(leaf: Tensor, reads: Sequence[Read]) -> list[tuple[Tensor, ...]]:
    """Shares of one source in the reads that can see it."""
    parts = [read if isinstance(read, tuple) else (read,) for read in reads]
    flat = [part for read in parts for part in read]
    along = [torch.zeros_like(part, requires_grad=True) for part in flat]
    (pulled,) = torch.autograd.grad(flat, leaf, along, create_graph=True, allow_unused=True)
    pushed = (
        [None] * len(flat) if pulled is None else torch.autograd.grad(pulled, along, leaf.detach(), allow_unused=True)
    )
    shares = iter(torch.zeros_like(part[0]) if share is None else share[0] for part, share in zip(flat, pushed))
    return [tuple(next(shares) for _ in read) for read in parts]
