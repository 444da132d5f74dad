"""Cuts through the depth, and the tensors that cross each cut.

A residual's state is a flat tuple. Run once without data, the decoder shows which tensors of it are the very same
object before sublayer i and before sublayer j: those are history, and a rank that has seen one need never be sent it
again. So every residual gets the block cache, and none has to know of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from headwater._torch import without_data
from headwater.errors import UserError, spell
from headwater.models import Decoder, ModelConfig
from headwater.residuals import Residual, with_options
from headwater.runs.settings import Config
from headwater.train.losses import half_precision


@dataclass(frozen=True)
class Slot:
    """One tensor of a state. Equal keys at two cuts: the same tensor, untouched in between."""

    key: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


States = tuple[tuple[Slot, ...], ...]  # before each sublayer, and after the last


def trace_states(config: ModelConfig, batch: int, context: int, device: torch.device) -> States:
    """The state before each sublayer for a micro-batch, from one pass that computes shapes alone."""
    with without_data(), torch.no_grad(), half_precision(device), device:
        model = Decoder(one_pass(config))
        tokens = torch.zeros(batch, context, dtype=torch.long)
        rotary = model.rotary(0, context)
        states = [model.begin(tokens)]
        for i in range(len(model.sublayers)):
            states.append(model.run(states[-1], i, i + 1, rotary))
    return name_states(states)


def name_states(states: Sequence[Sequence[Tensor]]) -> States:
    """All states are alive together, so that an id stands for one tensor."""
    keys: dict[int, int] = {}
    for state in states:
        for tensor in state:
            keys.setdefault(id(tensor), len(keys))

    def name(state: Sequence[Tensor]) -> tuple[Slot, ...]:
        return tuple(Slot(keys[id(tensor)], tensor.shape, tensor.dtype) for tensor in state)

    return tuple(name(state) for state in states)


def one_pass(config: ModelConfig) -> ModelConfig:
    """Between stages travel the sources alone, which is what a state holds where reads are made one by one."""
    return replace(config, residual=with_options(config.residual, schedule="one-pass"))


def windows_per_micro(config: Config, data: int) -> int:
    """Windows of a micro-batch on each of the `data` ranks that share the batch, if the schedule takes as many
    micro-batches as there are."""
    size, micros, settings = config.train.batch_size, config.train.accumulate, config.parallel
    row = settings.pipeline
    uneven = micros % max(1, micros // row) if settings.chunks > 1 else micros < row
    if row > 1 and settings.pipeline_schedule == "1f1b" and uneven:
        raise UserError(
            f"train.accumulate must be parallel.pipeline ({row}) or more, and with parallel.chunks a number of "
            f"micro-batches that divides into equal rounds; got {micros}: try "
            f"{spell('train.accumulate')} {-(-micros // row) * row}"
        )
    if size % (micros * data):
        raise UserError(
            f"train.batch_size ({size}) must be a multiple of train.accumulate ({micros}) times the {data} ranks that "
            f"share the batch: try {spell('train.batch_size')} "
            f"{-(-size // (micros * data)) * micros * data}"
        )
    return size // (micros * data)


def cut(residual: Residual, stages: int, cuts: Sequence[int] = ()) -> tuple[int, ...]:
    """Bounds of the stages, 0 and `sublayers` included: `cuts` where given, else slices as equal as the residual's own
    limits allow, which differ by one sublayer at most where it has none."""
    sublayers = residual.sublayers
    allowed = [i for i in range(1, sublayers) if residual.may_cut(i)]
    if cuts:
        bounds = (0, *cuts, sublayers)
        if len(cuts) != stages - 1 or any(a >= b for a, b in pairwise(bounds)):
            raise UserError(
                f"parallel.cuts must name {stages - 1} sublayers, rising, from 1 to {sublayers - 1}; got {list(cuts)}"
            )
        if refused := [i for i in cuts if i not in allowed]:
            raise UserError(
                f"parallel.cuts may not name {refused[0]}: model.residual {residual.spec!r} shares parameters between "
                f"the sublayers around it. Possible: {', '.join(map(str, allowed)) or 'none'}"
            )
        return bounds
    if stages > len(allowed) + 1:
        raise UserError(
            f"{sublayers} sublayers with model.residual {residual.spec!r} divide into {len(allowed) + 1} stages at "
            f"most, not {stages}: lower {spell('parallel.pipeline')} or {spell('parallel.chunks')}"
        )
    bounds = (0,)
    for s in range(1, stages):
        # Near its even share, behind the cut before, and with a place left for each cut to come.
        room = [i for i in allowed if i > bounds[-1]]
        room = room[: len(room) - (stages - 1 - s)]
        even = s * sublayers // stages
        bounds += (min(room, key=lambda i: (abs(i - even), i)),)
    return (*bounds, sublayers)


@dataclass(frozen=True)
class Hop:
    """The input of a stage, by position in its state: `arrives` is sent to it, the rest is on its rank."""

    state: tuple[Slot, ...]
    arrives: tuple[int, ...]
    keeps: frozenset[int]
    """Keys that this stage is the first on its rank to have, and that a later stage there takes from the cache."""
    ends: bool
    """No later stage on this rank."""

    @property
    def bytes(self) -> int:
        return sum(self.state[j].bytes for j in self.arrives)

    @property
    def borrows(self) -> tuple[int, ...]:
        return tuple(j for j in range(len(self.state)) if j not in self.arrives)


def hops(states: States, bounds: Sequence[int], ranks: int, *, cache: bool) -> tuple[Hop, ...]:
    """One for each stage; the first takes tokens, so nothing arrives there. Stage s lives on rank s mod `ranks`."""
    stages = len(bounds) - 1
    keys_of_rank: list[set[int]] = [set() for _ in range(ranks)]
    arrivals: list[tuple[int, ...]] = []
    firsts: list[set[int]] = []  # keys that a stage is the first on its rank to have
    for s in range(stages):
        before = () if s == 0 else states[bounds[s]]
        after = () if s == stages - 1 else states[bounds[s + 1]]
        keys = keys_of_rank[s % ranks]
        arrives = [j for j, slot in enumerate(before) if not cache or slot.key not in keys]
        arrivals.append(tuple(arrives))
        here = {slot.key for slot in (*before, *after)}
        firsts.append(here - keys)
        keys |= here
    plan = []
    for s in range(stages):
        later = range(s + ranks, stages, ranks)
        lent = set()  # what later stages take from the cache
        for t in later:
            for j, slot in enumerate(states[bounds[t]]):
                if j not in arrivals[t]:
                    lent.add(slot.key)
        state = () if s == 0 else states[bounds[s]]
        keeps = frozenset(firsts[s] & lent)
        plan.append(Hop(state, arrivals[s], keeps, ends=s + ranks >= stages))
    return tuple(plan)


def prune(model: Decoder, start: int, stop: int) -> Decoder:
    """Leave sublayers [start, stop) and their residual parameters; the ends keep embedding and head. Names stay."""
    last = stop == len(model.sublayers)
    for i in set(range(len(model.sublayers))) - set(range(start, stop)):
        model.sublayers[i] = nn.Module()
    model.residual.keep_only(start, stop)
    if not last:
        model.head, model.norm = nn.Identity(), nn.Identity()  # type: ignore[assignment]
    if start and not (last and model.config.tie_embeddings):
        model.embedding = nn.Identity()  # type: ignore[assignment]
    return model
