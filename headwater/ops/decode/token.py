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
from headwater.ops.triton.tiles import ceil_div, power_of_2, warps_for

LOGITS = 8192  # of a row at once


@triton.jit
def _take(weight, chosen, y, D, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m = o_d < D
    token = tl.load(chosen + row)
    b_y = tl.load(weight + token * D + o_d, mask=m)
    tl.store(y + row * D + o_d, b_y, mask=m)


@triton.jit
def _likeliest(logits, chosen, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BLOCK)
    # For each place of a block: the largest logit so far, where it was, and whether one was NaN.
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32) + V - 1
    bad = tl.zeros([BLOCK], tl.int32)
    for start in tl.static_range(0, V, BLOCK):
        p_z = logits + row * V + start + o_v
        z = tl.load(p_z, mask=start + o_v < V, other=float("-inf")).to(tl.float32)
        bad |= (z != z).to(tl.int32)
        at = tl.where(z > top, start + o_v, at)
        top = tl.where(z > top, z, top)
    # Of equals the first.
    largest = tl.max(top, 0)
    first = tl.min(tl.where(top == largest, at, V - 1), 0)
    place = tl.where(tl.max(bad, 0) > 0, -1, first)
    tl.store(chosen + row, place.to(tl.int64))


@triton.jit
def _exponentials(seeds, step, noise, V, quarter, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_q = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    now = tl.zeros([BLOCK], tl.int32) + tl.load(step).to(tl.int32)
    zero = tl.zeros([BLOCK], tl.int32)
    # A counter gives four numbers, which go to the four quarters of a row.
    a, b, c, d = tl.philox(tl.load(seeds + row), o_q, now, zero, zero)
    p = noise + row * V
    m = o_q < quarter
    _store_quarter(p, o_q, a, m, V)
    _store_quarter(p, o_q + quarter, b, m, V)
    _store_quarter(p, o_q + 2 * quarter, c, m, V)
    _store_quarter(p, o_q + 3 * quarter, d, m, V)


@triton.jit
def _store_quarter(p, o_v, bits, m, V):
    tl.store(p + o_v, _exponential(bits), mask=m & (o_v < V))


@triton.jit
def _exponential(bits):
    """Turn 32 random bits into -log(1 - u), whose series is more exact for small u."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1 + u * (0.5 + u * 0.3333333333333333))
    return tl.where(u < 1e-3, series, -tl.log(1 - u))


def take(weight: Tensor, tokens: Tensor, y: Tensor) -> None:
    launches["take"] += 1
    width = weight.shape[1]
    wide = power_of_2(width)
    tensors = (weight, tokens, y)
    warps = warps_for(wide, 256)
    launch(_take, (len(tokens),), tensors, (width,), {"BD": wide}, num_warps=warps)


def likeliest(logits: Tensor, tokens: Tensor) -> None:
    launches["likeliest"] += 1
    rows, count = logits.shape
    block = min(LOGITS, power_of_2(count))
    constants = {"V": count, "BLOCK": block}
    warps = warps_for(block, 256)
    launch(_likeliest, (rows,), (logits, tokens), (), constants, num_warps=warps)


def exponentials(seeds: Tensor, step: Tensor, noise: Tensor) -> None:
    launches["exponentials"] += 1
    rows, count = noise.shape
    quarter = ceil_div(count, 4)
    grid = (rows, ceil_div(quarter, 512))
    tensors, numbers = (seeds, step, noise), (count, quarter)
    launch(_exponentials, grid, tensors, numbers, {"BLOCK": 512}, num_warps=4)
