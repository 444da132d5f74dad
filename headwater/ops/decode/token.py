# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Three launches around a decoding step: `operators.take`, `likeliest` and `exponentials`.

    y_b = weight[token_b];   token_b = argmax_v logits_bv;   e_bv = -log(1 - u(seed_b, step, v))

A program has one row, or a part of one. PyTorch's own operators take 13 us for 16 rows of an
embedding, and 11 us for 32,000 logits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import launch, launches
from headwater.ops.triton.tiles import ceil_div, power_of_2

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
    bad = tl.zeros([BLOCK], tl.int32)
    for start in tl.static_range(0, V, BLOCK):
        z = tl.load(logits + row * V + start + o_v, mask=start + o_v < V, other=float("-inf")).to(
            tl.float32
        )
        bad |= (z != z).to(tl.int32)
        at = tl.where(z > top, start + o_v, at)
        top = tl.where(z > top, z, top)
    first = tl.min(tl.where(top == tl.max(top, 0), at, V - 1), 0)  # the first of equals
    tl.store(chosen + row, tl.where(tl.max(bad, 0) > 0, -1, first).to(tl.int64))


@triton.jit
def _exponentials(seeds, step, noise, V, quarter, BLOCK: tl.constexpr):
    row, o_q = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    now = tl.zeros([BLOCK], tl.int32) + tl.load(step).to(tl.int32)
    none = tl.zeros([BLOCK], tl.int32)
    a, b, c, d = tl.philox(tl.load(seeds + row), o_q, now, none, none)
    p = noise + row * V + o_q
    m = o_q < quarter
    tl.store(p, _exponential(a), mask=m & (o_q < V))
    tl.store(p + quarter, _exponential(b), mask=m & (quarter + o_q < V))
    tl.store(p + 2 * quarter, _exponential(c), mask=m & (2 * quarter + o_q < V))
    tl.store(p + 3 * quarter, _exponential(d), mask=m & (3 * quarter + o_q < V))


@triton.jit
def _exponential(bits):
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.where(u < 1e-3, u * (1 + u * (0.5 + u * 0.3333333333333333)), -tl.log(1 - u))


def take(weight: Tensor, tokens: Tensor, y: Tensor) -> None:
    launches["take"] += 1
    wide = power_of_2(weight.shape[1])
    warps = max(1, min(16, wide // 256))
    launch(
        _take,
        (len(tokens),),
        (weight, tokens, y),
        (weight.shape[1],),
        {"BD": wide},
        num_warps=warps,
    )


def likeliest(logits: Tensor, tokens: Tensor) -> None:
    launches["likeliest"] += 1
    block = min(LOGITS, power_of_2(logits.shape[1]))
    constants = {"V": logits.shape[1], "BLOCK": block}
    launch(
        _likeliest,
        (len(logits),),
        (logits, tokens),
        (),
        constants,
        num_warps=max(1, min(16, block // 256)),
    )


def exponentials(seeds: Tensor, step: Tensor, noise: Tensor) -> None:
    launches["exponentials"] += 1
    rows, count = noise.shape
    quarter = ceil_div(count, 4)  # a counter gives four numbers, one for each quarter of a row
    grid = (rows, ceil_div(quarter, 512))
    launch(_exponentials, grid, (seeds, step, noise), (count, quarter), {"BLOCK": 512}, num_warps=4)
