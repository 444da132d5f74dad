"""One token of every row in fused launches: five a layer for one row, seven for more.

What lies between two products is folded into them: the residual's read and the norm into the
projections that follow, its write into the projections before, the rotation and the cache into
attention (`headwater.ops.decode`). The residual says how it reads and writes one token
(`one_token`), each part of a sublayer how it runs one (`step`). The results are those of
`Decoder.hidden` but for the order of some sums, and with it the last bits.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from headwater._torch import hooked
from headwater.models.cache import Cache
from headwater.models.decoder import Decoder
from headwater.models.norm import RMSNorm
from headwater.models.projection import are_plain
from headwater.models.sublayer import Sublayer
from headwater.ops.decode import take
from headwater.ops.routing import Backend, obstacle
from headwater.residuals.one_token import OneToken


class FusedStep:
    """One token of every row through a decoder whose parts can all step."""

    def __init__(
        self, model: Decoder, cache: Cache, depth: OneToken, backend: Backend = "auto"
    ) -> None:
        self.model = model
        self.cache = cache
        self.depth = depth
        self.backend = backend
        self.rotary = model.rotary.cos, model.rotary.sin

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return logits (B, vocab) after tokens (B,), which the cache then has."""
        model, depth, backend = self.model, self.depth, self.backend
        take(model.embedding.weight, tokens, depth.begin(), backend=backend)
        for i, sublayer in enumerate(cast(list[Sublayer], model.sublayers)):
            # The sublayer's projections compute the read, its output projection the write.
            reading = depth.read(i, sublayer.norm.for_kernels())
            y = sublayer.body.step(reading, self.rotary, self.cache[i], backend)
            depth.write(i, y, cast(nn.Linear, sublayer.body.output).weight)
        self.cache.lengths.advance(1)
        reading = depth.end(model.norm.for_kernels())
        return reading.project(model.head.weight, backend=backend)


def fused_step(model: Decoder, cache: Cache, backend: Backend = "auto") -> FusedStep | None:
    """Make a fused step of a decoder, if its residual and all its parts have one."""
    weight = model.embedding.weight.detach()
    # By name the kernels (or their references) run, or say why not.
    if backend == "auto" and obstacle(weight) is not None:
        return None
    if not can_step(model):
        return None
    stream = weight.new_empty(len(cache.lengths.tokens), weight.shape[1])
    depth = model.residual.one_token(stream, backend)
    return None if depth is None else FusedStep(model, cache, depth, backend)


def can_step(model: Decoder) -> bool:
    """Tell whether all parts of a decoder can be read by kernels instead of being called."""
    if torch.is_autocast_enabled(model.embedding.weight.device.type):
        return False
    # Kernels call no hooks, and read one dtype.
    if any(map(hooked, model.modules())):
        return False
    if len({parameter.dtype for parameter in model.parameters()}) > 1:
        return False
    ends = type(model.embedding) is nn.Embedding and type(model.norm) is RMSNorm
    sublayers = cast(list[Sublayer], model.sublayers)
    return ends and are_plain(model.head) and all(sublayer.can_step() for sublayer in sublayers)
