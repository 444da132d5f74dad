"""The depth-mixing matrix of a model on given tokens: what each read takes from each source."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headwater.models import Decoder
from headwater.residuals import mixing, record

Input = Literal["query", "key", "value"]
NOTES = {
    "scalar": "exact: one weight for each read, source and token",
    "channel": "a summary: weights differ between channels, and the matrix holds their average",
    "operator": "a summary: sources pass through matrices, and it holds how much of each is left in its share",
}


@dataclass(frozen=True)
class MixingMatrix:
    """M of h_r = sum_s M[r, s] v_s.

    Rows: reads 0 .. L - 1 and the final read. Columns: the embedding and the outputs.
    """

    tokens: Tensor  # (L + 1, L + 1, B, T)
    sublayers: tuple[str, ...]
    kind: str  # "scalar", "channel" or "operator"

    @property
    def average(self) -> Tensor:
        """Over tokens, (L + 1, L + 1)."""
        return self.tokens.flatten(2).mean(-1)

    @property
    def exact(self) -> bool:
        """True if the matrix, applied to the sources, gives back the reads."""
        return self.kind == "scalar"

    @property
    def note(self) -> str:
        return NOTES[self.kind]


def mixing_matrix(model: Decoder, tokens: Tensor, input: Input = "query") -> MixingMatrix:
    """The depth-mixing matrix of a decoder on a text: which read takes how much of which source.

    Arguments:
        model: a `Decoder`, which is run once, without gradients.
        tokens: (B, T).
        input: "query", "key" or "value", of residuals that route the three inputs of attention
        apart.

    Returns a `MixingMatrix`: `.tokens` (reads, sources, B, T), `.sublayers` their kinds, `.average`
    over tokens.
    """
    with torch.no_grad(), record(model.residual) as trace:
        model(tokens)
    stream = ("query", "key", "value").index(input)
    return MixingMatrix(
        mixing(model.residual, trace.sources, stream), model.sublayer_kinds, model.residual.mixes
    )
