"""What one forward pass shows, as data."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from headwater.folders import at_home


@dataclass(frozen=True)
class Top:
    """The likeliest tokens somewhere, the likeliest first: `ids` and `probabilities`, (..., k) each."""

    ids: Tensor
    probabilities: Tensor


@dataclass(frozen=True)
class Removal:
    """What happens without a source. `loss`: the change in nats, (places, T - 1), for the token after each position;
    positive: the source helped. `top`: what the model then expects, (places, T, k)."""

    loss: Tensor
    top: Top


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """One forward pass of a model over T tokens, by depth: what `headwater.inspect` returns.

    R = L + 1 reads (of each of L sublayers, and the output head's) look at S = L + 1 sources (the embedding, and the
    outputs of the sublayers). All tensors are on the CPU in fp32.

        inspection = headwater.inspect(model, tokens)
        print(inspection.mixing[-1].mean(-1))               # what the output head reads, averaged over tokens
        inspection.save("inspect.html")
    """

    name: str  # of the model, as the page shows it
    residual: str
    mixes: str  # what `mixing` is: a "scalar" a token; the average of one per "channel"; of an "operator", how much of
    # the source itself is in its share
    kinds: tuple[str, ...]  # of the L sublayers
    tokens: tuple[str, ...]  # as text
    ids: tuple[int, ...]
    texts: Mapping[int, str]  # of every token that stands anywhere here
    loss: Tensor  # (T - 1): nats, of the token after each position
    mixing: Tensor  # (R, S, T): the weight of a source in a read; zero above the diagonal
    parts: Mapping[
        str, Tensor
    ]  # the same for each head, or for query, key and value, where there are several
    read_size: Tensor  # (R, T): root mean square over channels
    source_size: Tensor  # (S, T)
    reads: Top  # (R, T, k): what a read says, through the final norm and the output head
    sources: Top  # (S, T, k): what a source says
    experts: Mapping[
        int, Top
    ]  # by sublayer, where it has experts: those chosen, and their weights, (T, k)
    removed: Removal | None  # of each source, taken away at all reads: S places
    removed_at: Removal | None  # at one read: places are `pairs`
    notes: tuple[str, ...] = ()  # what a reader must know before the numbers

    def __repr__(self) -> str:
        """One line: a prompt would print as a thousand lines of numbers."""
        sizes = f"{len(self.tokens)} tokens, {len(self.kinds) + 1} reads"
        return f"<Inspection of {self.name}: {sizes}; .save('inspect.html') writes its page>"

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(read, source) for each place of `removed_at`: the lower triangle, read by read."""
        return [(read, source) for read in range(len(self.kinds) + 1) for source in range(read + 1)]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as lists, numbers and text, under the names of the fields."""
        found = {field.name: _listed(getattr(self, field.name)) for field in fields(self)}
        return found | {"texts": {str(token): text for token, text in self.texts.items()}}

    def to_json(self) -> str:
        """Returns `to_dict` as JSON: numbers to seven digits, axes as the fields have them."""
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))

    def to_html(self, other: "Inspection | None" = None) -> str:
        """Returns one HTML page that needs no network; with `other`, of the same tokens, both models side by side.

        Raises UserError if the two have different tokens.
        """
        from .page import make_page

        return make_page([self] if other is None else [self, other])

    def save(self, path: str | Path, other: "Inspection | None" = None) -> Path:
        """Write `to_html(other)` to the file `path`, over a page of before but nothing else. Returns the path."""
        from headwater.analyze.report import write_page

        return write_page(at_home(path), self.to_html(other))

    def _repr_html_(self) -> str:
        """A notebook shows the page in a frame of its own, whose scripts reach nothing outside it."""
        from html import escape

        frame = 'sandbox="allow-scripts allow-downloads" style="width:100%;height:820px;border:0"'
        return f'<iframe title="headwater inspect" {frame} srcdoc="{escape(self.to_html(), quote=True)}"></iframe>'


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
    return (
        [_rounded(value) for value in values]
        if isinstance(values, list)
        else float(f"{values:.7g}")
    )
