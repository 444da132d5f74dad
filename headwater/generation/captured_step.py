"""A decoding step that leaves the host out: one token of every row, recorded as a CUDA graph.

Lengths, tokens and caches stay on the device and where they are. The host replays the step, and
learns the tokens some steps late. Recorded or not, the same kernels run in the same order. The
first step runs as it is, which compiles what there is to compile; the second is recorded.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headwater.models.cache import Cache
from headwater.models.decoder import Decoder
from headwater.ops.cuda_graph import NotCaptured, record
from headwater.ops.decode import likeliest

from .fused_step import FusedStep, fused_step

# Steps that the host may be ahead of the tokens that it knows.
AHEAD = 4


class GeneralStep:
    """One token of every row through the forward pass of any decoder."""

    def __init__(self, model: Decoder, cache: Cache) -> None:
        self.model, self.cache = model, cache

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return logits (B, vocab) after tokens (B,), which the cache then has."""
        hidden = self.model.hidden(tokens[:, None], self.cache)
        return self.model.head(hidden[:, -1])


def step_of(model: Decoder, cache: Cache) -> FusedStep | GeneralStep:
    """Choose what decodes a token of every row fastest, with the lengths on the device alone."""
    cache.lengths.even = None
    return fused_step(model, cache) or GeneralStep(model, cache)


class CapturedSteps:
    """Steps of a batch on its GPU.

    Arguments:
        step: computes logits (B, vocab) after one more token of each row, tokens (B,).
        batch, device: rows, and where they are.
        draw: chooses tokens from logits, without the host.
        graph: False never records.
    """

    def __init__(
        self,
        step: Callable[[Tensor], Tensor],
        batch: int,
        device: torch.device,
        draw: Callable[[Tensor], Tensor] = likeliest,
        *,
        graph: bool = True,
    ) -> None:
        self.step = step
        self.draw = draw
        self.graph = graph
        self.device = device
        self.tokens = torch.zeros(batch, dtype=torch.long, device=device)
        # The same tokens, or NO_NUMBERS.
        self.drawn = self.tokens.clone()
        self.logits: Tensor | None = None
        self.replay: Callable[[], None] | None = None
        self.count = 0

    def run(self) -> Tensor:
        """Return logits after `self.tokens`, always in one place; `self.tokens` then has the next
        tokens."""
        # Streams are those of the current GPU.
        with torch.cuda.device_of(self.tokens):
            # The first step has compiled its kernels and allocated what it needs.
            if self.graph and self.replay is None and self.count == 1:
                self._capture()
            if self.replay is None:
                self._once()
            else:
                self.replay()
        self.count += 1
        assert self.logits is not None
        return self.logits

    def _once(self) -> None:
        self.logits = self.step(self.tokens)
        self._draw(self.logits)

    def _draw(self, logits: Tensor) -> None:
        self.drawn.copy_(self.draw(logits))
        # NO_NUMBERS is no token that a model could read.
        torch.clamp(self.drawn, min=0, out=self.tokens)

    def _capture(self) -> None:
        """Record a step; where that fails, say why in a line, and go on without."""
        try:
            self.replay = record(self._once, stream=_capture_stream(self.device)).replay
        except NotCaptured as reason:
            self.graph = False
            warnings.warn(
                f"decoding is not captured as a CUDA graph: {reason}. It goes on, more slowly",
                stacklevel=2,
            )

    def tokens_after(self, logits: Tensor, count: int) -> Iterator[list[int]]:
        """Yield a token of every row, `count` times; the first is drawn from logits (B, vocab)."""
        pending: list[tuple[Tensor, torch.cuda.Event]] = []
        for number in range(count):
            if number:
                self.run()
            else:
                self._draw(logits)
            pending.append(self._send())
            # The host waits for tokens only when the GPU has a few more steps to do.
            if len(pending) > AHEAD:
                yield _received(*pending.pop(0))
        for transfer in pending:
            yield _received(*transfer)

    def _send(self) -> tuple[Tensor, torch.cuda.Event]:
        """Start to copy the tokens to the host; the event tells when they are there."""
        copy = torch.empty(self.drawn.shape, dtype=torch.long, pin_memory=True)
        copy.copy_(self.drawn, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record(torch.cuda.current_stream(self.device))
        return copy, arrival


@functools.cache  # the library keeps a workspace for every stream that has recorded its products
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _received(tokens: Tensor, arrival: torch.cuda.Event) -> list[int]:
    arrival.synchronize()
    return tokens.tolist()
