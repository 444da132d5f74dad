"""Parts for a pipeline: which tensors of a residual's state cross a cut, and a cache that sends each of them once.

A residual's state is a flat tuple. Run once without data, a residual shows which tensors of its state are the very
same object before sublayer i and before sublayer j. These tensors are history, and a rank that has seen one need never
be sent it again. So every residual gets the block cache, and no residual has to know of it.

    states = trace(residual, batch=1, tokens=4096)
    plan = hops(states, bounds=(0, 4, 8, 12, 16), ranks=2, cache=True)
    port = StagePort(plan[s], plan[s + 1] if s + 1 < len(plan) else None, cache_of_this_rank)

In a stage, `port.receive` completes a state from the tensors that arrived, and `port.send` picks the tensors that the
next stage lacks. docs/explanation/pipeline-cache.md derives the bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwater._torch import without_data
from headwater.residuals import Residual, State, build, with_options

__all__ = [
    "BlockCache",
    "Hop",
    "Settle",
    "Slot",
    "StagePort",
    "hops",
    "localize",
    "name_states",
    "trace",
]


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


def trace(
    residual: Residual, batch: int, tokens: int, dtype: torch.dtype = torch.float32
) -> States:
    """Run a residual on tensors without data, and name the tensors of each state.

    Arguments:
        residual: the residual of the whole depth. The residual is built again, so its parameters may be anywhere.
        batch: sequences of a micro-batch.
        tokens: tokens of a sequence that a rank holds between sublayers.
        dtype: of the stream.

    Returns the state before each sublayer, and the state after the last one.
    Raises ValueError if a read has three inputs, which the blocks of the engines do not take.
    """
    # Between stages travel the sources alone, which is what a state holds where reads are made one by one.
    spec = with_options(residual.spec, schedule="one-pass")
    kinds = residual.kinds or None
    with without_data(), torch.no_grad():
        depth = build(spec, residual.dim, residual.sublayers, kinds)
        shape = (batch, tokens, residual.dim)
        states = [depth.begin(torch.zeros(shape, dtype=dtype))]
        for i in range(depth.sublayers):
            x, state = depth.read(states[-1], i)
            if not isinstance(x, Tensor):
                raise ValueError(
                    f"'{residual.spec}' gives attention three inputs, and a block of this engine takes one: "
                    "choose a residual with one input"
                )
            states.append(depth.write(state, i, torch.zeros(shape, dtype=dtype)))
        return name_states(states)


def name_states(states: Sequence[Sequence[Tensor]]) -> States:
    """Give each tensor of some states a key.

    Arguments: `states`, all alive together, so that an id stands for one tensor.
    Returns a `Slot` for each tensor of each state.
    """
    keys: dict[int, int] = {}
    for state in states:
        for tensor in state:
            keys.setdefault(id(tensor), len(keys))
    named = []
    for state in states:
        slots = [Slot(keys[id(tensor)], tensor.shape, tensor.dtype) for tensor in state]
        named.append(tuple(slots))
    return tuple(named)


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
    """Plan what each stage is sent. Stage s lives on rank s mod `ranks`.

    Arguments:
        states: what `trace` returned.
        bounds: the first sublayer of each stage, and the number of sublayers last.
        ranks: the size of the pipeline.
        cache: whether a rank keeps what it has seen. If not, a hop carries the whole state.

    Returns a `Hop` for each stage. The first stage takes tokens, so nothing arrives there.
    """
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


class BlockCache:
    """The tensors that a rank has seen of each micro-batch, and the gradients its stages owe to one another."""

    def __init__(self) -> None:
        self.tensors: dict[int, dict[int, Tensor]] = defaultdict(dict)
        self.deposits: dict[int, dict[int, Tensor]] = defaultdict(dict)

    def keep(self, micro: int, key: int, tensor: Tensor) -> None:
        self.tensors[micro][key] = tensor.detach()

    def borrow(self, micro: int, key: int) -> Tensor:
        """A leaf over the kept tensor, whose gradient becomes a deposit."""
        tensor = self.tensors[micro][key].detach()
        if torch.is_grad_enabled():
            tensor.requires_grad_()
            tensor.register_post_accumulate_grad_hook(lambda leaf: self.deposit(micro, key, leaf))
        return tensor

    def deposit(self, micro: int, key: int, leaf: Tensor) -> None:
        gradient, leaf.grad = cast(Tensor, leaf.grad), None
        owed = self.deposits[micro]
        owed[key] = owed[key] + gradient if key in owed else gradient

    def withdraw(self, micro: int, key: int, gradient: Tensor) -> Tensor:
        """The gradient of a tensor with what later stages of this rank have deposited for it."""
        deposit = self.deposits[micro].pop(key, None)
        if not self.deposits[micro]:
            del self.deposits[micro]
        return gradient if deposit is None else gradient + deposit

    def forget(self, micro: int) -> None:
        """After the rank's last stage has borrowed, the graph alone decides how long a tensor lives."""
        self.tensors.pop(micro, None)


class Settle(torch.autograd.Function):
    """The identity, whose backward adds the deposits. All tensors at once: one that this stage does not use
    then gets zeros. Alone it would get None: nothing would fetch its deposit, and torch 2.10 refuses to send it."""

    @staticmethod
    def forward(
        ctx: Any, cache: BlockCache, micro: int, keys: tuple[int, ...], *tensors: Tensor
    ) -> Any:
        ctx.cache, ctx.micro, ctx.keys = cache, micro, keys
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        settled = (ctx.cache.withdraw(ctx.micro, key, g) for key, g in zip(ctx.keys, gradients))
        return None, None, None, *settled


class StagePort:
    """The way of a state into a stage and out of it, past the cache of the stage's rank.

    Arguments of the constructor:
        hop: what this stage is sent.
        following: what the next stage is sent; None at the last stage.
        cache: one `BlockCache` for all stages of a rank.
    """

    def __init__(self, hop: Hop, following: Hop | None, cache: BlockCache) -> None:
        self.hop, self.following, self.cache = hop, following, cache

    def receive(self, arrived: Sequence[Tensor], micro: int) -> State:
        """Return the whole state of micro-batch `micro`, from what arrived and what the rank has seen."""
        slots, hop = self.hop.state, self.hop
        keys = tuple(slots[j].key for j in hop.arrives)
        tensors = dict(zip(hop.arrives, self._share(keys, tuple(arrived), micro)))
        for j in hop.borrows:
            tensors[j] = self.cache.borrow(micro, slots[j].key)
        if hop.ends:
            self.cache.forget(micro)
        return tuple(tensors[j] for j in range(len(slots)))

    def send(self, state: State, micro: int) -> tuple[Tensor, ...]:
        """Return the tensors of a settled state that the next stage lacks."""
        assert self.following is not None
        slots = self.following.state
        keys = tuple(slots[j].key for j in self.following.arrives)
        tensors = tuple(state[j].contiguous() for j in self.following.arrives)
        return self._share(keys, tensors, micro)

    def _share(
        self, keys: tuple[int, ...], tensors: tuple[Tensor, ...], micro: int
    ) -> tuple[Tensor, ...]:
        """Leave in the cache what this stage has first and a later stage needs."""
        for key, tensor in zip(keys, tensors):
            if key in self.hop.keeps:
                self.cache.keep(micro, key, tensor)
        if not torch.is_grad_enabled():
            return tensors
        return Settle.apply(self.cache, micro, keys, *tensors)


def localize(residual: Residual) -> None:
    """Let a residual compute on a rank's own tokens, with parameters that are replicated DTensors.

    Under sequence parallelism the ranks hold different tokens of the stream. Pass `to_local()` of the stream to
    the verbs. Each parameter is then read as a plain tensor, and its gradient is the sum over the ranks. Kernels
    never see a DTensor, and names and values of parameters stay.

    Arguments: `residual`, whose parameters are, or will be, DTensors that every rank of the mesh holds whole.
    """
    for module in residual.modules():
        kind = type(module)
        localized: Any = type(kind.__name__, (_Localized, kind), {"__module__": kind.__module__})
        module.__class__ = localized


class _Localized(nn.Module):
    """Stands before the class of a module, and reads its replicated DTensors as plain tensors."""

    def __getattr__(self, name: str) -> Any:
        from torch.distributed.tensor import DTensor, Partial  # takes a second to import

        value = super().__getattr__(name)
        # FSDP2 gathers a parameter before a forward. Until then it asks for the shards.
        if not isinstance(value, DTensor) or not all(p.is_replicate() for p in value.placements):
            return value
        # Each rank knows the gradient of its own tokens.
        return value.to_local(grad_placements=[Partial()] * value.device_mesh.ndim)
