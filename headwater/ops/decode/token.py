# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Tokens to rows of the embedding, and logits to tokens, in one launch each: `operators.take`, `operators.likeliest`.

A program has one row. PyTorch's own take 13 us for 16 rows of an embedding, and 11 for 32,000 logits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import launch, launches
from headwater.ops.triton.tiles import power_of_2

LOGITS = 8192  # of a row at once


@triton.jit
def _take(weight, chosen, y, D, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    b_y = tl.load(weight + tl.load(chosen + row) * D + o_d, mask=o_d < D)
    tl.store(y + row * D + o_d, b_y, mask=o_d < D)


@triton.jit
def _likeliest(logits, chosen, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32) + V - 1
    for start in tl.static_range(0, V, BLOCK):
        z = tl.load(logits + row * V + start + o_v, mask=start + o_v < V, other=float("-inf")).to(tl.float32)
        at = tl.where(z > top, start + o_v, at)
        top = tl.maximum(top, z)
    first = tl.min(tl.where(top == tl.max(top, 0), at, V - 1), 0)  # the first of equals
    tl.store(chosen + row, first.to(tl.int64))


def take(weight: Tensor, tokens: Tensor, y: Tensor) -> None:
    launches["take"] += 1
    wide = power_of_2(weight.shape[1])
    warps = max(1, min(16, wide // 256))
    launch(_take, (len(tokens),), (weight, tokens, y), (weight.shape[1],), {"BD": wide}, num_warps=warps)


def likeliest(logits: Tensor, tokens: Tensor) -> None:
    launches["likeliest"] += 1
    block = min(LOGITS, power_of_2(logits.shape[1]))
    constants = {"V": logits.shape[1], "BLOCK": block}
    launch(_likeliest, (len(logits),), (logits, tokens), (), constants, num_warps=max(1, min(16, block // 256)))
