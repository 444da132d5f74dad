"""A decoding step that leaves the host out: one token of every row, chosen on the GPU, captured as a CUDA graph.

The rows' lengths, the tokens and the caches stay on the device and where they are; the host replays, and learns the
tokens some steps late. Captured or not, the same kernels run in the same order. The first step runs as it is, which
compiles what there is to compile; the second is recorded.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headwater.capture import NotCaptured, record
from headwater.ops.decode import likeliest

from .decoder import Cache, Decoder
from .fused import FusedStep, reason_against

AHEAD = 4  # steps that the host may be ahead of the tokens it knows


class GeneralStep:
    """Logits (B, vocab) of one token of every row, tokens (B,), of any decoder: its own forward pass."""

    def __init__(self, model: Decoder, cache: Cache) -> None:
        self.model, self.cache = model, cache

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.model.head(self.model.hidden(tokens[:, None], self.cache)[:, -1])


def step_of(model: Decoder, cache: Cache) -> Callable[[Tensor], Tensor]:
    """What decodes a token of every row fastest, with the rows' lengths on the device."""
    assert cache.rows is not None
    cache.rows.even = None
    return GeneralStep(model, cache) if reason_against(model) else FusedStep(model, cache)


class ReplayedSteps:
    """Steps of a batch on its GPU. `step`: what computes logits (B, vocab) after one more token of each row, tokens
    (B,), over tensors that stay where they are; `draw`: what chooses tokens from logits, without the host."""

    def __init__(
        self,
        step: Callable[[Tensor], Tensor],
        batch: int,
        device: torch.device,
        draw: Callable[[Tensor], Tensor] = likeliest,
        *,
        graph: bool = True,
    ) -> None:
        self.step, self.draw, self.graph, self.device = step, draw, graph, device
        self.tokens = torch.zeros(batch, dtype=torch.long, device=device)
        self.drawn = self.tokens.clone()  # the same, or that there is none
        self.logits: Tensor | None = None
        self.replay: Callable[[], None] | None = None
        self.taken = 0

    def run(self) -> Tensor:
        """Logits after `self.tokens`, always in one place; the tokens drawn from them then take those tokens' place."""
        with torch.cuda.device_of(self.tokens):  # streams are those of the current GPU
            if self.graph and self.replay is None and self.taken == 1:
                self._capture()
            if self.replay is None:
                self._once()
            else:
                self.replay()
        self.taken += 1
        assert self.logits is not None
        return self.logits

    def _once(self) -> None:
        self.logits = self.step(self.tokens)
        self._draw(self.logits)

    def _draw(self, logits: Tensor) -> None:
        self.drawn.copy_(self.draw(logits))
        torch.clamp(
            self.drawn, min=0, out=self.tokens
        )  # what stands for no token is none that a model could read

    def _capture(self) -> None:
        """Record a step, or say in a line why not, and go on without."""
        try:
            self.replay = record(self._once, stream=_capture_stream(self.device)).replay
        except NotCaptured as reason:
            self.graph = False
            warnings.warn(
                f"decoding is not captured as a CUDA graph: {reason}. It goes on, more slowly",
                stacklevel=2,
            )

    def tokens_after(self, logits: Tensor, count: int) -> Iterator[list[int]]:
        """A token of every row, `count` times, some steps behind the GPU: the first from logits (B, vocab)."""
        waiting: list[tuple[Tensor, torch.cuda.Event]] = []
        for number in range(count):
            if number:
                self.run()
            else:
                self._draw(logits)
            waiting.append(self._send())
            if len(waiting) > AHEAD:
                yield _arrived(waiting.pop(0))
        for one in waiting:
            yield _arrived(one)

    def _send(self) -> tuple[Tensor, torch.cuda.Event]:
        """The tokens on their way to the host, and a mark to wait for."""
        sent = torch.empty(self.drawn.shape, dtype=torch.long, pin_memory=True).copy_(
            self.drawn, non_blocking=True
        )
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        return sent, done


class DeviceSteps(ReplayedSteps):
    """Those of a decoder."""

    def __init__(
        self,
        model: Decoder,
        cache: Cache,
        draw: Callable[[Tensor], Tensor] = likeliest,
        *,
        graph: bool = True,
    ) -> None:
        super().__init__(
            step_of(model, cache), cache.batch, model.embedding.weight.device, draw, graph=graph
        )


@functools.cache  # the library keeps a workspace for every stream that has recorded its products
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _arrived(one: tuple[Tensor, torch.cuda.Event]) -> list[int]:
    sent, done = one
    done.synchronize()
    return sent.tolist()
