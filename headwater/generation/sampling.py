"""Settings of a draw. Nothing here imports torch: the command line checks them before it does."""

from dataclasses import dataclass
from typing import Literal

# The least temperature: divided by less, some logits are infinite in fp32.
LEAST = 1e-30
INFINITY = float("inf")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of a draw. They act in this order: penalty, temperature, top_k, top_p, min_p."""

    temperature: float = 1.0
    """Temperature of the draw. 0 takes the likeliest token each time."""
    top_k: int | None = None
    """Number of likeliest tokens to draw from, at least 1. Without it all tokens can be drawn."""
    top_p: float | None = None
    """Probability that the tokens to draw from, the likeliest ones, reach together: above 0, at
    most 1. Without it all tokens can be drawn."""
    min_p: float | None = None
    """Least probability of a drawn token, as a share of the likeliest token's: above 0, at most
    1. Without it all tokens can be drawn."""
    repetition_penalty: float = 1.0
    """Factor that divides the positive logits of tokens that the text has already, and
    multiplies negative ones. Above 0; 1 changes nothing."""

    def check(self) -> None:
        """Raise ValueError that names the setting, what it must be and what it is."""
        top_p, min_p, penalty = self.top_p, self.min_p, self.repetition_penalty
        must = {
            "temperature": f"be 0 (takes the likeliest token) or a number from {LEAST} on",
            "top_k": "be at least 1",
            "top_p": "lie in (0, 1]",
            "min_p": "lie in (0, 1]",
            "repetition_penalty": "be a positive number",
        }
        holds = {
            "temperature": self.temperature == 0 or LEAST <= self.temperature < INFINITY,
            "top_k": self.top_k is None or self.top_k >= 1,
            "top_p": top_p is None or 0 < top_p <= 1,
            "min_p": min_p is None or 0 < min_p <= 1,
            "repetition_penalty": 0 < penalty < INFINITY,
        }
        for name, fine in holds.items():
            if not fine:
                raise ValueError(f"{name} must {must[name]}, got {getattr(self, name)}")


Rows = list[list[int]]  # the tokens of each row
Portion = int | Literal["auto"] | None  # of a prompt, in tokens


def check_counts(new: int, prefill_chunk: Portion) -> None:
    """Raise ValueError unless this many tokens can be drawn, and prompts read in such portions."""
    if new < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, got {new}")
    if isinstance(prefill_chunk, int) and prefill_chunk < 1:
        raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
