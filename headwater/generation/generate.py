"""Continuing prompts: a batch of any lengths, with a cache or without one, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from headwater.evaluation import evaluating
from headwater.models.decoder import Decoder

from .next_token import NO_NUMBERS, Draw
from .prompts import CachedReader, DeviceReader, Reader
from .sampling import Portion, Rows, Sampling, check_counts

Prompts = Tensor | Sequence[Sequence[int]]
P = TypeVar("P", Tensor, Rows)


class Engine:
    """A decoder, and how it reads prompts: here on one device."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def reader(self, rows: Rows, new: int, chunk: Portion, use_cache: bool, graph: bool) -> Reader:
        """Prepare to read prompts, the shortest first, that will have `new` more tokens."""
        if not use_cache:
            return Reader(self.model, rows)
        if graph and self.model.embedding.weight.is_cuda:
            return DeviceReader(self.model, rows, new, chunk)
        return CachedReader(self.model, rows, new, chunk)


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
        model: a `Decoder`, which is in evaluation mode meanwhile; or an engine, such as a decoder
            that ranks share (`headwater.train.distributed.generate`).
        tokens: prompts (B, T); or a list of prompts of any lengths, each a list of tokens.
        max_new_tokens: the most tokens to draw; with the prompt they must fit the model's context.
        temperature, top_k, top_p, min_p, repetition_penalty: as in `Sampling`.
        seed: row r draws with seed + r, whatever the other rows do.
        use_cache: False reads everything again for each token; the tokens are the same.
        prefill_chunk: tokens of a prompt to read at once: fewer take less memory, for the same
            tokens. "auto" fills half of the free memory; None reads all at once.
        stop: a token that ends a row.
        ended: called with a row and its new tokens after each token; True ends the row.
        graph: on a GPU, record a step as a CUDA graph and replay it, a few steps ahead of the host.
            Replays call no hooks of modules: pass False if you have any.

    Returns prompt and continuation: (B, T + new) for a tensor, where rows that have ended repeat
        their last token; a list of lists for lists, each as long as its row became.

    Raises ValueError for settings out of range, for prompts that do not fit the context, and for a
        cache that does not fit the GPU; TypeError for another model.

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
        model,
        tokens,
        max_new_tokens,
        sampling,
        seed=seed,
        use_cache=use_cache,
        prefill_chunk=prefill_chunk,
        stop=stop,
        ended=ended,
        graph=graph,
    )
    # The steps check the prompts.
    new_tokens = list(steps)
    rows = as_rows(tokens)
    for step in new_tokens:
        for row, token in zip(rows, step):
            if token is not None:
                row.append(token)
    if not isinstance(tokens, Tensor):
        return rows
    # In a tensor, rows that ended early repeat their last token.
    longest = max(map(len, rows))
    padded = []
    for row in rows:
        repeated = row[-1:] * (longest - len(row))
        padded.append(row + repeated)
    return torch.tensor(padded, device=tokens.device)


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
    """Yield the tokens of `generate` as they are drawn; arguments as there.

    Each step has a token for every row, None for rows that have ended.
    """
    sampling = sampling or Sampling()
    # An engine is no module.
    if isinstance(model, nn.Module) and not isinstance(model, Decoder):
        raise TypeError(
            f"model must be a Decoder, got a {type(model).__name__}: a model of transformers has a "
            "`generate` of its own"
        )
    # Settings and prompts are checked before anything is allocated.
    engine = Engine(model) if isinstance(model, Decoder) else model
    prompts = _check(engine.model, tokens, max_new_tokens, sampling, prefill_chunk)

    # Inside, the shortest prompt comes first; outside, rows keep their order.
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    rows = [prompts[row] for row in order]
    seeds = [seed + row for row in order]
    device = engine.model.embedding.weight.device
    draw = Draw(sampling, rows, seeds, engine.model.config.vocab_size, device)
    reader = engine.reader(rows, max_new_tokens, prefill_chunk, use_cache, graph)

    # The reader sees what was drawn; a row that has ended goes on, and is shown no more.
    drawn: Rows = [[] for _ in rows]
    live = [True] * len(rows)
    for new in _in_evaluation(engine.model, reader.tokens(draw, drawn, max_new_tokens)):
        step: list[int | None] = [None] * len(rows)
        for place, row in enumerate(order):
            if live[place]:
                _refuse_no_numbers(new[place], row, len(drawn[0]))
                step[row] = new[place]
        yield step
        for place, row in enumerate(order):
            # A row that has ended goes on with tokens that are nobody's, and may be no numbers.
            drawn[place].append(max(new[place], 0))
            if not live[place]:
                continue
            stops = new[place] == stop
            if not stops and ended is not None:
                stops = ended(row, drawn[place])
            live[place] = not stops
        if not any(live):
            return


def _in_evaluation(module: nn.Module, steps: Iterator[list[int]]) -> Iterator[list[int]]:
    """Take each step with the model in evaluation mode, and leave it as its owner has it
    between."""
    while True:
        with evaluating(module):
            new = next(steps, None)
        if new is None:
            return
        yield new


def _refuse_no_numbers(token: int, row: int, count: int) -> None:
    if token == NO_NUMBERS:
        raise ValueError(
            f"after {count} new tokens the logits of prompt {row} are not numbers (NaN): look for "
            "NaN in the weights; numbers that overflow in float16 do not in bfloat16 or float32"
        )


def as_rows(tokens: Prompts) -> Rows:
    """Return prompts as lists. Raises ValueError for text, or a single prompt."""
    rows = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    try:
        return [[int(token) for token in row] for row in rows]
    except (TypeError, ValueError) as error:
        raise ValueError(
            "tokens must be a list of prompts, each a list of numbers, or a tensor (batch, "
            "length); headwater.generation.text_pieces.continue_texts takes text"
        ) from error


def _check(
    model: Decoder, tokens: Prompts, new: int, sampling: Sampling, prefill_chunk: Portion
) -> Rows:
    """Return the prompts as lists, if they can be continued."""
    sampling.check()
    check_counts(new, prefill_chunk)
    rows = as_rows(tokens)
    if not rows:
        raise ValueError("there is no prompt to continue")
    for number, row in enumerate(rows):
        _check_row(number, row, new, model.config.context, model.config.vocab_size)
    return rows


def _check_row(number: int, row: list[int], new: int, context: int, vocab: int) -> None:
    if not row:
        raise ValueError(
            f"prompt {number} is empty: it needs at least one token, such as the tokenizer's end "
            "of text"
        )
    if not 0 <= min(row) <= max(row) < vocab:
        raise ValueError(f"prompt {number} has tokens outside of the vocabulary of {vocab}")
    if len(row) + new > context:
        cure = "shorten the prompt"
        if len(row) < context:
            cure = f"lower max_new_tokens to {context - len(row)}, or {cure}"
        raise ValueError(
            f"a prompt of {len(row)} tokens and {new} new ones exceed the context of {context}: "
            f"{cure}"
        )
