"""Caches of fixed size, for a batch whose rows may be at different positions: what decoding needs.

Prompts of one length are read together, into tensors that are allocated at their first tokens (`RoomKV`). Where all
prompts have one length, these have room for what will be drawn too; otherwise `gather` lays them out, one sublayer
after the other. A new token is written at its row's place, and looks at what its row has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.ops.decode import attend
from headwater.ops.routing import use_triton

from .attention import KVCache
from .kda import KDAState
from .mla import LatentCache


@dataclass
class Rows:
    """Where each row of a batch is.

    `lengths` (B,), the tokens that each has seen, on the device; `room`, the most that one can; `even`, the length
    where all rows have the same: caches then hand out what they hold without a mask.
    """

    lengths: Tensor
    room: int
    even: int | None

    def places(self, count: int) -> Tensor:
        """Positions (B, count) of the next tokens."""
        return self.lengths[:, None] + torch.arange(count, device=self.lengths.device)

    def advance(self, count: int) -> None:
        self.lengths += count
        self.even = None if self.even is None else self.even + count

    def write(self, kept: Tensor, new: Tensor) -> Tensor:
        """`kept` (B, room, ...) with `new` (B, T, ...) at each row's place, as far as any row has come."""
        count = new.shape[1]
        if self.even is not None:
            kept[:, self.even : self.even + count] = new
            return kept[:, : self.even + count]
        places = self.places(count).reshape(*new.shape[:2], *[1] * (new.dim() - 2))
        return kept.scatter_(1, places.expand_as(new), new.to(kept.dtype))

    def mask(self, count: int, window: int | None) -> Tensor | None:
        """Where the next tokens may look, (B, 1, count, as many as `write` returns); None where that is everything."""
        if self.even is not None and count == 1 and window is None:
            return None
        keys = torch.arange(
            self.room if self.even is None else self.even + count, device=self.lengths.device
        )
        places = self.places(count)[:, None, :, None]
        seen = keys <= places
        return seen if window is None else seen & (keys > places - window)


class RoomKV(KVCache):
    """Keys and values of rows that have come equally far, which grow inside tensors (B, room, kv_heads, head_dim)."""

    def __init__(self, room: int, window: int | None) -> None:
        super().__init__(window)
        self.room, self.seen = room, 0

    def __len__(self) -> int:
        return self.seen

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        first, self.seen = self.seen, self.seen + keys.shape[-2]
        if self.keys is None or self.values is None:
            self.keys, self.values = (
                _with_room(part.transpose(1, 2), self.room) for part in (keys, values)
            )
            return keys, values
        visible = slice(0 if self.window is None else max(0, first + 1 - self.window), self.seen)
        for kept, new in ((self.keys, keys), (self.values, values)):
            kept[:, first : self.seen] = new.transpose(1, 2)
        return self.keys[:, visible].transpose(1, 2), self.values[:, visible].transpose(1, 2)


class RoomLatents(LatentCache):
    """The same for latents, (B, room, latent + shared)."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.seen = room, 0

    def __len__(self) -> int:
        return self.seen

    def append(self, latent: Tensor) -> Tensor:
        first, self.seen = self.seen, self.seen + latent.shape[1]
        if self.latent is None:
            self.latent = _with_room(latent, self.room)
            return latent
        self.latent[:, first : self.seen] = latent
        return self.latent[:, : self.seen]


def _with_room(new: Tensor, room: int) -> Tensor:
    """(B, room, ...) that begins with `new`, (B, T, ...)."""
    whole = new.new_zeros(len(new), room, *new.shape[2:])
    whole[:, : new.shape[1]] = new
    return whole


class FixedKV(KVCache):
    """Keys and values (B, room, kv_heads, head_dim), handed out as attention takes them."""

    def __init__(self, rows: Rows, keys: Tensor, values: Tensor, window: int | None) -> None:
        super().__init__(window, keys, values)
        self.rows = rows

    def __len__(self) -> int:
        return self.rows.room

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        kept = (
            self.rows.write(self.keys, keys.transpose(1, 2)),
            self.rows.write(self.values, values.transpose(1, 2)),
        )
        return kept[0].transpose(1, 2), kept[1].transpose(1, 2)

    def mask(self, count: int) -> Tensor | None:
        return self.rows.mask(count, self.window)

    def attend_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        assert self.keys is not None
        assert self.values is not None
        if q.shape[2] != 1 or not use_triton("auto", q, k, v, self.keys, self.values):
            return None
        lengths = self.rows.lengths
        y = attend(
            q[:, :, 0], k[:, :, 0], v[:, :, 0], self.keys, self.values, lengths, window=self.window
        )
        return y.unflatten(1, (q.shape[1], 1, -1))


class FixedLatents(LatentCache):
    """Latents and shared keys (B, room, latent + shared)."""

    def __init__(self, rows: Rows, latent: Tensor) -> None:
        super().__init__(latent)
        self.rows = rows

    def append(self, latent: Tensor) -> Tensor:
        assert self.latent is not None
        return self.rows.write(self.latent, latent)

    def mask(self, count: int) -> Tensor | None:
        return self.rows.mask(count, None)

    def attend_one(self, q: Tensor, latent: Tensor, values: int, scale: float) -> Tensor | None:
        assert self.latent is not None
        if q.shape[2] != 1 or not use_triton("auto", q, latent, self.latent):
            return None
        keys = self.latent[:, :, None]  # (B, room, 1, latent + shared)
        one, kept = latent[..., :values], keys[..., :values]
        y = attend(q[:, :, 0], latent, one, keys, kept, self.rows.lengths, scale=scale)
        return y.unflatten(1, (q.shape[1], 1, -1))


class FixedState(KDAState):
    """A state that stays where it is: what a CUDA graph has recorded finds it there."""

    def keep_state(self, state: Tensor, count: int) -> None:
        assert self.state is not None
        self.state.copy_(state)
        self.seen += count

    def keep_tail(self, tail: Tensor) -> None:
        assert self.tail is not None
        self.tail.copy_(tail)


def gather(
    entries: Sequence[KVCache | KDAState | LatentCache],
    rows: Rows,
    order: Tensor,
    lengths: Sequence[int],
) -> KVCache | KDAState | LatentCache:
    """What one sublayer keeps, of all rows.

    `entries`: of each group of prompts, as long as `lengths` says; their rows one after the other, taken by `order`,
    are the batch's.
    """
    first = entries[0]
    if isinstance(first, KDAState):
        states, tails = ([getattr(entry, name) for entry in entries] for name in ("state", "tail"))
        return FixedState(torch.cat(states)[order], torch.cat(tails)[order], seen=max(lengths))
    if isinstance(first, LatentCache):
        return FixedLatents(rows, spread(entries, "latent", rows, order, lengths))
    if first.keys is None:
        return first  # of a sublayer that mixes channels
    keys, values = (spread(entries, name, rows, order, lengths) for name in ("keys", "values"))
    return FixedKV(rows, keys, values, first.window)


def spread(
    entries: Sequence[object], name: str, rows: Rows, order: Tensor, lengths: Sequence[int]
) -> Tensor:
    """What entries keep under a name, each the last tokens of a length, as one (B, room, ...): the entry's own tensor,
    where there is one that has room."""
    only = entries[0]
    if (
        len(entries) == 1
        and isinstance(only, RoomKV | RoomLatents)
        and only.room == rows.room
        and _in_order(order)
    ):
        return getattr(only, name)
    parts = [_tokens_of(entry, name) for entry in entries]
    whole = parts[0].new_zeros(len(order), rows.room, *parts[0].shape[2:])
    places, start = order.argsort(), 0
    for part, length in zip(parts, lengths):
        whole[places[start : start + len(part)], length - part.shape[1] : length] = part
        start += len(part)
    return whole


def _in_order(order: Tensor) -> bool:
    return order.tolist() == list(range(len(order)))


def _tokens_of(entry: object, name: str) -> Tensor:
    """(B, T, ...)."""
    kept: Tensor = getattr(entry, name)
    if isinstance(entry, RoomKV | RoomLatents):
        return kept[:, : entry.seen]
    return kept.transpose(1, 2) if isinstance(entry, KVCache) else kept
