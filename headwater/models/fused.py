"""One token of every row through a decoder of grouped-query attention and SwiGLU, five launches a layer for one row,
seven for more.

What lies between two products is folded into them: the residual's read and the norm into the projections that follow,
its write into the ones before, the rotation and the cache into attention (`headwater.ops.decode`). It computes what
`Decoder.hidden` computes for the residuals below; the order of some sums, and with it the last bits, differ.
"""

from __future__ import annotations

import functools
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from headwater._torch import hooked
from headwater.ops.decode import Merge, Norm, attend, open_span, project, take
from headwater.ops.numerics import accumulation_dtype
from headwater.ops.routing import Backend, obstacle
from headwater.residuals import AttentionResidual, Residual
from headwater.residuals.standard import StandardResidual

from .attention import Attention
from .decoder import Cache, Decoder
from .mlp import SwiGLU
from .norm import RMSNorm
from .rows import FixedKV
from .sublayer import Sublayer

ASIDE = True  # what later reads need is computed beside the sublayer that does not, on a GPU
PLAIN = (
    nn.Embedding,
    nn.Linear,
    nn.Identity,
    nn.ModuleList,
    RMSNorm,
    Attention,
    SwiGLU,
    Sublayer,
)  # read, not called


class Depth(Protocol):
    """A residual for one token of every row, over tensors that stay where they are.

    `begin()`: where the embedding goes, (B, D). `read(i)`: what to project, and what to merge it with. `write(i)`: what
    sublayer i's output is added to, if anything, and where the sum goes. `end()`: as `read`, for the final norm.
    """

    def begin(self) -> Tensor: ...

    def read(self, i: int) -> tuple[Tensor, Merge | None]: ...

    def write(self, i: int) -> tuple[Tensor | None, Tensor]: ...

    def end(self) -> tuple[Tensor, Merge | None]: ...


class Stream:
    """The plain residual."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def begin(self) -> Tensor:
        return self.x

    def read(self, i: int) -> tuple[Tensor, Merge | None]:
        return self.x, None

    def write(self, i: int) -> tuple[Tensor | None, Tensor]:
        return self.x, self.x

    def end(self) -> tuple[Tensor, Merge | None]:
        return self.x, None


class Blocks:
    """Attention Residuals in two phases: the bank of sources, of which the newest is the running sum of its block.

    Every read merges the newest source with what its query found in those before. At the start of a block these are
    the same for the queries of its other sublayers and for the first one of the next block: one launch opens them all,
    beside the block's first sublayer, which needs none of it. So no sublayer waits for it, on a GPU.
    """

    def __init__(self, residual: AttentionResidual, like: Tensor, backend: Backend) -> None:
        self.block, self.sublayers, self.eps, self.backend = (
            residual.block,
            residual.sublayers,
            residual.eps,
            backend,
        )
        self.folded = residual.folded_queries(device=like.device)
        self.bank = like.new_empty(residual.num_sources(residual.sublayers), *like.shape)
        count, rows, wide = (
            min(self.block, self.sublayers),
            len(like),
            accumulation_dtype(like.dtype),
        )
        # Two of each: one is written while the next read is still of the other. Rows at multiples of 16 bytes: kernels
        # are compiled once for such addresses, and once more for others.
        self.outs = like.new_empty(2, count, *like.shape)
        self.lses = torch.empty(2, count, rows + -rows % 4, dtype=wide, device=like.device)[
            ..., :rows
        ]
        self.aside = _stream_aside(like.device) if ASIDE and like.is_cuda else None

    def begin(self) -> Tensor:
        return self.bank[0]

    def _open(self, i: int) -> None:
        """Queries i + 1 to the next block's first, over the sources that are there before sublayer i."""
        which, queries = i // self.block % 2, self.folded[i + 1 : i + 1 + self.block]
        outs, lses = self.outs[which, : len(queries)], self.lses[which, : len(queries)]
        open_span(
            self.bank[: 1 + i // self.block], queries, self.eps, outs, lses, backend=self.backend
        )

    def read(self, i: int) -> tuple[Tensor, Merge | None]:
        newest, merge = self._newest(i)
        if i % self.block == 0 and i < self.sublayers:
            if self.aside is None:
                self._open(i)
            else:
                self.aside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.aside):
                    self._open(i)
        return newest, merge

    def _newest(self, i: int) -> tuple[Tensor, Merge | None]:
        """The newest source before sublayer i, and what its query found in the others."""
        if i == 0:
            return self.bank[0], None
        span, at = divmod(i - 1, self.block)
        if self.aside is not None and at == 0:
            torch.cuda.current_stream().wait_stream(self.aside)
        return self.bank[1 + span], Merge(
            self.outs[span % 2, at], self.lses[span % 2, at], self.folded[i], self.eps
        )

    def write(self, i: int) -> tuple[Tensor | None, Tensor]:
        own = self.bank[1 + i // self.block]
        return None if i % self.block == 0 else own, own

    def end(self) -> tuple[Tensor, Merge | None]:
        return self._newest(self.sublayers)


@functools.cache  # one a GPU: what runs there waits for all before it and is waited for, whoever decodes
def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def reason_against(model: Decoder) -> str | None:
    """Why a model cannot be decoded in fused parts, or None."""
    residual, config = model.residual, model.config
    if type(residual) is not StandardResidual and not (
        type(residual) is AttentionResidual and residual.phased
    ):
        return f"its residual is {residual.spec}"
    if isinstance(residual, AttentionResidual) and residual.backend == "reference":
        return "its residual asks for the reference"
    if torch.is_autocast_enabled(model.embedding.weight.device.type):
        return "autocast is on"
    if kinds := set(config.kinds) - {"attention", "mlp"}:
        return f"it has sublayers of {', '.join(sorted(kinds))}"
    if config.value_residual:
        return "it mixes in the first attention's values"
    parts = (model.embedding, model.norm, model.head, *model.sublayers.modules())
    if not all(type(part) in PLAIN and getattr(part, "bias", None) is None for part in parts):
        return "its projections are wrapped or divided, or have a bias"
    if any(map(hooked, model.modules())):
        return "its modules have hooks"
    if config.head_dim % 2 or len({parameter.dtype for parameter in model.parameters()}) > 1:
        return "its parameters are of several dtypes, or a head has an odd width"
    return obstacle(model.embedding.weight)


class FusedStep:
    """Logits (B, vocab) of one token of every row, tokens (B,), which the cache then has."""

    def __init__(self, model: Decoder, cache: Cache, backend: Backend = "auto") -> None:
        assert cache.rows is not None
        self.model, self.cache, self.lengths, self.backend = (
            model,
            cache,
            cache.rows.lengths,
            backend,
        )
        weight = model.embedding.weight.detach()
        stream = weight.new_empty(cache.batch, weight.shape[1])
        self.depth = depth_of(model.residual, stream, backend)
        self.rotary = model.rotary.cos, model.rotary.sin

    def __call__(self, tokens: Tensor) -> Tensor:
        model = self.model
        take(model.embedding.weight, tokens, self.depth.begin(), backend=self.backend)
        for i, sublayer in enumerate(cast(list[Sublayer], model.sublayers)):
            x, merge = self.depth.read(i)
            norm = folded(sublayer.norm)
            if isinstance(sublayer.body, Attention):
                y = self._attend(sublayer.body, x, norm, merge, cast(FixedKV, self.cache[i]))
            else:
                body = cast(SwiGLU, sublayer.body)
                both = (body.gate.weight, body.up.weight)
                y = project(x, both, norm=norm, merge=merge, gated=True, backend=self.backend)
            add, out = self.depth.write(i)
            leave = cast(nn.Linear, sublayer.body.output)
            project(y, (leave.weight,), add=add, out=out, backend=self.backend)
        self.lengths += 1
        x, merge = self.depth.end()
        return project(
            x, (model.head.weight,), norm=folded(model.norm), merge=merge, backend=self.backend
        )

    def _attend(
        self, body: Attention, x: Tensor, norm: Norm, merge: Merge | None, cache: FixedKV
    ) -> Tensor:
        weights = (body.query.weight, body.key.weight, body.value.weight)
        qkv = project(x, weights, norm=norm, merge=merge, backend=self.backend)
        heads = body.heads, body.kv_heads, body.kv_heads
        q, k, v = (
            part.unflatten(1, (count, body.head_dim))
            for part, count in zip(qkv.split([count * body.head_dim for count in heads], 1), heads)
        )
        assert cache.keys is not None
        assert cache.values is not None
        norms = None
        if isinstance(body.query_norm, RMSNorm) and isinstance(body.key_norm, RMSNorm):
            norms = folded(body.query_norm), folded(body.key_norm)
        return attend(
            q,
            k,
            v,
            cache.keys,
            cache.values,
            self.lengths,
            rotary=self.rotary,
            norms=norms,
            backend=self.backend,
        )


def depth_of(residual: Residual, stream: Tensor, backend: Backend) -> Depth:
    """For a stream (B, D)."""
    return (
        Blocks(residual, stream, backend)
        if isinstance(residual, AttentionResidual)
        else Stream(stream)
    )


def folded(norm: RMSNorm) -> Norm:
    return Norm(norm.weight, cast(float, norm.eps))
