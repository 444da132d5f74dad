"""One forward pass, taken apart: the data that an inspection holds and its page draws."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Top:
    """Likely tokens, the likeliest first: `ids` and `probabilities`, (..., k) each."""

    ids: Tensor
    probabilities: Tensor


@dataclass(frozen=True)
class Removal:
    """The effect of taking sources away.

    `loss`: the change in nats, (places, T - 1), for the token after each position; positive: the
    source helped. `top`: what the model then expects, (places, T, k).
    """

    loss: Tensor
    top: Top


@dataclass(frozen=True, kw_only=True)
class ForwardPass:
    """A forward pass of a model over T tokens, by depth.

    R = L + 1 reads (of each of L sublayers, and the output head's) look at S = L + 1 sources (the
    embedding, and the outputs of the sublayers). All tensors are on the CPU in fp32.
    """

    name: str  # of the model, as the page shows it
    residual: str
    # `mixing` is a "scalar" a token; the average of one per "channel"; of an "operator", how much
    # of the source itself is in its share.
    mixes: str
    kinds: tuple[str, ...]  # of the L sublayers
    tokens: tuple[str, ...]  # as text
    ids: tuple[int, ...]
    texts: Mapping[int, str]  # of every token that stands anywhere here
    loss: Tensor  # (T - 1): nats, of the token after each position
    mixing: Tensor  # (R, S, T): the weight of a source in a read; zero above the diagonal
    # The same for each head, or for query, key and value, where there are several.
    parts: Mapping[str, Tensor]
    read_size: Tensor  # (R, T): root mean square over channels
    source_size: Tensor  # (S, T)
    reads: Top  # (R, T, k): what a read says, through the final norm and the output head
    sources: Top  # (S, T, k): what a source says
    # By sublayer, where it has experts: the chosen ones and their weights, (T, k).
    experts: Mapping[int, Top]
    removed: Removal | None  # of each source, taken away at all reads: S places
    removed_at: Removal | None  # at one read: places are `pairs`
    notes: tuple[str, ...] = ()  # what a reader must know before the numbers

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(read, source) for each place of `removed_at`: the lower triangle, read by read."""
        pairs = []
        for read in range(len(self.kinds) + 1):
            pairs += [(read, source) for source in range(read + 1)]
        return pairs

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as lists, numbers and text, under the names of the fields."""
        values = {field.name: _listed(getattr(self, field.name)) for field in fields(self)}
        values["texts"] = {str(token): text for token, text in self.texts.items()}
        return values

    def to_json(self) -> str:
        """Returns `to_dict` as JSON: numbers to seven digits, axes as the fields have them."""
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))


def _listed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _rounded(value.tolist())
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    if isinstance(value, Top):
        return {"ids": value.ids.tolist(), "probabilities": _listed(value.probabilities)}
    if isinstance(value, Removal):
        return {"loss": _listed(value.loss), "top": _listed(value.top)}
    return value


def _rounded(values: Any) -> Any:
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    return float(f"{values:.7g}")
