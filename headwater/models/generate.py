"""Continuing prompts: a batch of any lengths, with a cache of fixed size or without one, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from headwater.evaluation import evaluating

from .decoder import Cache, Decoder
from .draw import NO_NUMBERS, Draw
from .prefill import choose_chunk
from .sampling import Portion, Sampling, check_counts
from .step import DeviceSteps

Prompts = Tensor | Sequence[Sequence[int]]
P = TypeVar("P", Tensor, list[list[int]])


class Reader(Protocol):
    """What reads prompts and draws on from there."""

    def tokens(self, draw: Draw, drawn: list[list[int]], count: int) -> Iterator[list[int]]:
        """A token for every row, `count` times; the caller puts each into `drawn`."""
        ...


class Engine(Protocol):
    """A model that can continue prompts: its module, the most tokens of a row, how many tokens there are, and which of
    them end a text, besides the tokenizer's."""

    module: nn.Module
    context: int
    vocab: int
    ends: frozenset[int]

    @property
    def device(self) -> torch.device: ...

    def reader(
        self, rows: list[list[int]], new: int, chunk: Portion, use_cache: bool, graph: bool
    ) -> Reader:
        """For prompts that will have `new` more tokens; the others as in `generate`."""
        ...


class DecoderEngine:
    """A decoder on one device."""

    ends: frozenset[int] = frozenset()

    def __init__(self, model: Decoder) -> None:
        self.model, self.context, self.vocab = model, model.config.context, model.config.vocab_size
        self.module: nn.Module = model

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device

    def reader(
        self, rows: list[list[int]], new: int, chunk: Portion, use_cache: bool, graph: bool
    ) -> Reader:
        if not use_cache:
            return ReadAnew(self.model, rows, self.device)
        return (_OnDevice if graph and self.device.type == "cuda" else ReadOnce)(
            self.model, rows, new, chunk
        )


def generate(
    model: Decoder | Engine,
    tokens: P,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    use_cache: bool = True,
    prefill_chunk: Portion = "auto",
    stop: int | None = None,
    ended: Callable[[int, list[int]], bool] | None = None,
    graph: bool = True,
) -> P:
    """Continue prompts.

    Arguments:
        model: a `Decoder`, which is put into evaluation mode meanwhile; or an engine, such as a
            decoder that ranks share (`headwater.train.distributed.generate`).
        tokens: prompts (B, T); or a list of prompts of any lengths, each a list of tokens.
        max_new_tokens: how many to draw at most; with the prompt they must fit the model's context.
        temperature, top_k, top_p, min_p, repetition_penalty: as in `Sampling`.
        seed: of the draw; row r draws with seed + r, whatever the others do.
        use_cache: False reads everything again for each token; the tokens are the same.
        prefill_chunk: read prompts in portions of so many tokens: less memory at once, the same tokens. "auto": as many
            as half of the free memory is for (`headwater.models.prefill`); None: at once.
        stop: a token that ends a row.
        ended: called with a row and its new tokens after each; True ends the row, for stop words and the like.
        graph: on a GPU, record a step as a CUDA graph and replay it, a few steps ahead of what the host knows. A seed
            stands for the same random numbers on any device. Replays call no hooks of modules: False, if you have any.

    Returns prompt and continuation: (B, T + new) for a tensor, where rows that have ended repeat their last token; a
        list of lists for lists, each as long as it became.
    Raises ValueError for settings out of range, naming them, for prompts that do not fit the context, and for a cache
        that does not fit the GPU; TypeError for another model.

        generate(model, torch.tensor([[1, 2, 3]]), 20, temperature=0.8, top_p=0.95)
    """
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    steps = stream(
        model, tokens, max_new_tokens, sampling, seed=seed, use_cache=use_cache, prefill_chunk=prefill_chunk,
        stop=stop, ended=ended, graph=graph,
    )  # fmt: skip
    drawn = list(steps)  # which refuses what are no prompts
    rows = _rows(tokens)
    for new in drawn:
        for row, token in zip(rows, new):
            row.extend([] if token is None else [token])
    if not isinstance(tokens, Tensor):
        return rows
    longest = max(map(len, rows))
    return torch.tensor(
        [row + row[-1:] * (longest - len(row)) for row in rows], device=tokens.device
    )


@torch.no_grad()
def stream(
    model: Decoder | Engine,
    tokens: Prompts,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    *,
    seed: int = 0,
    use_cache: bool = True,
    prefill_chunk: Portion = "auto",
    stop: int | None = None,
    ended: Callable[[int, list[int]], bool] | None = None,
    graph: bool = True,
) -> Iterator[list[int | None]]:
    """The tokens of `generate` as they are drawn; arguments as there.

    Returns an iterator: at each step a token for every row, None for rows that have ended.
    """
    sampling = sampling or Sampling()
    if isinstance(model, nn.Module) and not isinstance(model, Decoder):
        raise TypeError(
            f"model must be a Decoder, got a {type(model).__name__}: a model of transformers has a "
            "`generate` of its own"
        )
    engine = DecoderEngine(model) if isinstance(model, Decoder) else model
    rows = _check(engine, tokens, max_new_tokens, sampling, prefill_chunk)
    draw = Draw(sampling, rows, seed, engine.vocab, engine.device)
    drawn: list[list[int]] = [[] for _ in rows]
    live = [True] * len(rows)
    reader = engine.reader(rows, max_new_tokens, prefill_chunk, use_cache, graph)
    for new in _in_evaluation(engine.module, reader.tokens(draw, drawn, max_new_tokens)):
        _refuse_no_numbers(new, live, len(drawn[0]))
        yield [token if alive else None for token, alive in zip(new, live)]
        for r, (token, own) in enumerate(zip(new, drawn)):
            own.append(max(token, 0))  # a row that has ended may have no numbers
            live[r] = live[r] and token != stop and not (ended is not None and ended(r, own))
        if not any(live):
            return


def _in_evaluation(module: nn.Module, steps: Iterator[list[int]]) -> Iterator[list[int]]:
    """The steps, each with the model in evaluation mode; between two of them it is as its owner has it."""
    while True:
        with evaluating(module):
            new = next(steps, None)
        if new is None:
            return
        yield new


def _refuse_no_numbers(new: list[int], live: list[bool], count: int) -> None:
    bad = [r for r, (token, alive) in enumerate(zip(new, live)) if alive and token == NO_NUMBERS]
    if bad:
        raise ValueError(
            f"after {count} new tokens the logits of prompt {bad[0]} are not numbers (NaN): look for NaN in the "
            "weights; numbers that overflow in float16 do not in bfloat16 or float32"
        )


class ReadAnew:
    """Reads every row from its first token on, by itself."""

    def __init__(self, model: Decoder, rows: list[list[int]], device: torch.device) -> None:
        self.model, self.rows, self.device = model, rows, device

    def tokens(self, draw: Draw, drawn: list[list[int]], count: int) -> Iterator[list[int]]:
        for _ in range(count):
            yield draw(self.next_logits(drawn)).tolist()

    def next_logits(self, drawn: list[list[int]]) -> Tensor:
        """(B, vocab) after what has been drawn."""
        texts = (
            torch.tensor([row + mine], device=self.device) for row, mine in zip(self.rows, drawn)
        )
        return torch.cat([self.after(text) for text in texts])

    def after(self, text: Tensor) -> Tensor:
        """(1, vocab) after a text (1, T)."""
        return self.model.head(self.model.hidden(text)[:, -1])


class ReadOnce(ReadAnew):
    """Reads prompts of one length together, in portions; then one token of every row at a time."""

    cache: Cache | None = None

    def __init__(self, model: Decoder, rows: list[list[int]], new: int, chunk: Portion) -> None:
        super().__init__(model, rows, model.embedding.weight.device)
        self.room = max(map(len, rows)) + new
        # This refuses a cache that is too large.
        fitting = choose_chunk(model, len(rows), self.room, self.free_bytes())
        self.chunk = fitting if chunk == "auto" else chunk

    def free_bytes(self) -> int | None:
        """That portions and the cache may count on; None: what is free where the model is."""
        return None

    def next_logits(self, drawn: list[list[int]]) -> Tensor:
        if self.cache is None:
            return self._prefill()
        last = torch.tensor([[mine[-1]] for mine in drawn], device=self.device)
        return self.model.head(self.model.hidden(last, self.cache)[:, -1])

    def _prefill(self) -> Tensor:
        by_length = sorted(range(len(self.rows)), key=lambda r: len(self.rows[r]))
        even = len({len(row) for row in self.rows}) == 1
        caches, logits = [], []
        for length, group in groupby(by_length, key=lambda r: len(self.rows[r])):
            cache = self.model.new_cache(self.room if even else length)
            hidden = self.read(
                torch.tensor([self.rows[r] for r in group], device=self.device), cache
            )
            caches.append(cache)
            logits.append(self.model.head(hidden[:, -1]))
        order = [by_length.index(r) for r in range(len(self.rows))]
        self.cache = self.model.fixed_cache(caches, order, self.room)
        return torch.cat(logits)[torch.tensor(order, device=self.device)]

    def read(self, texts: Tensor, cache: Cache) -> Tensor:
        """What the head sees of the last tokens of texts (B, T), all of which the cache then has."""
        for part in texts.split(self.chunk or texts.shape[1], dim=1):
            hidden = self.model.hidden(part, cache, last=True)
        return hidden


class _OnDevice(ReadOnce):
    """The same with steps that a GPU replays, while the host is some steps behind."""

    def tokens(self, draw: Draw, drawn: list[list[int]], count: int) -> Iterator[list[int]]:
        logits = self._prefill()
        assert self.cache is not None
        yield from DeviceSteps(self.model, self.cache, draw).tokens_after(logits, count)


def _rows(tokens: Prompts) -> list[list[int]]:
    return (
        tokens.tolist()
        if isinstance(tokens, Tensor)
        else [[int(token) for token in row] for row in tokens]
    )


def _check(
    engine: Engine, tokens: Prompts, new: int, sampling: Sampling, prefill_chunk: Portion
) -> list[list[int]]:
    """The prompts as lists, if they can be continued."""
    sampling.check()
    check_counts(new, prefill_chunk)
    if isinstance(tokens, Tensor) and (tokens.dim() != 2 or tokens.shape[1] < 1):
        raise ValueError(
            f"tokens must be (batch, length) with at least one token, got {tuple(tokens.shape)}"
        )
    if not isinstance(tokens, Tensor) and any(isinstance(row, int) for row in tokens):
        raise ValueError(
            "tokens must be a list of prompts, each a list of tokens; got one prompt: put it into a list"
        )
    if isinstance(tokens, str) or any(isinstance(row, str) for row in tokens):
        raise ValueError(
            "tokens must be numbers, got text: encode it, or take headwater.models.text.continue_texts"
        )
    rows = _rows(tokens)
    context, vocab = engine.context, engine.vocab
    for r, row in enumerate(rows):
        if not row:
            raise ValueError(
                f"prompt {r} is empty: it needs at least one token, such as the tokenizer's end of text"
            )
        if not 0 <= min(row) <= max(row) < vocab:
            raise ValueError(f"prompt {r} has tokens outside of the vocabulary of {vocab}")
        if len(row) + new > context:
            left = context - len(row)
            raise ValueError(
                f"a prompt of {len(row)} tokens and {new} new ones exceed the context of {context}: "
                + (
                    f"lower max_new_tokens to {left}, or shorten the prompt"
                    if left > 0
                    else "shorten the prompt"
                )
            )
    if not rows:
        raise ValueError("there is no prompt to continue")
    return rows
