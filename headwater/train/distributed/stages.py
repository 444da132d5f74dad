"""Where the depth is cut, and which tensors cross each cut.

A residual's state is a flat tuple. Run once without data, the decoder shows which tensors of it are the very same
object before sublayer i and before sublayer j: those are history, and a rank that has seen one need never be sent it
again. So every residual gets the block cache, and none has to know of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from headwater.errors import UserError
from headwater.models import Decoder, ModelConfig
from headwater.residuals import AttentionResidual
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
    with FakeTensorMode(), torch.no_grad(), half_precision(device), device:
        model = plain_reads(Decoder(config))
        tokens = torch.zeros(batch, context, dtype=torch.long)
        rotary = model.rotary(0, context)
        states = [model.residual.begin(model.embed(tokens))]
        for i in range(len(model.sublayers)):
            states.append(model.step(i, rotary, None, *states[-1]))
    return name_states(states)


def name_states(states: Sequence[Sequence[Tensor]]) -> States:
    """All states are alive together, so that an id stands for one tensor."""
    keys: dict[int, int] = {}
    for state in states:
        for tensor in state:
            keys.setdefault(id(tensor), len(keys))
    return tuple(tuple(Slot(keys[id(t)], t.shape, t.dtype) for t in state) for state in states)


def plain_reads(model: Decoder) -> Decoder:
    """Two-phase reads keep the queries of all depths in the state; a stage has its own only, and reads one by one."""
    if isinstance(model.residual, AttentionResidual):
        model.residual.two_phase = None
    return model


def cut(sublayers: int, stages: int, cuts: Sequence[int] = ()) -> tuple[int, ...]:
    """Bounds of the stages, 0 and `sublayers` included: `cuts` where given, else slices that differ by one at most."""
    if cuts:
        bounds = (0, *cuts, sublayers)
        if len(cuts) != stages - 1 or any(a >= b for a, b in pairwise(bounds)):
            raise UserError(
                f"parallel.cuts must name {stages - 1} sublayers, rising, from 1 to {sublayers - 1}; got {list(cuts)}"
            )
        return bounds
    if stages > sublayers:
        raise UserError(f"{sublayers} sublayers do not divide into {stages} stages: lower --pipeline or --chunks")
    return tuple(s * sublayers // stages for s in range(stages + 1))


@dataclass(frozen=True)
class Hop:
    """What a stage takes in, by position in its state: `arrives` is sent to it, the rest is on its rank."""

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
    seen: list[set[int]] = [set() for _ in range(ranks)]
    arrivals, firsts = [], []
    for s in range(stages):
        before = () if s == 0 else states[bounds[s]]
        after = () if s == stages - 1 else states[bounds[s + 1]]
        known = seen[s % ranks]
        arrivals.append(tuple(j for j, slot in enumerate(before) if not cache or slot.key not in known))
        here = {slot.key for slot in (*before, *after)}
        firsts.append(here - known)
        known |= here
    found = []
    for s in range(stages):
        later = range(s + ranks, stages, ranks)
        lent = {states[bounds[t]][j].key for t in later for j in range(len(states[bounds[t]])) if j not in arrivals[t]}
        state = () if s == 0 else states[bounds[s]]
        found.append(Hop(state, arrivals[s], frozenset(firsts[s] & lent), ends=s + ranks >= stages))
    return tuple(found)


def prune(model: Decoder, start: int, stop: int) -> Decoder:
    """Leave sublayers [start, stop) and their residual parameters; the ends keep embedding and head. Names stay."""
    last = stop == len(model.sublayers)
    own = range(start, stop + last)  # the final read belongs to the last stage
    for i in set(range(len(model.sublayers))) - set(range(start, stop)):
        model.sublayers[i] = nn.Module()
    for table in model.residual.children():
        assert isinstance(table, nn.ModuleDict | nn.ParameterDict), "residual parameters are keyed by sublayer"
        for key in [key for key in table if int(key) not in own]:
            del table[key]
    if not last:
        model.head, model.norm = nn.Identity(), nn.Identity()  # type: ignore[assignment]
    if start and not (last and model.config.tie_embeddings):
        model.embedding = nn.Identity()  # type: ignore[assignment]
    return model
