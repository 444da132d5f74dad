"""The effect of taking sources away: each share is subtracted from a read, and the model runs on.

The share is that of the undisturbed pass: nothing is renormalised. Later sublayers see what follows
from it. The residual still carries the source on: only the reader goes without.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.residuals import Norm, Read, Residual, State, Watcher, apply_norm, watched

from .forward_pass import Removal, Top
from .shares import Shares
from .subject import Subject

Place = tuple[int | None, int]  # (read, source): at one read, or, None, at all
# Numbers of one batch of passes at most, of the logits and of all sources: 128 MiB in fp32.
NUMBERS = 2**25


class _Remover(Watcher):
    """Row b of the batch goes without source `places[b][1]` at read `places[b][0]`, or at all."""

    def __init__(self, shares: Shares, places: Sequence[Place]) -> None:
        self.shares, self.places = shares, places

    def read(
        self, residual: Residual, state: State, i: int, norm: Norm | None
    ) -> tuple[Read, State]:
        x, state = super().read(residual, state, i, None)
        if isinstance(x, tuple):
            # The source has a share of its own in each input.
            query, key, value = (self._without(part, i, stream) for stream, part in enumerate(x))
            return apply_norm(norm, (query, key, value)), state
        return apply_norm(norm, self._without(x, i, 0)), state

    def end(self, residual: Residual, state: State, norm: Norm | None) -> Tensor:
        x = super().end(residual, state, None)
        return apply_norm(norm, self._without(x, residual.sublayers, 0))

    def _without(self, x: Tensor, read: int, stream: int) -> Tensor:
        x = x.clone()
        for row, (place, source) in enumerate(self.places):
            # A read has only the sources before it.
            if source <= read and place in (None, read):
                share = self.shares.of(read, source, stream)
                x[row] = less(x[row], share.to(x.dtype))
        return x


def less(x: Tensor, share: Tensor) -> Tensor:
    """Return x - share, (T, D), and zero where only rounding is left, which a norm enlarges."""
    rest = x - share
    # Eight roundings of x: what is smaller is nothing.
    rounding = 8 * torch.finfo(x.dtype).eps * x.norm(dim=-1, keepdim=True)
    return rest.masked_fill(rest.norm(dim=-1, keepdim=True) <= rounding, 0)


@torch.no_grad()
def remove(
    subject: Subject,
    tokens: Tensor,
    shares: Shares,
    places: Sequence[Place],
    loss: Tensor,
    top: int,
    vocabulary: int,
) -> Removal:
    """Run the model without each of `places`: the change of loss, and the likeliest tokens.

    tokens: (1, T). loss: the whole model's, (T - 1). top: how many tokens.
    """
    residual = subject.residual
    # The largest tensors of a pass are the logits, and all sources together.
    per_token = max(vocabulary, residual.dim * (residual.sublayers + 1))
    batch = max(1, NUMBERS // (tokens.shape[1] * per_token))

    # Each row of a batch goes without one place.
    changes, tops = [], []
    for start in range(0, len(places), batch):
        portion = places[start : start + batch]
        rows = tokens.expand(len(portion), -1)
        with watched(residual, _Remover(shares, portion)):
            logits = subject.logits(rows)
        changes.append(losses(logits, rows) - loss)
        tops.append(top_of(logits, top))
    ids = torch.cat([part.ids for part in tops])
    probabilities = torch.cat([part.probabilities for part in tops])
    return Removal(torch.cat(changes), Top(ids, probabilities))


def losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss of each next token in nats, (B, T - 1)."""
    scores = logits[:, :-1].log_softmax(-1)
    following = tokens[:, 1:, None]
    return -scores.gather(-1, following).squeeze(-1).cpu()


def top_of(logits: Tensor, count: int) -> Top:
    """Return the likeliest tokens, (..., count), the likeliest first."""
    count = min(count, logits.shape[-1])
    probabilities, ids = logits.softmax(-1).topk(count)
    return Top(ids.cpu(), probabilities.cpu())
