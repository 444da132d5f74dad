"""Choosing the next token of every row, where the logits are.

    token = argmax_v p_v / e_v,   e_v ~ Exp(1):   v is chosen with probability p_v

torch.multinomial does the same for one sample. The e_v follow from a counter and the row's seed
(`headwater.ops.decode.exponentials`): they are the same on every device, and nothing waits for the
host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.ops.decode import exponentials, likeliest

from .sampling import Sampling

# Stands for a token where one of the row's logits is NaN.
NO_NUMBERS = -1


class Draw:
    """Draws for a batch; a call waits for nothing, and can be recorded in a CUDA graph.

    `prompts` has what each row says so far, `seeds` the row's own seed.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        vocab: int,
        device: torch.device,
    ) -> None:
        self.sampling, self.vocab = sampling, vocab
        self.seeds = torch.tensor([seed % 2**63 for seed in seeds], device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.seen = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(len(prompts), vocab, dtype=torch.bool, device=device)
            for row, prompt in zip(self.seen, prompts):
                row[torch.tensor(prompt, dtype=torch.long, device=device)] = True

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose tokens (B,) from logits (B, vocab); NO_NUMBERS where a row has a NaN."""
        greedy = self.sampling.temperature == 0
        if greedy and self.seen is None:
            return likeliest(logits)
        logits = logits.float()
        # Tokens that the text has become less likely.
        if self.seen is not None:
            penalty = self.sampling.repetition_penalty
            penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(self.seen, penalized, logits)
        if greedy:
            tokens = likeliest(logits)
        else:
            shares = shares_of(logits, self.sampling)
            tokens = likeliest(shares / exponentials(self.seeds, self.step, self.vocab))
            self.step += 1
        if self.seen is not None:
            self.seen.scatter_(1, tokens.clamp_min(0)[:, None], True)
        return tokens


def shares_of(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities (B, vocab), up to a factor, of the tokens to draw from; logits are in fp32."""
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        count = min(sampling.top_k, logits.shape[-1])
        smallest = logits.topk(count).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if sampling.top_p is not None:
        ordered, order = logits.sort(descending=True)
        # The mass before each token decides: the first token always stays.
        ahead = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        dropped = torch.zeros_like(ahead, dtype=torch.bool)
        dropped = dropped.scatter(-1, order, ahead >= sampling.top_p)
        logits = logits.masked_fill(dropped, float("-inf"))
    shares = logits.softmax(-1)
    if sampling.min_p is not None:
        largest = shares.amax(-1, keepdim=True)
        shares = shares.masked_fill(shares < sampling.min_p * largest, 0.0)
    return shares
