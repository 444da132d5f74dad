"""The share of a source in a read: what the read would lose if the source were taken away and no weight changed.

With its weights held, a residual is linear in its sources: h_l = sum_i J_li v_i. The share is J_li v_i. Where mixing is
scalar, J_li is the weight M[l, i] of each token; elsewhere the product is taken exactly.
"""

from collections.abc import Sequence

from torch import Tensor

from headwater.residuals import Read, Residual, mixing
from headwater.residuals.record import shares_of

STREAMS = ("query", "key", "value")


class Shares:
    """Of every source in every read of one pass, as `residual` mixed its `sources` into `reads`, (1, T, D) each."""

    def __init__(
        self, residual: Residual, sources: Sequence[Tensor], reads: Sequence[Read]
    ) -> None:
        self.sources = [source[0].float() for source in sources]
        self.inputs = max(
            len(read) if isinstance(read, tuple) else 1 for read in reads
        )  # one, or query, key and value
        self._mixing = [mixing(residual, sources, stream)[:, :, 0] for stream in range(self.inputs)]
        self._columns = None if residual.mixes == "scalar" else shares_of(residual, sources)

    def of(self, read: int, source: int, stream: int) -> Tensor:
        """What a read has from a source, (T, D). `stream`: which of its inputs, 0 where it has one."""
        if self._columns is not None:
            parts = self._columns[source][read - source]
            return parts[min(stream, len(parts) - 1)][0]
        return self._mixing[stream][read, source][:, None] * self.sources[source]

    def weights(self, stream: int) -> Tensor:
        """(reads, sources, T), as `mixing` has them."""
        return self._mixing[stream]
