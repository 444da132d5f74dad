"""Reading prompts, and then one token of every row at a time: with a cache, or everything again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from headwater.models.cache import Cache
from headwater.models.decoder import Decoder

from .captured_step import CapturedSteps, step_of
from .next_token import Draw
from .prompt_portions import choose_chunk
from .sampling import Portion, Rows


class Reader:
    """Reads every row from its first token on, for each new token.

    `rows` are the prompts, the shortest first, so that prompts of one length stand side by side.
    """

    def __init__(self, model: Decoder, rows: Rows) -> None:
        self.model, self.rows = model, rows
        self.device = model.embedding.weight.device

    def tokens(self, draw: Draw, drawn: Rows, count: int) -> Iterator[list[int]]:
        """Draw a token for every row, `count` times; the caller appends it to `drawn`."""
        for _ in range(count):
            yield draw(self.next_logits(drawn)).tolist()

    def next_logits(self, drawn: Rows) -> Tensor:
        """Return logits (B, vocab) after the tokens drawn so far."""
        logits = []
        for prompt, new in zip(self.rows, drawn):
            text = torch.tensor([prompt + new], device=self.device)
            hidden = self.model.hidden(text)
            logits.append(self.model.head(hidden[:, -1]))
        return torch.cat(logits)


class CachedReader(Reader):
    """Reads prompts of one length together, in portions; then one token of every row at a time."""

    def __init__(self, model: Decoder, rows: Rows, new: int, chunk: Portion) -> None:
        super().__init__(model, rows)
        room = len(rows[-1]) + new
        # Asked whatever the portion is: this refuses a cache that does not fit.
        fitting = choose_chunk(model, len(rows), room, self.free_bytes())
        self.chunk = fitting if chunk == "auto" else chunk
        self.cache = model.new_cache(len(rows), room)

    def free_bytes(self) -> int | None:
        """Return the bytes that portions and cache may take; None: what is free where the model
        is."""
        return None

    def next_logits(self, drawn: Rows) -> Tensor:
        if not drawn[0]:
            return self.read_prompts()
        # Later only the last token of each row is new.
        last = torch.tensor([row[-1:] for row in drawn], device=self.device)
        hidden = self.model.hidden(last, self.cache)
        return self.model.head(hidden[:, -1])

    def read_prompts(self) -> Tensor:
        """Return logits (B, vocab) after the prompts, which the cache then has."""
        logits, views, first = [], [], 0
        # Prompts of one length are read together, into their rows of the cache.
        for _, prompts in groupby(self.rows, key=len):
            texts = torch.tensor(list(prompts), device=self.device)
            view = self.cache.rows(first, first + len(texts))
            hidden = self.read(texts, view)
            logits.append(self.model.head(hidden[:, -1]))
            views.append(view)
            first += len(texts)
        self.cache.join(views)
        return torch.cat(logits)

    def read(self, texts: Tensor, cache: Cache) -> Tensor:
        """Read texts (B, T) into the cache; return what the head sees of their last tokens."""
        for portion in texts.split(self.chunk or texts.shape[1], dim=1):
            hidden = self.model.hidden(portion, cache, last=True)
        return hidden


class DeviceReader(CachedReader):
    """The same with steps that a GPU replays, while the host is some steps behind."""

    def tokens(self, draw: Draw, drawn: Rows, count: int) -> Iterator[list[int]]:
        logits = self.read_prompts()
        step = step_of(self.model, self.cache)
        steps = CapturedSteps(step, len(self.rows), self.device, draw)
        yield from steps.tokens_after(logits, count)
