"""The share of a source in a read: the loss of the read if the source goes and no weight changes.

With its weights held, a residual is linear in its sources: h_l = sum_i J_li v_i. The share is J_li
v_i. Where mixing is scalar, J_li is the weight M[l, i] of each token; elsewhere the product is
taken exactly.
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
        # A sublayer has one input, or query, key and value.
        self.inputs = max(len(read) if isinstance(read, tuple) else 1 for read in reads)
        self._mixing = []
        for stream in range(self.inputs):
            self._mixing.append(mixing(residual, sources, stream)[:, :, 0])
        # Where weights are numbers they suffice; else the exact products are taken, by source.
        self._products = None
        if residual.mixes != "scalar":
            self._products = shares_of(residual, sources)

    def of(self, read: int, source: int, stream: int) -> Tensor:
        """The share of a source in an input of a read, (T, D). `stream`: 0 where there is one."""
        if self._products is None:
            weights = self._mixing[stream][read, source]
            return weights[:, None] * self.sources[source]
        # A source has a product for each read after it; the head reads one input where others read three.
        inputs = self._products[source][read - source]
        return inputs[min(stream, len(inputs) - 1)][0]

    def weights(self, stream: int) -> Tensor:
        """Return the mixing weights of an input, (reads, sources, T)."""
        return self._mixing[stream]
