"""Pipeline parallelism over torch.distributed.pipelining, with a cache so that a rank is sent each block once.

A rank holds one stage, or several under an interleaved schedule. What a stage receives or produces stays on its rank,
by micro-batch, for the rank's later stages; a hop carries only what the receiver lacks. The gradient of a borrowed
tensor is deposited on the rank, and the stage that had the tensor first adds the deposit before the gradient goes
upstream. docs/explanation/pipeline-cache.md derives the bytes.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from headwater.models import Decoder, ModelConfig
from headwater.models.sublayer import Sublayer
from headwater.runs.settings import ParallelSettings
from headwater.train.distributed.fsdp import shard
from headwater.train.distributed.parts import Parts, local
from headwater.train.distributed.ranks import Ranks
from headwater.train.distributed.stages import Hop, cut, hops, prune, trace_states
from headwater.train.distributed.tensor_parallel import parallelize
from headwater.train.losses import half_precision, nats_per_token

SCHEDULES: dict[tuple[str, bool], Callable[..., Any]] = {
    ("1f1b", False): Schedule1F1B,
    ("gpipe", False): ScheduleGPipe,
    ("1f1b", True): ScheduleInterleaved1F1B,
    ("gpipe", True): ScheduleLoopedBFS,
}


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


class Stage(nn.Module):
    """Sublayers [start, stop) of a pruned decoder: tensors in, tensors out, the cache beside them."""

    def __init__(
        self,
        model: Decoder,
        span: tuple[int, int],
        context: int,
        hop: Hop,
        following: Hop | None,
        cache: BlockCache,
    ) -> None:
        super().__init__()
        self.model = model
        self.start, self.stop = span
        self.context, self.hop, self.following, self.cache = context, hop, following, cache

    def forward(self, *arrived: Tensor, micro: Tensor) -> Tensor | tuple[Tensor, ...]:
        model, number = self.model, int(micro)
        with half_precision(arrived[0].device):
            if self.start:
                state = model.adopt(self._assemble(arrived, number), self.start)
            else:
                state = model.begin(arrived[0])
            state = model.run(state, self.start, self.stop, model.rotary(0, self.context))
            if self.following is None:
                return model.finish(state)
            state = model.settle(state, self.stop)
        return self._send(state, number)

    def _assemble(self, arrived: tuple[Tensor, ...], micro: int) -> tuple[Tensor, ...]:
        """The whole state, from what arrived and what the rank has seen."""
        slots, hop = self.hop.state, self.hop
        keys = tuple(slots[j].key for j in hop.arrives)
        tensors = dict(zip(hop.arrives, self._share(keys, arrived, micro)))
        tensors |= {j: self.cache.borrow(micro, slots[j].key) for j in hop.borrows}
        if hop.ends:
            self.cache.forget(micro)
        return tuple(tensors[j] for j in range(len(slots)))

    def _send(self, state: tuple[Tensor, ...], micro: int) -> tuple[Tensor, ...]:
        assert self.following is not None
        slots = self.following.state
        keys = tuple(slots[j].key for j in self.following.arrives)
        tensors = tuple(state[j].contiguous() for j in self.following.arrives)
        return self._share(keys, tensors, micro)

    def _share(
        self, keys: tuple[int, ...], tensors: tuple[Tensor, ...], micro: int
    ) -> tuple[Tensor, ...]:
        """Leave in the cache what this stage has first and a later one needs."""
        for key, tensor in zip(keys, tensors):
            if key in self.hop.keeps:
                self.cache.keep(micro, key, tensor)
        return (
            Settle.apply(self.cache, micro, keys, *tensors) if torch.is_grad_enabled() else tensors
        )


class CountedStage(PipelineStage):
    """Counts the bytes it hands to the network, forward and backward."""

    forward_bytes = 0
    backward_bytes = 0

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self.forward_bytes += sum(op.tensor.nbytes for op in ops)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        self.backward_bytes += sum(op.tensor.nbytes for op in ops)
        return ops


class Pipeline:
    """A rank's stages under a schedule: one call does the micro-batches of a step."""

    def __init__(
        self, stages: list[CountedStage], schedule: str, micros: int, tied: nn.Parameter | None
    ) -> None:
        self.stages, self.micros, self.tied = stages, micros, tied
        self.first, self.last = stages[0].is_first, stages[-1].is_last
        kind = SCHEDULES[schedule, len(stages) > 1]
        one_or_all = stages if len(stages) > 1 else stages[0]
        self.schedule = kind(
            one_or_all, n_microbatches=micros, loss_fn=lambda x, y: nats_per_token(x, y).mean()
        )
        self.numbers = torch.arange(
            micros
        )  # split like a batch, it tells each stage which micro-batch it sees

    def accumulate(self, windows: Tensor) -> float:
        """Gradients of the mean loss over the windows (B, T + 1); the loss on the last rank, 0 on the others."""
        inputs = (windows[:, :-1],) if self.first else ()
        losses: list[Tensor] = []
        options = {"target": windows[:, 1:], "losses": losses} if self.last else {}
        self.schedule.step(*inputs, micro=self.numbers, return_outputs=False, **options)
        if self.tied is not None:
            self._sum_tied(local(cast(Tensor, self.tied.grad)))
        return torch.stack(losses).mean().item() if self.last else 0.0

    def _sum_tied(self, gradient: Tensor) -> None:
        """First and last rank each hold the tied embedding and step it alike, with the sum of both gradients."""
        group = cast(dist.ProcessGroup, self.stages[0].group)
        members = dist.get_process_group_ranks(group)
        other, received = members[-1] if self.first else members[0], torch.empty_like(gradient)
        ops = [
            dist.P2POp(dist.isend, gradient, other, group),
            dist.P2POp(dist.irecv, received, other, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        gradient.copy_(gradient + received if self.first else received + gradient)

    def logits(self, windows: Tensor) -> Tensor | None:
        """(B, T, vocab) on the last rank. The schedule computes a loss there even if nobody asks for it."""
        inputs = (windows[:, :-1],) if self.first else ()
        out = self.schedule.eval(
            *inputs, micro=self.numbers, target=windows[:, 1:] if self.last else None
        )
        return out if self.last else None


def assemble(
    config: ModelConfig,
    settings: ParallelSettings,
    ranks: Ranks,
    device: torch.device,
    *,
    micros: int,
    windows: int,
    recompute: bool,
    prepare: Callable[[Decoder], object],
) -> tuple[Parts, Pipeline]:
    """This rank's stages, still without weights. A micro-batch has `windows` windows; `prepare` wraps a decoder, and
    lets the backward repeat forwards if `recompute`."""
    assert ranks.mesh is not None
    count, tied = settings.pipeline * settings.chunks, config.tie_embeddings
    context = (
        config.context // ranks.tensor
    )  # tokens of a window that one rank has between sublayers
    with torch.device("meta"):
        blank = Decoder(config)
    bounds = cut(blank.residual, count, settings.cuts)
    states = trace_states(config, windows, context, device)
    plan = (*hops(states, bounds, settings.pipeline, cache=settings.block_cache), None)
    tokens = torch.empty(windows, context, dtype=torch.long, device="meta")
    logits_type = torch.bfloat16 if device.type == "cuda" else torch.float32
    logits = torch.empty(windows, context, config.vocab_size, dtype=logits_type, device="meta")
    cache, stages, counted = BlockCache(), [], []
    for s in range(ranks.pipeline_rank, count, settings.pipeline):
        hop, following = cast(Hop, plan[s]), plan[s + 1]
        model = prune(copy.deepcopy(blank), bounds[s], bounds[s + 1])
        if ranks.tensor > 1:
            parallelize(model, ranks.mesh["tensor"])
        prepare(model)
        stage = Stage(model, (bounds[s], bounds[s + 1]), context, hop, following, cache)
        if ranks.token_world > 1:
            sublayers = [
                cast(Sublayer, model.sublayers[i]) for i in range(bounds[s], bounds[s + 1])
            ]
            shard(stage, sublayers, ranks, recompute=recompute)
        stage.to_empty(device=device)
        if (
            tied and following is None and ranks.token_world == 1
        ):  # FSDP2 keeps the tie, to_empty alone does not
            model.head.weight = model.embedding.weight
        inputs = travellers(hop) if s else (tokens,)
        outputs = travellers(following) if following else (logits.requires_grad_(),)
        group = ranks.mesh["pipeline"].get_group()
        counted.append(CountedStage(stage, s, count, device, inputs, outputs, group=group))
        stages.append(stage)
    first, last = ranks.pipeline_rank == 0, ranks.pipeline_rank == settings.pipeline - 1
    shared = frozenset({"embedding.weight"} if tied and last else ())
    parts = Parts(stages, [stage.model for stage in stages], shared)
    ends = dict(parts.named_parameters())["embedding.weight"] if tied and (first or last) else None
    return parts, Pipeline(counted, settings.pipeline_schedule, micros, ends)


def travellers(hop: Hop) -> tuple[Tensor, ...]:
    """The tensors that a hop carries, without data."""
    slots = [hop.state[j] for j in hop.arrives]
    return tuple(
        torch.empty(slot.shape, dtype=slot.dtype, device="meta", requires_grad=True)
        for slot in slots
    )
