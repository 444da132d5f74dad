"""The cache of a decoder: keys and values, latents, or states of the tokens it has seen.

A cache is allocated once, for B rows of at most `room` tokens. Each row has its own length: new
tokens are written at the row's place and look at what the row has. Nothing ever moves, so that a
step which a CUDA graph has recorded finds it again. For inference: gradients do not pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.ops.decode import attend
from headwater.ops.routing import use_triton
from headwater.residuals import State


class Lengths:
    """Tokens that each row has: on the device as `tokens` (B,), and on the host as `even`.

    `room` is the most that a row can have. `even` is None where the host does not know one number
    for all rows; where it does, sublayers get what there is, and otherwise all room with a mask.
    """

    def __init__(self, tokens: Tensor, room: int, even: int | None = None) -> None:
        self.tokens, self.room, self.even = tokens, room, even

    @property
    def empty(self) -> bool:
        return self.even == 0

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate room for the tokens of all rows, (B, room, *shape)."""
        return torch.zeros(
            len(self.tokens), self.room, *shape, dtype=dtype, device=self.tokens.device
        )

    def positions(self, count: int) -> Tensor:
        """Positions (B, count) of the next tokens."""
        return self.tokens[:, None] + torch.arange(count, device=self.tokens.device)

    def advance(self, count: int) -> None:
        self.tokens += count
        if self.even is not None:
            self.even += count

    def write(self, stored: Tensor, new: Tensor) -> Tensor:
        """Write `new` (B, T, ...) into `stored` (B, room, ...); return what a row may have."""
        count = new.shape[1]
        # One length for all rows: a slice, and what there is so far.
        if self.even is not None:
            stop = self.even + count
            stored[:, self.even : stop] = new
            return stored[:, :stop]
        # Else each row's own places, and all room, of which a mask hides the rest.
        places = self.positions(count)
        while places.dim() < new.dim():
            places = places.unsqueeze(-1)
        return stored.scatter_(1, places.expand_as(new), new.to(stored.dtype))

    def mask(self, count: int, window: int | None) -> Tensor | None:
        """Say where the next tokens may look, (B, 1, count, room); None: attention knows."""
        # Attention knows by itself what one token, a window and a beginning look at.
        if self.even is not None:
            if count == 1 or window is not None or self.empty:
                return None
            return continuation_mask(count, self.even, self.tokens.device)
        # Each row looks at what it has, up to the new token itself.
        keys = torch.arange(self.room, device=self.tokens.device)
        places = self.positions(count)[:, None, :, None]
        visible = keys <= places
        if window is not None:
            visible &= keys > places - window
        return visible


def continuation_mask(count: int, past: int, device: torch.device) -> Tensor:
    """Say where new tokens (rows) may look: at the past, and at new tokens up to themselves.

    On a GPU the mask is never written out: for a portion of a long prompt it would fill the memory.
    """
    if device.type == "cuda":
        # Here, because it imports triton.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(count, past + count)
    mask = torch.ones(count, past + count, dtype=torch.bool, device=device)
    return mask.tril(diagonal=past)


@dataclass
class KeysValues:
    """Keys and values of an attention sublayer, (B, room, kv_heads, head_dim) each."""

    lengths: Lengths
    keys: Tensor
    values: Tensor
    window: int | None = None

    def rows(self, start: int, stop: int, lengths: Lengths) -> KeysValues:
        return KeysValues(lengths, self.keys[start:stop], self.values[start:stop], self.window)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values

    def mask(self, count: int) -> Tensor | None:
        return self.lengths.mask(count, self.window)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values, (B, kv_heads, T, d); return all that they may look at."""
        all_keys = self.lengths.write(self.keys, keys.transpose(1, 2))
        all_values = self.lengths.write(self.values, values.transpose(1, 2))
        # The first tokens are all there is; as they came they are laid out best.
        if self.lengths.empty:
            return keys, values
        # Of a window, only the tokens that the first new one looks at, if all rows have one length.
        if self.window is not None and self.lengths.even is not None:
            first = max(0, self.lengths.even + 1 - self.window)
            all_keys, all_values = all_keys[:, first:], all_values[:, first:]
        return all_keys.transpose(1, 2), all_values.transpose(1, 2)

    def attend_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Write one token of every row and attend, (B, H, 1, d), where a kernel does both."""
        if q.shape[2] != 1 or not use_triton("auto", q, k, v, self.keys, self.values):
            return None
        newest = q[:, :, 0], k[:, :, 0], v[:, :, 0]
        lengths = self.lengths.tokens
        y = attend(*newest, self.keys, self.values, lengths, window=self.window)
        return y.unflatten(1, (q.shape[1], 1, -1))


@dataclass
class Latents:
    """Latents and shared keys of an MLA sublayer, (B, room, latent + shared): for all heads."""

    lengths: Lengths
    latents: Tensor

    def rows(self, start: int, stop: int, lengths: Lengths) -> Latents:
        return Latents(lengths, self.latents[start:stop])

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.latents,)

    def mask(self, count: int) -> Tensor | None:
        return self.lengths.mask(count, None)

    def append(self, latents: Tensor) -> Tensor:
        """Write new latents, (B, T, latent + shared); return all that they may look at."""
        all_latents = self.lengths.write(self.latents, latents)
        return latents if self.lengths.empty else all_latents

    def attend_one(self, q: Tensor, latent: Tensor, values: int, scale: float) -> Tensor | None:
        """Write one token of every row and attend, with absorbed queries (B, H, 1, latent +
        shared), where a kernel does both."""
        if q.shape[2] != 1 or not use_triton("auto", q, latent, self.latents):
            return None
        # A single head of keys, whose first channels are the values.
        keys = self.latents[:, :, None]  # (B, room, 1, latent + shared)
        new = q[:, :, 0], latent, latent[..., :values]
        y = attend(*new, keys, keys[..., :values], self.lengths.tokens, scale=scale)
        return y.unflatten(1, (q.shape[1], 1, -1))


@dataclass
class States:
    """The memory of a KDA sublayer, as large after many tokens as after one.

    `state` (B, H, K, V) in fp32; `tail` (B, kernel - 1, 3 H K), its convolutions' last inputs.
    """

    state: Tensor
    tail: Tensor

    def rows(self, start: int, stop: int, lengths: Lengths) -> States:
        return States(self.state[start:stop], self.tail[start:stop])

    def tensors(self) -> tuple[Tensor, ...]:
        return self.state, self.tail


Entry = KeysValues | Latents | States


class Cache:
    """One entry for each sublayer that mixes tokens, None for the others, and the rows' lengths.

    `past` is what the residual looks back at along the tokens, if anything.
    """

    def __init__(self, entries: list[Entry | None], lengths: Lengths) -> None:
        self.entries, self.lengths = entries, lengths
        self.past: State = ()

    def __getitem__(self, i: int) -> Entry | None:
        return self.entries[i]

    def keep_past(self, past: State) -> None:
        """Keep what the residual will look back at, in one place from the first tokens on."""
        if not self.past:
            self.past = past
            return
        for stored, new in zip(self.past, past, strict=True):
            stored.copy_(new)

    def rows(self, start: int, stop: int) -> Cache:
        """View some rows of an empty cache, to read prompts of one length into."""
        lengths = Lengths(self.lengths.tokens[start:stop], self.lengths.room, even=0)
        views: list[Entry | None] = []
        for entry in self.entries:
            views.append(None if entry is None else entry.rows(start, stop, lengths))
        return Cache(views, lengths)

    def join(self, views: list[Cache]) -> None:
        """Take over what views of all rows know besides the tensors that they share with this."""
        counts = {view.lengths.even for view in views}
        self.lengths.even = counts.pop() if len(counts) == 1 else None
        pasts = [view.past for view in views]
        self.past = tuple(map(torch.cat, zip(*pasts)))
