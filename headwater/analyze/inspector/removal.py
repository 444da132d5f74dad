"""What happens without a source: its share is subtracted from what a sublayer reads, and the model runs on.

The share is that of the undisturbed pass: nothing is renormalised. Later sublayers see what follows from it. What the
residual carries on keeps the source: only the reader goes without.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.residuals import Norm, Read, Residual, State, Watcher, apply_norm, watched

from .inspection import Removal, Top
from .shares import Shares
from .subject import Subject

Place = tuple[int | None, int]  # (read, source): at one read, or, None, at all
NUMBERS = (
    2**25
)  # of the logits, and of all sources, of one batch of passes, at most: 128 MiB in fp32


class _Remover(Watcher):
    """Row b of the batch goes without source `places[b][1]` at read `places[b][0]`, or at all reads."""

    def __init__(self, shares: Shares, places: Sequence[Place]) -> None:
        self.shares, self.places = shares, places

    def read(
        self, residual: Residual, state: State, i: int, norm: Norm | None
    ) -> tuple[Read, State]:
        x, state = super().read(residual, state, i, None)
        if isinstance(x, tuple):
            query, key, value = (self._without(part, i, stream) for stream, part in enumerate(x))
            x = (query, key, value)
        else:
            x = self._without(x, i, 0)
        return apply_norm(norm, x), state

    def end(self, residual: Residual, state: State, norm: Norm | None) -> Tensor:
        return apply_norm(
            norm, self._without(super().end(residual, state, None), residual.sublayers, 0)
        )

    def _without(self, x: Tensor, read: int, stream: int) -> Tensor:
        x = x.clone()
        for row, (at, source) in enumerate(self.places):
            if source <= read and at in (None, read):
                x[row] = less(x[row], self.shares.of(read, source, stream).to(x.dtype))
        return x


def less(x: Tensor, share: Tensor) -> Tensor:
    """x - share, (T, D). A token of which only rounding is left has nothing left: a norm would make that large."""
    rest = x - share
    nothing = rest.norm(dim=-1, keepdim=True) <= 8 * torch.finfo(x.dtype).eps * x.norm(
        dim=-1, keepdim=True
    )
    return rest.masked_fill(nothing, 0)


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
    """The change of loss and the likeliest tokens without each of `places`. `tokens`: (1, T). `loss`: of the whole
    model, (T - 1)."""
    residual = subject.residual
    batch = max(
        1, NUMBERS // (tokens.shape[1] * max(vocabulary, residual.dim * (residual.sublayers + 1)))
    )
    changes, tops = [], []
    for start in range(0, len(places), batch):
        some = places[start : start + batch]
        rows = tokens.expand(len(some), -1)
        with watched(residual, _Remover(shares, some)):
            logits = subject.logits(rows)
        changes.append(losses(logits, rows) - loss)
        tops.append(top_of(logits, top))
    return Removal(
        torch.cat(changes),
        Top(torch.cat([t.ids for t in tops]), torch.cat([t.probabilities for t in tops])),
    )


def losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Nats for each next token, (B, T - 1)."""
    scores = logits[:, :-1].log_softmax(-1)
    return -scores.gather(-1, tokens[:, 1:, None]).squeeze(-1).cpu()


def top_of(logits: Tensor, count: int) -> Top:
    """The likeliest tokens, (..., count), the likeliest first."""
    found = logits.softmax(-1).topk(min(count, logits.shape[-1]))
    return Top(found.indices.cpu(), found.values.cpu())
