"""Cuts of a decoder into stages: where they may lie, what the states hold there, and what a stage keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from headwater._torch import without_data
from headwater.errors import UserError, spell
from headwater.models import Decoder, ModelConfig
from headwater.residuals import Residual, with_options
from headwater.runs.settings import Config
from headwater.stages import States, name_states
from headwater.train.losses import half_precision


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


def one_pass(config: ModelConfig) -> ModelConfig:
    """Between stages travel the sources alone, which is what a state holds where reads are made one by one."""
    return replace(config, residual=with_options(config.residual, schedule="one-pass"))


def windows_per_micro(config: Config, data: int) -> int:
    """Windows of a micro-batch on each of the `data` ranks that share the batch.

    Raises: `UserError` if they do not divide, or if the schedule does not take as many micro-batches.
    """
    size, micros, settings = config.train.batch_size, config.train.accumulate, config.parallel
    row = settings.pipeline
    # 1F1B wants as many micro-batches as ranks, interleaved in equal rounds.
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
    """Bounds of the stages, 0 and `sublayers` included.

    They are `cuts` where there are any, else slices as equal as the residual's own limits allow: they differ by one
    sublayer at most where it has none.
    """
    # Some residuals share parameters between neighbouring sublayers.
    sublayers = residual.sublayers
    allowed = [i for i in range(1, sublayers) if residual.may_cut(i)]
    if cuts:
        bounds = (0, *cuts, sublayers)
        rising = all(a < b for a, b in pairwise(bounds))
        if len(cuts) != stages - 1 or not rising or not set(cuts) <= set(allowed):
            raise UserError(
                f"parallel.cuts must name {stages - 1} sublayers, rising, where model.residual {residual.spec!r} may "
                f"be cut: {', '.join(map(str, allowed)) or 'nowhere'}; got {list(cuts)}"
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


def prune(model: Decoder, start: int, stop: int) -> Decoder:
    """Leave sublayers [start, stop) and their residual parameters; the ends keep embedding and head. Names stay."""
    # Modules are emptied in place, so that names stay those of the whole.
    last = stop == len(model.sublayers)
    for i in set(range(len(model.sublayers))) - set(range(start, stop)):
        model.sublayers[i] = nn.Module()
    model.residual.keep_only(start, stop)
    if not last:
        model.head, model.norm = nn.Identity(), nn.Identity()  # type: ignore[assignment]
    if start and not (last and model.config.tie_embeddings):
        model.embedding = nn.Identity()  # type: ignore[assignment]
    return model
