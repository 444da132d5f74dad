"""Needs of a run, before it is started: parameters, memory, bytes per hop and bubble of every rank.

Nothing is computed or allocated: the decoder runs once on tensors without data, and what autograd would keep is
counted. So grids of any size can be asked about from a laptop. A rank's peak is

    weights, gradients and optimizer, divided among the shards
    + what a micro-batch keeps for its backward, times the micro-batches in flight
    + the largest moment of one backward: at the head, or in a sublayer that is recomputed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headwater._torch import storage_key, without_data
from headwater.errors import spell
from headwater.models import Decoder, ModelConfig
from headwater.residuals import Norm, Read, Residual, State, Watcher, build, watched
from headwater.residuals.base import sublayer_of
from headwater.runs.settings import Config
from headwater.stages import States, hops, name_states
from headwater.train.distributed.ranks import data_ranks, shards_of
from headwater.train.distributed.stages import cut, one_pass, windows_per_micro
from headwater.train.distributed.tensor_parallel import (
    Exchange,
    bodies,
    divide_parameters,
    refuse_undivided,
    route,
    share,
)
from headwater.train.losses import nats_per_token

Kept = dict[int, int]  # storage to bytes
BYTES_PER_PARAMETER = 16  # fp32 weight, gradient and two moments of AdamW


@dataclass(frozen=True)
class Footprint:
    """One micro-batch through the whole depth: what each sublayer, and last the head, keeps for its backward."""

    states: States
    held: tuple[Kept, ...]
    """Storages that hold the state before each sublayer; last the state after all of them."""
    kept: tuple[Kept, ...]
    parameters: tuple[int, ...]
    """Parameters of each sublayer with its part of the residual; then of norm and head."""
    bodies: tuple[int, ...]
    """Parameters of attention or MLP that one rank of tensor parallelism has; last none."""
    embedding: int
    tokens: int
    exchanged: tuple[int, ...]
    """Bytes that a rank of tensor parallelism sends in each sublayer, forward."""


class Pretended(Exchange):
    """Shapes as if ranks met, and the bytes that each would send."""

    def __init__(self, size: int) -> None:
        super().__init__(size, "nobody")
        self.sent = 0

    def gather(self, x: Tensor) -> Tensor:
        self.sent += x.nbytes * (self.size - 1)
        return torch.cat([x] * self.size, 1)

    def scatter(self, y: Tensor) -> Tensor:
        self.sent += y.nbytes * (self.size - 1) // self.size
        return y.chunk(self.size, 1)[0].clone()


def footprint(
    config: ModelConfig, batch: int, *, half: bool, fused: bool, tensor: int = 1
) -> Footprint:
    """Trace a micro-batch of `batch` windows through the depth, without data.

    Arguments:
        half: bf16 as on a GPU.
        fused: reads over depth keep no tensors of their own, as with the kernels; else they are made as a step on a
            CPU makes them.
        tensor: ranks that share a window, of which one is traced.
    """
    with without_data(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        model = Decoder(one_pass(config) if fused else config)
        # Bodies are divided as on real ranks, and exchange with nobody.
        exchange = Pretended(tensor)
        if tensor > 1:
            divide_parameters(
                model, lambda parameter, placement: share(parameter, tensor, placement)
            )
            route(model, exchange)
        owned = {storage_key(p) for p in model.parameters()}
        tokens = torch.zeros(batch, config.context // tensor, dtype=torch.long)
        rotary = model.rotary(0, tokens.shape[1])
        storages_kept: list[Kept] = []
        sent: list[int] = []
        states = [model.begin(tokens)]
        for i in range(len(model.sublayers)):
            # The kernels keep nothing of a read.
            reads = watched(model.residual, FusedReads()) if fused else nullcontext()
            with keeping(owned) as storages, reads:
                states.append(model.run(states[-1], i, i + 1, rotary))
            storages_kept.append(storages)
            sent.append(exchange.sent - sum(sent))
        with keeping(owned) as storages:
            loss = nats_per_token(model.finish(states[-1]), tokens).mean()
        storages_kept.append(storages)
        counts = _parameters(model)
        del loss
        storages_held = []
        for state in states:
            storages_held.append({storage_key(t): t.untyped_storage().nbytes() for t in state})
        inside = [sum(p.numel() for p in body.parameters()) for body in bodies(model)]
    return Footprint(
        states=name_states(states),
        held=tuple(storages_held),
        kept=tuple(storages_kept),
        parameters=counts,
        bodies=(*inside, 0),
        embedding=model.embedding.weight.numel(),
        tokens=tokens.numel(),
        exchanged=tuple(sent),
    )


@contextmanager
def keeping(owned: set[int]) -> Iterator[Kept]:
    """Collects the storages that operations inside keep for their backward, parameters aside."""
    storages: Kept = {}

    def pack(tensor: Tensor) -> Tensor:
        if (storage := storage_key(tensor)) not in owned:
            storages[storage] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


class FusedReads(Watcher):
    """Reads that keep nothing, as the kernels': the state that they read is counted with the hops instead."""

    def read(
        self, residual: Residual, state: State, i: int, norm: Norm | None
    ) -> tuple[Read, State]:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
            return super().read(residual, state, i, norm)


def _parameters(model: Decoder) -> tuple[int, ...]:
    """Count the parameters of each sublayer with its part of the residual, then of norm, head and final read.

    A parameter that belongs to no read, such as one that widens the embedding, is needed first.
    """
    sizes = [sum(p.numel() for p in sublayer.parameters()) for sublayer in model.sublayers]
    sizes.append(model.norm.weight.numel() + model.head.weight.numel())
    # A residual's parameters are named after the sublayer that reads with them.
    for name, parameter in model.residual.named_parameters():
        sizes[sublayer_of(name) or 0] += parameter.numel()
    return tuple(sizes)


@dataclass(frozen=True)
class RankPlan:
    rank: int
    parameters: int
    static: int
    """Bytes of weights, gradients and optimizer."""
    late: int
    """Bytes of gradients that do not exist yet when the first backward begins; part of static."""
    activations: int
    checkpointed: int
    """Bytes of activations under activation checkpointing: the states between sublayers."""
    sublayer: int
    """Bytes that recomputing the largest sublayer brings back, and the gradient of the state it read."""
    head: int
    """Bytes that the head and the loss take, on the last rank."""
    sends: int
    """Bytes this rank sends forward in a step; gradients take as many back."""
    exchanges: int
    """Bytes of tensor parallelism in its largest sublayer, for one micro-batch; gradients take as many."""

    def peak(self, checkpointing: bool) -> int:
        """At the head, or, where activations are recomputed, in a sublayer's backward if that is more."""
        activations = self.checkpointed if checkpointing else self.activations
        at_head = self.static - self.late + activations + self.head
        in_sublayer = self.static + self.sublayer + self.checkpointed * checkpointing
        return max(at_head, in_sublayer)


@dataclass(frozen=True)
class Plan:
    ranks: tuple[RankPlan, ...]
    bubble: float
    hops: tuple[int, ...]
    """Bytes that each hop carries for one micro-batch."""
    hops_without_cache: tuple[int, ...]


def make_plan(config: Config, model: ModelConfig, world: int, *, half: bool, fused: bool) -> Plan:
    """The ranks of one pipeline row: the others do the same."""
    settings, micros = config.parallel, config.train.accumulate
    pipeline, tensor = settings.pipeline, settings.tensor
    # As a run without a row has it
    chunks, cuts = (settings.chunks, settings.cuts) if pipeline > 1 else (1, ())
    # What the run itself would refuse is refused here.
    data = data_ranks(settings, world)
    windows = windows_per_micro(config, data)
    shards = shards_of(settings, data)
    if tensor > 1:
        refuse_undivided(model, tensor, shards)
    trace = partial(footprint, batch=windows, half=half, fused=fused, tensor=tensor)
    whole = trace(model)
    # Between stages travel sources alone, also where a stage reads in two phases.
    crossing = whole.states if pipeline == 1 or fused else trace(one_pass(model)).states
    with torch.device("meta"):
        residual = build(model.residual, model.dim, model.sublayers, model.kinds)
    bounds = cut(residual, pipeline * chunks, cuts)
    plan = hops(crossing, bounds, pipeline, cache=settings.block_cache)
    ranks = []
    for rank in range(pipeline):
        stages = range(rank, pipeline * chunks, pipeline)
        places: list[int] = []
        for s in stages:
            places += range(bounds[s], bounds[s + 1])
        ends = (rank == 0, rank == pipeline - 1)
        # A rank sends from each of its stages to the next.
        sends = micros * sum(plan[s + 1].bytes for s in stages if s + 1 < len(plan))
        # A rank keeps activations of every pass that waits for its backward.
        flight = in_flight(settings.pipeline_schedule, pipeline, chunks, micros, rank) / chunks
        repeated = micros > 1 or chunks > 1  # a backward finds the gradients of another one
        ranks.append(
            _rank_plan(whole, model, rank, places, ends, (shards, tensor), flight, sends, repeated)
        )
    # The part of the time in which a rank waits for others.
    bubble = 0.0 if pipeline == 1 else (pipeline - 1) / (micros * chunks + pipeline - 1)
    naive = hops(crossing, bounds, pipeline, cache=False)
    return Plan(
        ranks=tuple(ranks),
        bubble=bubble,
        hops=tuple(hop.bytes for hop in plan[1:]),
        hops_without_cache=tuple(hop.bytes for hop in naive[1:]),
    )


def in_flight(schedule: str, pipeline: int, chunks: int, micros: int, rank: int) -> int:
    """Passes of a chunk that wait for their backward at the worst moment; alone, micro-batches follow one another."""
    if pipeline == 1:
        return 1
    if schedule == "gpipe":
        return micros * chunks
    if chunks == 1:
        return min(micros, pipeline - rank)
    return min(micros * chunks, 2 * (pipeline - rank - 1) + (chunks - 1) * pipeline + 1)


def _rank_plan(
    trace: Footprint, model: ModelConfig, rank: int, places: list[int], ends: tuple[bool, bool],
    divided: tuple[int, int], flight: float, sends: int, repeated: bool,
) -> RankPlan:  # fmt: skip
    (first, last), (shards, tensor) = ends, divided

    # Parameters; a tied embedding stands on the first and on the last rank.
    parameters = sum(trace.parameters[i] for i in places)
    if first:
        parameters += trace.embedding
    if last:
        parameters += trace.parameters[-1]
    if first and last and model.tie_embeddings:
        parameters -= trace.embedding

    # Activations. A storage that several sublayers keep counts once.
    state: Kept = {}
    storages_kept: Kept = {}
    for i in places:
        state |= trace.held[i]
        storages_kept |= trace.kept[i]
    head = sum(trace.kept[-1].values()) if last else 0
    logits = 4 * trace.tokens * model.vocab_size
    # What is kept of the state is there already; its gradient, which is not, takes as much.
    largest = max(sum((trace.kept[i] | trace.held[i]).values()) for i in places)

    # Embedding, norms, residual and head are divided over all ranks with other tokens.
    inside = sum(trace.bodies[i] for i in places)
    outside = parameters - inside
    share_of_rank = inside / shards + outside / (shards * tensor)
    # While a pass runs, what is sharded becomes whole: at most a layer at a time, and the outside, with gradients.
    layers = Counter[int]()
    for i in places:
        layers[model.layer_of[i]] += trace.bodies[i]
    whole = 4 * max(layers.values()) * (shards > 1) + 8 * outside * (shards * tensor > 1)
    return RankPlan(
        rank=rank,
        parameters=parameters,
        static=int(share_of_rank * BYTES_PER_PARAMETER) + whole,
        late=0 if repeated else int(share_of_rank * 4),
        activations=int(flight * sum(storages_kept.values())),
        checkpointed=int(flight * sum(state.values())),
        sublayer=largest,
        head=head + (2 * logits if last else 0),
        sends=sends,
        exchanges=max(trace.exchanged[i] for i in places),
    )


def describe(plan: Plan, memory: float, checkpointing: bool) -> str:
    """A table of the ranks, the hops, and a warning for each rank that will not fit into `memory` GiB."""
    gib = 2**30
    lines = [
        "rank   parameters   weights+optimizer   activations   with checkpointing   peak      sends a step"
    ]
    for r in plan.ranks:
        sizes = (r.static, r.activations, r.checkpointed, r.peak(checkpointing), r.sends)
        static, activations, checkpointed, peak, sends = (size / gib for size in sizes)
        lines.append(
            f"{r.rank:>4}   {r.parameters / 1e6:>8.1f} M   {static:>13.2f} GiB   {activations:>7.2f} GiB   "
            f"{checkpointed:>14.2f} GiB   {peak:>6.2f} GiB   {sends:>8.3f} GiB"
        )
    if plan.hops:
        mib = 2**20
        saved = sum(plan.hops_without_cache) / sum(plan.hops)
        lines.append(
            f"a hop carries {min(plan.hops) / mib:.1f} to {max(plan.hops) / mib:.1f} MiB a micro-batch "
            f"(at most {max(plan.hops_without_cache) / mib:.1f} MiB without the cache, {saved:.2f}x in all); "
            f"bubble {plan.bubble:.1%}"
        )
    if exchanges := max(r.exchanges for r in plan.ranks):
        lines.append(
            f"tensor parallelism: a rank sends up to {exchanges / 2**20:.1f} MiB a sublayer and micro-batch forward, "
            "and as much backward"
        )
    full = [r.rank for r in plan.ranks if r.peak(checkpointing) > memory * gib]
    if full:
        other = "" if checkpointing else f" Try {spell('train.checkpoint_activations')},"
        lines.append(
            f"WARNING: ranks {', '.join(map(str, full))} need more than {memory:g} GiB.{other} more ranks, a larger "
            f"{spell('train.accumulate')} or a smaller {spell('train.batch_size')}"
        )
    else:
        lines.append(f"every rank fits into {memory:g} GiB")
    return "\n".join(lines)
