"""Continuing prompts with a model of transformers, converted or as it is: with the draws, stops and steps of a decoder.

Keys and values are in transformers' static cache, prompts of different lengths padded on the left. On a GPU the model's
own forward pass over one token of every row is recorded as a CUDA graph, with the kernels of a converted residual in
it. That takes a second or two; to compile a whole model, as transformers' `generate` does, takes half a minute.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.utils.generic import is_flash_attention_requested

from headwater.errors import UserError
from headwater.models.draw import Draw
from headwater.models.generate import DecoderEngine, ReadAnew, Reader
from headwater.models.sampling import Portion
from headwater.models.step import ReplayedSteps
from headwater.residuals import Residual

from .convert.layouts import PREFIX
from .formats.decoder import DecoderForCausalLM

STATES_INSIDE = {
    "recurrent_gemma"
}  # kept in its modules: those of another text, or of a portion alone
BEGINS_ANEW = {"jamba"}  # its state space layers, with every portion but single tokens
PORTION, LEAST = 8192, 256  # tokens of all prompts to read at once, unless told; of one at least


class TransformersEngine:
    """A model of transformers for `headwater.generate`.

    headwater.generate(headwater.hf.TransformersEngine(model), [[1, 2, 3]], max_new_tokens=20)
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.module: nn.Module = model
        self.device = model.device
        self.inside = _model_type(model) in STATES_INSIDE
        told = getattr(model.generation_config, "eos_token_id", None)
        self.ends = frozenset([] if told is None else told if isinstance(told, list) else [told])
        if isinstance(model, DecoderForCausalLM):
            self.vocab, self.context = model.decoder.config.vocab_size, model.decoder.config.context
        else:
            text = model.config.get_text_config()
            self.vocab, self.context = (
                text.vocab_size,
                getattr(text, "max_position_embeddings", None) or sys.maxsize,
            )

    def reader(
        self, rows: list[list[int]], new: int, chunk: Portion, use_cache: bool, graph: bool
    ) -> Reader:
        if isinstance(self.module, DecoderForCausalLM):
            return DecoderEngine(self.module.decoder).reader(rows, new, chunk, use_cache, graph)
        residuals = (module for module in self.module.modules() if isinstance(module, Residual))
        keeps = (
            "past_key_values" in inspect.signature(self.module.forward).parameters
        )  # state space models do not
        if not (
            use_cache
            and keeps
            and not self.inside
            and all(residual.token_local for residual in residuals)
        ):
            return _Anew(self.module, rows)
        return _Cached(self.module, rows, new, chunk, graph)


def _model_type(model: PreTrainedModel) -> str:
    """Of a converted model, what it was before."""
    return model.config.get_text_config().model_type.removeprefix(PREFIX)


class Words:
    """A tokenizer of transformers as `headwater.models.text` asks for one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end_of_text: int = -1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self.before: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]

    def encode(self, text: str) -> list[int]:
        """Of an empty text what begins one. Raises UserError if there is nothing that does."""
        if ids := self.tokenizer(text)["input_ids"]:
            return ids
        begins = self.tokenizer.bos_token_id
        if begins is None and self.end_of_text < 0:
            raise UserError(
                "a prompt is empty, and the tokenizer has no token that begins a text: give it a word"
            )
        return [self.end_of_text if begins is None else begins]

    def decode(self, ids: Sequence[int]) -> str:
        """What follows a prompt: many tokenizers drop the space in front of the first word they are given."""
        before, whole = (self._text(some) for some in (self.before, [*self.before, *ids]))
        return whole[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, clean_up_tokenization_spaces=False
        )  # which would change what has been shown


def _takes_static_cache(model: Any) -> bool:
    """Whether what a cache of fixed size has beyond a row's tokens does no harm, and dtypes fit it: flash attention
    takes the cache's end for the tokens', and under autocast keys and values differ in dtype."""
    if is_flash_attention_requested(model.config.get_text_config()) or torch.is_autocast_enabled(
        model.device.type
    ):
        return False
    return getattr(model, "_can_compile_fullgraph", False)  # transformers' word for it


def _fixed_cache(model: Any, length: int, recorded: bool) -> StaticCache:
    """For `length` tokens. A layer that keeps a window of them goes another way in Python once the window is full, and
    a recorded step has one way: there such layers keep all tokens, and the mask cuts the window."""
    cache = StaticCache(config=model.config, max_cache_len=length)
    if recorded:
        windows = (isinstance(layer, StaticSlidingWindowLayer) for layer in cache.layers)
        cache.layers = [
            StaticLayer(length) if short else layer for short, layer in zip(windows, cache.layers)
        ]
    return cache


class _Anew(ReadAnew):
    model: Any

    def __init__(self, model: Any, rows: list[list[int]]) -> None:
        super().__init__(model, rows, model.device)
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.options = {"logits_to_keep": 1} if keeps else {}

    def after(self, text: Tensor) -> Tensor:
        return self.forward(text, use_cache=False)

    def forward(self, tokens: Tensor, **ways: Any) -> Tensor:
        """Logits (B, vocab) after tokens (B, T)."""
        return self.model(input_ids=tokens, **ways, **self.options).logits[:, -1]


class _Cached(_Anew):
    """Reads all prompts together, in portions if asked, then one token of every row at a time."""

    def __init__(
        self, model: Any, rows: list[list[int]], new: int, chunk: Portion, graph: bool
    ) -> None:
        super().__init__(model, rows)
        longest = max(map(len, rows))
        self.chunk = chunk if isinstance(chunk, int) else longest
        if chunk == "auto":
            self.chunk = max(LEAST, PORTION // len(rows))
        if (kind := _model_type(model)) in BEGINS_ANEW:
            if isinstance(chunk, int) and chunk < longest:
                raise ValueError(
                    f"prefill_chunk is {chunk}, and {kind} of transformers reads prompts at once alone"
                )
            self.chunk = longest
        static = _takes_static_cache(model)
        self.graph = graph and static and self.device.type == "cuda"
        self.cache = (
            _fixed_cache(model, longest + new, self.graph)
            if static
            else DynamicCache(config=model.config)
        )
        lacking = torch.tensor([longest - len(row) for row in rows], device=self.device)
        self.places = (
            torch.arange(longest, device=self.device) - lacking[:, None]
        )  # (B, longest), below zero: padding
        self.mask = None
        if int(lacking.max()):
            self.mask = (
                torch.arange(longest + new, device=self.device) >= lacking[:, None]
            )  # (B, longest + new)
            self.chunk = max(
                2, self.chunk
            )  # a single token is never taken for padding by layers that keep a state
        self.seen, self.static = 0, static
        self.states = any(hasattr(layer, "update_recurrent_state") for layer in self.cache.layers)

    def tokens(self, draw: Draw, drawn: list[list[int]], count: int) -> Iterator[list[int]]:
        if not self.graph:
            yield from super().tokens(draw, drawn, count)
            return
        logits = self._prefill()
        yield from ReplayedSteps(self.step, len(self.rows), self.device, draw).tokens_after(
            logits, count
        )

    def next_logits(self, drawn: list[list[int]]) -> Tensor:
        if not self.seen:
            return self._prefill()
        return self.step(torch.tensor([mine[-1] for mine in drawn], device=self.device))

    def _prefill(self) -> Tensor:
        longest = self.places.shape[1]
        padded = torch.tensor(
            [[0] * (longest - len(row)) + row for row in self.rows], device=self.device
        )
        for tokens, places in zip(
            padded.split(self.chunk, 1), self.places.clamp_min(0).split(self.chunk, 1)
        ):
            logits = self._read(tokens, places, self._mask_of(tokens.shape[1]))
        self.places = self.places[:, -1:] + 1
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, vocab) after one more token of every row, tokens (B,)."""
        logits = self._read(tokens[:, None], self.places, self._mask_of(1))
        self.places += 1  # in place: a CUDA graph finds it there
        return logits

    def _mask_of(self, count: int) -> Tensor | None:
        """For the next `count` tokens. With a cache of fixed size it is as long as that; but layers that keep a state
        take its end for a portion's, and get no more than has been seen."""
        if self.mask is None or (self.static and (count == 1 or not self.states)):
            return self.mask
        return self.mask[:, : self.seen + count]

    def _read(self, tokens: Tensor, places: Tensor, mask: Tensor | None) -> Tensor:
        self.seen += tokens.shape[1]
        return self.forward(
            tokens,
            position_ids=places,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        )
