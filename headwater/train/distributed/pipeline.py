"""Pipeline parallelism over torch.distributed.pipelining, with a cache so that a rank is sent each block once.

A rank holds one stage, or several under an interleaved schedule. What a stage receives or produces stays on its rank,
by micro-batch, for the rank's later stages; a hop carries only what the receiver lacks. The gradient of a borrowed
tensor is deposited on the rank, and the stage that had the tensor first adds the deposit before the gradient goes
upstream. docs/explanation/pipeline-cache.md derives the bytes.
"""

from __future__ import annotations

import copy
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
from headwater.stages import BlockCache, Hop, StagePort, hops
from headwater.train.distributed.fsdp import shard
from headwater.train.distributed.parts import Parts, local
from headwater.train.distributed.ranks import Ranks
from headwater.train.distributed.stages import cut, prune, trace_states
from headwater.train.distributed.tensor_parallel import parallelize
from headwater.train.losses import half_precision, nats_per_token

SCHEDULES: dict[tuple[str, bool], Callable[..., Any]] = {
    ("1f1b", False): Schedule1F1B,
    ("gpipe", False): ScheduleGPipe,
    ("1f1b", True): ScheduleInterleaved1F1B,
    ("gpipe", True): ScheduleLoopedBFS,
}


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
        self.context = context
        self.port = StagePort(hop, following, cache)

    def forward(self, *arrived: Tensor, micro: Tensor) -> Tensor | tuple[Tensor, ...]:
        model, number = self.model, int(micro)
        with half_precision(arrived[0].device):
            # The first stage embeds tokens, the others take up a state.
            if self.start:
                state = model.adopt(self.port.receive(arrived, number), self.start)
            else:
                state = model.begin(arrived[0])
            state = model.run(state, self.start, self.stop, model.rotary(0, self.context))
            if self.port.following is None:
                return model.finish(state)
            # The next stage expects sources alone.
            state = model.settle(state, self.stop)
        return self.port.send(state, number)


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
        several = len(stages) > 1
        kind = SCHEDULES[schedule, several]
        self.schedule = kind(
            stages if several else stages[0], n_microbatches=micros, loss_fn=mean_loss
        )
        # Split like a batch, it tells each stage which micro-batch it sees
        self.numbers = torch.arange(micros)

    def accumulate(self, windows: Tensor) -> float:
        """Gradients of the mean loss over the windows (B, T + 1); the loss on the last rank, 0 on the others."""
        # The first stage has the tokens, the last one their targets.
        inputs = (windows[:, :-1],) if self.first else ()
        losses: list[Tensor] = []
        options = {"target": windows[:, 1:], "losses": losses} if self.last else {}
        self.schedule.step(*inputs, micro=self.numbers, return_outputs=False, **options)
        # A tied embedding has gradients on two ranks.
        if self.tied is not None:
            self._sum_tied(local(cast(Tensor, self.tied.grad)))
        return torch.stack(losses).mean().item() if self.last else 0.0

    def _sum_tied(self, gradient: Tensor) -> None:
        """First and last rank each hold the tied embedding and step it alike, with the sum of both gradients."""
        group = cast(dist.ProcessGroup, self.stages[0].group)
        members = dist.get_process_group_ranks(group)
        other = members[-1] if self.first else members[0]
        received = torch.empty_like(gradient)
        send = dist.P2POp(dist.isend, gradient, other, group)
        receive = dist.P2POp(dist.irecv, received, other, group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        # Both ranks add in the same order, so that they get the same bits.
        gradient.copy_(gradient + received if self.first else received + gradient)

    def logits(self, windows: Tensor) -> Tensor | None:
        """(B, T, vocab) on the last rank. The schedule computes a loss there even if nobody asks for it."""
        inputs = (windows[:, :-1],) if self.first else ()
        out = self.schedule.eval(
            *inputs, micro=self.numbers, target=windows[:, 1:] if self.last else None
        )
        return out if self.last else None


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nats_per_token(logits, targets).mean()


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
    """This rank's stages, still without weights.

    A micro-batch has `windows` windows. `prepare` wraps a decoder, and lets the backward repeat forwards if
    `recompute`.
    """
    assert ranks.mesh is not None
    count, tied = settings.pipeline * settings.chunks, config.tie_embeddings
    first, last = ranks.pipeline_rank == 0, ranks.pipeline_rank == settings.pipeline - 1
    # Tokens of a window that one rank has between sublayers
    context = config.context // ranks.tensor

    # What crosses each cut, and where the first and the last stage begin and end.
    with torch.device("meta"):
        blank = Decoder(config)
    bounds = cut(blank.residual, count, settings.cuts)
    states = trace_states(config, windows, context, device)
    plan = (*hops(states, bounds, settings.pipeline, cache=settings.block_cache), None)
    tokens = torch.empty(windows, context, dtype=torch.long, device="meta")
    logits_type = torch.bfloat16 if device.type == "cuda" else torch.float32
    logits = torch.empty(windows, context, config.vocab_size, dtype=logits_type, device="meta")

    # Each stage is pruned, divided, wrapped and sharded by itself.
    cache, stages, counted = BlockCache(), [], []
    for s in range(ranks.pipeline_rank, count, settings.pipeline):
        span = start, stop = bounds[s], bounds[s + 1]
        # What arrives here, and what leaves for the next stage.
        hop, following = cast(Hop, plan[s]), plan[s + 1]
        model = prune(copy.deepcopy(blank), start, stop)
        if ranks.tensor > 1:
            parallelize(model, ranks.mesh["tensor"])
        prepare(model)
        stage = Stage(model, span, context, hop, following, cache)
        if ranks.token_world > 1:
            sublayers = [cast(Sublayer, model.sublayers[i]) for i in range(start, stop)]
            shard(stage, sublayers, ranks, recompute=recompute)
        stage.to_empty(device=device)
        # FSDP2 keeps the tie, to_empty alone does not
        if tied and following is None and ranks.token_world == 1:
            model.head.weight = model.embedding.weight
        inputs = travellers(hop) if s else (tokens,)
        outputs = travellers(following) if following else (logits.requires_grad_(),)
        group = ranks.mesh["pipeline"].get_group()
        counted.append(CountedStage(stage, s, count, device, inputs, outputs, group=group))
        stages.append(stage)

    # The first and the last rank both hold a tied embedding; the first accounts for it.
    shared = frozenset({"embedding.weight"} if tied and last else ())
    parts = Parts(stages, [stage.model for stage in stages], shared)
    embedding = None
    if tied and (first or last):
        embedding = dict(parts.named_parameters())["embedding.weight"]
    return parts, Pipeline(counted, settings.pipeline_schedule, micros, embedding)


def travellers(hop: Hop) -> tuple[Tensor, ...]:
    """The tensors that a hop carries, without data."""
    tensors = []
    for j in hop.arrives:
        slot = hop.state[j]
        tensors.append(torch.empty(slot.shape, dtype=slot.dtype, device="meta", requires_grad=True))
    return tuple(tensors)
