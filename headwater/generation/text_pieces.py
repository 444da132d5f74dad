"""Text continued by a decoder: prompts in, pieces out as they come.

The beginning of a stop word, or half a character, is held back until more is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from headwater.models.decoder import Decoder

from .generate import Engine, stream
from .sampling import Portion, Sampling

# What a decoder of bytes shows for a character whose last bytes have not come yet.
HALF = "\ufffd"


class TextTokenizer(Protocol):
    """The part of a tokenizer that is needed here."""

    @property
    def end_of_text(self) -> int: ...

    def encode(self, text: str) -> Any: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Continuation:
    """The continuation of one prompt: its text, what of it was shown, whether it has ended."""

    def __init__(self, tokenizer: TextTokenizer, stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, [word for word in stops if word]
        self.text, self.shown, self.done = "", 0, False

    def update(self, ids: Sequence[int]) -> bool:
        """Take all new tokens so far; return True if the text has ended."""
        self.done = ids[-1] == self.tokenizer.end_of_text
        self.text = self.tokenizer.decode(ids[:-1] if self.done else ids)
        # The stop word that comes first in the text ends it.
        places = [self.text.find(word) for word in self.stops if word in self.text]
        if places:
            self.text = self.text[: min(places)]
            self.done = True
        return self.done

    def piece(self, *, last: bool = False) -> str:
        """Return what has not been shown and will not change."""
        end = len(self.text)
        if not (self.done or last):
            # Hold back half a character, and then what may become a stop word.
            end = len(self.text.rstrip(HALF))
            overlaps = [_overlap(self.text[:end], word) for word in self.stops]
            end -= max(overlaps, default=0)
        new = self.text[self.shown : max(end, self.shown)]
        self.shown += len(new)
        return new


def _overlap(text: str, word: str) -> int:
    """Count the characters at the end of a text that are the beginning of a word."""
    longest = min(len(word) - 1, len(text))
    for count in range(longest, 0, -1):
        if text.endswith(word[:count]):
            return count
    return 0


def continue_texts(
    model: Decoder | Engine,
    tokenizer: TextTokenizer,
    prompts: Sequence[str],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    *,
    stops: Sequence[str] = (),
    seed: int = 0,
    prefill_chunk: Portion = "auto",
) -> Iterator[list[str]]:
    """Continue texts together, each until it ends by itself.

    Arguments:
        model, tokenizer: of a run, as `headwater.train.load_run` returns them.
        prompts: texts of any lengths; an empty one begins a text.
        max_new_tokens, seed, prefill_chunk: as in `generate`.
        sampling: a `Sampling`.
        stops: words that end a text; they are not part of it.

    Returns an iterator: at each step the new text of every prompt, "" where there is none; last
        what was held back.

        for (new,) in continue_texts(run.model, run.tokenizer, ["def "], 50):
            print(new, end="", flush=True)
    """
    ids = []
    for text in prompts:
        tokens = [int(token) for token in tokenizer.encode(text)]
        ids.append(tokens or [tokenizer.end_of_text])
    texts = [Continuation(tokenizer, stops) for _ in prompts]
    steps = stream(
        model,
        ids,
        max_new_tokens,
        sampling,
        seed=seed,
        prefill_chunk=prefill_chunk,
        ended=lambda row, new: texts[row].update(new),
    )
    for number, _ in enumerate(steps):
        # A text knows of a token when the next one comes.
        if number:
            yield [text.piece() for text in texts]
    yield [text.piece(last=True) for text in texts]
