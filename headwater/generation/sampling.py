"""Settings of a draw. Nothing here imports torch: the command line checks them before it does."""

from dataclasses import dataclass
from typing import Literal

LEAST = 1e-30  # temperature: divided by less, some logits are infinite in fp32


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of a draw. They act in this order: penalty, temperature, top_k, top_p, min_p."""

    temperature: float = 1.0
    """0 takes the likeliest token each time."""
    top_k: int | None = None
    """Draw among this many of the likeliest tokens."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together reach this probability."""
    min_p: float | None = None
    """Draw among tokens at least this share as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens that the text has are divided by this, negative ones multiplied."""

    def check(self) -> None:
        """Raise ValueError that names the setting, what it must be and what it is."""
        if self.temperature != 0 and not LEAST <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 (takes the likeliest token) or a number from {LEAST} on, "
                f"got {self.temperature}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must lie in (0, 1], got {value}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty must be a positive number, got {self.repetition_penalty}"
            )


Portion = int | Literal["auto"] | None  # of a prompt, in tokens


def check_counts(new: int, prefill_chunk: Portion) -> None:
    """Raise ValueError unless this many tokens can be drawn, and prompts read in such portions."""
    if new < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, got {new}")
    if isinstance(prefill_chunk, str) and prefill_chunk != "auto":
        raise ValueError(
            f"prefill_chunk must be a number of tokens or 'auto', got '{prefill_chunk}'"
        )
    if isinstance(prefill_chunk, int) and prefill_chunk < 1:
        raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
