"""Choosing the next token of every row, where the logits are.

    token = argmax_v p_v / e_v,   e_v ~ Exp(1):   v is chosen with probability p_v

That is what torch.multinomial does for one sample. The e_v are numbers of a counter and the row's seed
(`headwater.ops.decode.exponentials`), the same on every device, and nothing of it waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.ops.decode import exponentials, likeliest

from .sampling import Sampling

NO_NUMBERS = -1  # in the place of a token: among the row's logits is a NaN


class Draw:
    """Draws for a batch. `prompts`: what each row has so far; row r draws with seed + r, whatever the others do.

    A call waits for nothing, and can be recorded in a CUDA graph.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        seed: int,
        vocab: int,
        device: torch.device,
    ) -> None:
        self.sampling, self.vocab = sampling, vocab
        seeds = [(seed + r) % 2**63 for r in range(len(prompts))]
        self.seeds = torch.tensor(seeds, device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.seen = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(len(prompts), vocab, dtype=torch.bool, device=device)
            for row, prompt in zip(self.seen, prompts):
                row[torch.tensor(prompt, dtype=torch.long, device=device)] = True

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens (B,) from logits (B, vocab), NO_NUMBERS where a row's are none."""
        greedy = self.sampling.temperature == 0
        if greedy and self.seen is None:
            return likeliest(logits)
        logits = logits.float()
        if self.seen is not None:
            penalty = self.sampling.repetition_penalty
            logits = torch.where(
                self.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits
            )
        if greedy:
            tokens = likeliest(logits)
        else:
            tokens = likeliest(
                shares_of(logits, self.sampling) / exponentials(self.seeds, self.step, self.vocab)
            )
            self.step += 1
        if self.seen is not None:
            self.seen.scatter_(1, tokens.clamp_min(0)[:, None], True)
        return tokens


def shares_of(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities (B, vocab), up to a factor, of what may be drawn, from logits in fp32."""
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        smallest = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if sampling.top_p is not None:
        ordered, order = logits.sort(descending=True)
        ahead = ordered.softmax(-1).cumsum(-1) - ordered.softmax(
            -1
        )  # mass before each token: the first always stays
        dropped = torch.zeros_like(ahead, dtype=torch.bool).scatter(
            -1, order, ahead >= sampling.top_p
        )
        logits = logits.masked_fill(dropped, float("-inf"))
    shares = logits.softmax(-1)
    if sampling.min_p is not None:
        shares = shares.masked_fill(shares < sampling.min_p * shares.amax(-1, keepdim=True), 0.0)
    return shares
