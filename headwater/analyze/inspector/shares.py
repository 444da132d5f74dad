"""The share of a source in a read: the loss of the read if the source goes and no weight changes.

With its weights held, a residual is linear in its sources: h_l = sum_i J_li v_i. The share is J_li v_i.
Where mixing is scalar, J_li is the weight M[l, i] of each token; elsewhere the product is taken exactly.
"""

from collections.abc import Sequence

from torch import Tensor

from headwater.residuals import Read, Residual, mixing
from headwater.residuals.record import shares_of

STREAMS = ("query", "key", "value")


class Shares:
    """The shares of every source in every read of one pass.

    `residual` mixed `sources` into `reads`, (1, T, D) each.
    """

    def __init__(
        self, residual: Residual, sources: Sequence[Tensor], reads: Sequence[Read]
    ) -> None:
        self.sources = [source[0].float() for source in sources]
        # One input, or query, key and value.
        self.inputs = max(len(read) if isinstance(read, tuple) else 1 for read in reads)
        self._mixing = [mixing(residual, sources, stream)[:, :, 0] for stream in range(self.inputs)]
        self._columns = None if residual.mixes == "scalar" else shares_of(residual, sources)

    def of(self, read: int, source: int, stream: int) -> Tensor:
        """The share of a source in an input of a read, (T, D). `stream`: 0 where there is one."""
        if self._columns is None:
            return self._mixing[stream][read, source][:, None] * self.sources[source]
        inputs = self._columns[source][read - source]
        return inputs[min(stream, len(inputs) - 1)][0]

    def weights(self, stream: int) -> Tensor:
        """(reads, sources, T), as `mixing` has them."""
        return self._mixing[stream]
