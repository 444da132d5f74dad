"""Choosing the next token of every row, where the logits are.

    token = argmax_v p_v / e_v,   e_v ~ Exp(1):   v is chosen with probability p_v

That is what torch.multinomial does for one sample. The e_v come from the row's own generator on the host, whatever the
device: they depend on no logits, so that they can be on their way while a GPU still computes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.ops.decode import likeliest

from .sampling import Sampling


class Draw:
    """Draws for a batch. `prompts`: what each row has so far; row r draws with seed + r, whatever the others do.

    `prepare` before each call; the call itself waits for nothing, and can be recorded in a CUDA graph.
    """

    def __init__(
        self, sampling: Sampling, prompts: Sequence[Sequence[int]], seed: int, vocab: int, device: torch.device
    ) -> None:
        self.sampling = sampling
        self.generators = [torch.Generator().manual_seed(seed + r) for r in range(len(prompts))]
        shape = len(prompts), vocab
        self.noise = None if sampling.temperature == 0 else torch.ones(shape, device=device)
        self.seen = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(shape, dtype=torch.bool, device=device)
            for row, prompt in zip(self.seen, prompts):
                row[torch.tensor(prompt, dtype=torch.long, device=device)] = True

    def prepare(self) -> None:
        """Let the generators draw what the next call needs."""
        if self.noise is None:
            return
        new = torch.empty(self.noise.shape, pin_memory=self.noise.is_cuda)
        for row, generator in zip(new, self.generators):
            row.exponential_(1, generator=generator)
        self.noise.copy_(new, non_blocking=True)

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens (B,) from logits (B, vocab)."""
        if self.noise is None and self.seen is None:
            return likeliest(logits)
        logits = logits.float()
        if self.seen is not None:
            penalty = self.sampling.repetition_penalty
            logits = torch.where(self.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if self.noise is None:
            tokens = logits.argmax(-1)
        else:
            tokens = (shares_of(logits, self.sampling) / self.noise).argmax(-1)
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        return tokens


def shares_of(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities (B, vocab), up to a factor, of what may be drawn, from logits in fp32."""
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        smallest = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if sampling.top_p is not None:
        ordered, order = logits.sort(descending=True)
        ahead = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # mass before each token: the first always stays
        dropped = torch.zeros_like(ahead, dtype=torch.bool).scatter(-1, order, ahead >= sampling.top_p)
        logits = logits.masked_fill(dropped, float("-inf"))
    shares = logits.softmax(-1)
    if sampling.min_p is not None:
        shares = shares.masked_fill(shares < sampling.min_p * shares.amax(-1, keepdim=True), 0.0)
    return shares
