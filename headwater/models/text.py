"""Text continued by a decoder: prompts in, pieces out as they come, stop words and half characters held back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

from .decoder import Decoder
from .generate import Engine, stream
from .sampling import Portion, Sampling

HALF = "\ufffd"  # what a decoder of bytes shows for a character whose last bytes have not come yet


class Words(Protocol):
    """What is needed of a tokenizer."""

    @property
    def end_of_text(self) -> int: ...

    def encode(self, text: str) -> Any: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Piece:
    """The continuation of one prompt: what may be shown of it, and whether a stop word has ended it."""

    def __init__(self, tokenizer: Words, stops: Sequence[str], ends: Collection[int] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, [word for word in stops if word]
        self.ends = {tokenizer.end_of_text, *ends}
        self.text, self.shown, self.done = "", 0, False

    def add(self, ids: Sequence[int]) -> bool:
        """After all new tokens so far; True if the text has ended."""
        kept = ids[:-1] if ids[-1] in self.ends else ids
        self.text = self.tokenizer.decode(kept)
        found = [place for word in self.stops if (place := self.text.find(word)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        self.done = bool(found) or kept is not ids
        return self.done

    def take(self, *, last: bool = False) -> str:
        """What has not been shown and will not change: not the beginning of a stop word, nor half a character."""
        end = len(self.text)
        if not (self.done or last):
            end = len(self.text.rstrip(HALF))
            end -= max((_overlap(self.text[:end], word) for word in self.stops), default=0)
        new = self.text[self.shown : max(end, self.shown)]
        self.shown += len(new)
        return new


def _overlap(text: str, word: str) -> int:
    """How many characters at the end of a text are the beginning of a word."""
    return next(
        (n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0
    )


def continue_texts(
    model: Decoder | Engine,
    tokenizer: Words,
    prompts: Sequence[str],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    *,
    stops: Sequence[str] = (),
    seed: int = 0,
    prefill_chunk: Portion = "auto",
) -> Iterator[list[str]]:
    """Continue texts, all at once, each until it ends by itself.

    Arguments:
        model, tokenizer: of a run, as `headwater.train.load_run` gives them.
        prompts: texts of any lengths; an empty one begins a text.
        max_new_tokens, seed, prefill_chunk: as in `generate`.
        sampling: a `Sampling`.
        stops: words that end a text; they are not part of it.

    Returns an iterator: at each step the new text of every prompt, "" where there is none; last what was held back.

        for (new,) in continue_texts(run.model, run.tokenizer, ["def "], 50):
            print(new, end="", flush=True)
    """
    ids = [list(map(int, tokenizer.encode(text))) or [tokenizer.end_of_text] for text in prompts]
    ends = () if isinstance(model, Decoder) else model.ends
    pieces = [Piece(tokenizer, stops, ends) for _ in prompts]
    steps = stream(
        model, ids, max_new_tokens, sampling, seed=seed, prefill_chunk=prefill_chunk,
        ended=lambda row, new: pieces[row].add(new),
    )  # fmt: skip
    for number, _ in enumerate(steps):
        if number:  # `add` has seen a token when the next one comes
            yield [piece.take() for piece in pieces]
    yield [piece.take(last=True) for piece in pieces]
