# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Read, norm and project a few rows in one launch: `operators.project` has the mathematics.

A norm does not wait for its sum: y = rstd(h) (W (g h)), so that squares are summed while the weights stream by. Nor
does a merge, h = (1 - b) o + b P: both parts are projected, and b and rstd(h) are known when the last weight has come.
One row is a sum over registers (`_one`; `_stream`, where the read fits there beside the weights, once a program), up to
64 a product on the matrix units (`_few`), more the library's products; beyond 16 rows the read is a launch of its own:
its sums would take the registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import launch, launches
from headwater.ops.triton.tiles import ceil_div, power_of_2, processors

from .reading import Merge, Norm

FOLDED, FEW = 16, 64  # rows up to which reads are folded in; up to which weights are read by kernels of this file
# Output channels and inputs of a tile, warps, tiles under way: of one row; of few.
ONE, ONE_GATED = (4, 1024, 4, 1), (4, 512, 4, 1)
TILE, TILE_GATED = (16, 128, 4, 5), (16, 128, 4, 5)
# Of one row that is normed first: output channels at once, warps, programs a multiprocessor; the widest input for it.
STREAM, STREAM_GATED, STREAM_WIDTH = (2, 4, 4), (1, 4, 4), 4096


@triton.jit
def _weight(w0, w1, w2, first, N0, N1, WEIGHTS: tl.constexpr):
    """The weight that output channel `first` of all belongs to, and its place there."""
    p = w0
    if WEIGHTS == 3 and first >= N0 + N1:
        p = w2
        first -= N0 + N1
    elif WEIGHTS > 1 and first >= N0:
        p = w1
        first -= N0
    return tl.multiple_of(p, 16), first


@triton.jit
def _share(pp, pf, oo, op, lse, D, eps, key_eps):
    """b and rstd(h), from the sums of P P, P f, o o and o P."""
    b = tl.sigmoid(pf / tl.sqrt(pp / D + key_eps) - lse)
    hh = (1 - b) * (1 - b) * oo + 2 * b * (1 - b) * op + b * b * pp
    return b, 1.0 / tl.sqrt(hh / D + eps)


@triton.jit
def _one(
    x, g, out, lse, f, w0, w1, w2, add, y, N0, N1, N2, eps, key_eps,
    K: tl.constexpr, NORM: tl.constexpr, MERGE: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    WEIGHTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN
    if GATED:
        p, first = tl.multiple_of(w0, 16), n
    else:
        p, first = _weight(w0, w1, w2, n, N0, N1, WEIGHTS)
    total = N0
    if WEIGHTS > 1 and not GATED:
        total += N1
    if WEIGHTS > 2:
        total += N2
    o_n, o_k = tl.arange(0, BN), tl.arange(0, BK)
    m_n = (n + o_n < total)[:, None]
    row = (first + o_n).to(tl.int64)[:, None] * K + o_k[None, :]
    acc = tl.zeros([BN, BK], tl.float32)
    acc_o = tl.zeros([BN, BK], tl.float32)
    acc_u = tl.zeros([BN, BK], tl.float32)
    acc_uo = tl.zeros([BN, BK], tl.float32)
    pp, pf, oo, op = (tl.zeros([1, BK], tl.float32), tl.zeros([1, BK], tl.float32),
                      tl.zeros([1, BK], tl.float32), tl.zeros([1, BK], tl.float32))  # fmt: skip
    for k in tl.static_range(0, K, BK):
        m_k = (k + o_k < K)[None, :]
        b_w = tl.load(p + row + k, mask=m_n & m_k, other=0.0).to(tl.float32)
        b_x = tl.load(x + k + o_k[None, :], mask=m_k, other=0.0).to(tl.float32)
        b_o = b_x
        if GATED:
            b_u = tl.load(w1 + row + k, mask=m_n & m_k, other=0.0).to(tl.float32)
        if NORM:
            b_g = tl.load(g + k + o_k[None, :], mask=m_k, other=0.0).to(tl.float32)
            pp += b_x * b_x
            if MERGE:
                b_o = tl.load(out + k + o_k[None, :], mask=m_k, other=0.0).to(tl.float32)
                pf += b_x * tl.load(f + k + o_k[None, :], mask=m_k, other=0.0)
                oo += b_o * b_o
                op += b_o * b_x
                b_o *= b_g
            b_x *= b_g
        acc += b_w * b_x
        if MERGE:
            acc_o += b_w * b_o
        if GATED:
            acc_u += b_u * b_x
            if MERGE:
                acc_uo += b_u * b_o
    b_y, b_u = tl.sum(acc, 1), tl.sum(acc_u, 1)
    if MERGE:
        b, r = _share(tl.sum(pp), tl.sum(pf), tl.sum(oo), tl.sum(op), tl.load(lse), K, eps, key_eps)
        b_y = r * (b * b_y + (1 - b) * tl.sum(acc_o, 1))
        b_u = r * (b * b_u + (1 - b) * tl.sum(acc_uo, 1))
    elif NORM:
        r = 1.0 / tl.sqrt(tl.sum(pp) / K + eps)
        b_y *= r
        b_u *= r
    if GATED:
        b_y = b_y * tl.sigmoid(b_y) * b_u
    m = n + o_n < total
    if ADD:
        b_y += tl.load(add + n + o_n, mask=m, other=0.0).to(tl.float32)
    tl.store(y + n + o_n, b_y.to(y.dtype.element_ty), mask=m)


@triton.jit
def _stream(
    x, g, out, lse, f, w0, w1, w2, y, N0, N1, N2, eps, key_eps,
    K: tl.constexpr, MERGE: tl.constexpr, GATED: tl.constexpr, WEIGHTS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # The first weights are under way while the read is computed, and then always the next ones.
    block, programs = tl.program_id(0), tl.num_programs(0)
    total = N0
    if WEIGHTS > 1 and not GATED:
        total += N1
    if WEIGHTS > 2:
        total += N2
    o_n, o_k = tl.arange(0, BN)[:, None], tl.arange(0, BK)[None, :]
    m_k = o_k < K
    if GATED:
        p, first = tl.multiple_of(w0, 16), block * BN
    else:
        p, first = _weight(w0, w1, w2, block * BN, N0, N1, WEIGHTS)
    row = (first + o_n).to(tl.int64) * K + o_k
    m = m_k & (block * BN + o_n < total)
    ahead = tl.load(p + row, mask=m, other=0.0)
    ahead_u = ahead
    if GATED:
        ahead_u = tl.load(w1 + row, mask=m, other=0.0)
    h = tl.load(x + o_k, mask=m_k, other=0.0).to(tl.float32)
    if MERGE:
        b_o = tl.load(out + o_k, mask=m_k, other=0.0).to(tl.float32)
        z = tl.sum(h * tl.load(f + o_k, mask=m_k, other=0.0)) / tl.sqrt(tl.sum(h * h) / K + key_eps)
        h = b_o + tl.sigmoid(z - tl.load(lse)) * (h - b_o)
    h = h * tl.load(g + o_k, mask=m_k, other=0.0).to(tl.float32) / tl.sqrt(tl.sum(h * h) / K + eps)
    for now in range(block, tl.cdiv(total, BN), programs):
        b_w, b_u = ahead.to(tl.float32), ahead_u.to(tl.float32)
        n = (now + programs) * BN
        if GATED:
            p, first = tl.multiple_of(w0, 16), n
        else:
            p, first = _weight(w0, w1, w2, n, N0, N1, WEIGHTS)
        row = (first + o_n).to(tl.int64) * K + o_k
        m = m_k & (n + o_n < total)
        ahead = tl.load(p + row, mask=m, other=0.0)
        if GATED:
            ahead_u = tl.load(w1 + row, mask=m, other=0.0)
        b_y = tl.sum(b_w * h, 1)
        if GATED:
            b_y = b_y * tl.sigmoid(b_y) * tl.sum(b_u * h, 1)
        o_y = now * BN + tl.arange(0, BN)
        tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=o_y < total)


@triton.jit(do_not_specialize=["M"])
def _few(
    x, g, out, lse, f, w0, w1, w2, add, y, M, N0, N1, N2, eps, key_eps,
    K: tl.constexpr, NORM: tl.constexpr, MERGE: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    WEIGHTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN
    if GATED:
        p, first = tl.multiple_of(w0, 16), n
    else:
        p, first = _weight(w0, w1, w2, n, N0, N1, WEIGHTS)
    total = N0
    if WEIGHTS > 1 and not GATED:
        total += N1
    if WEIGHTS > 2:
        total += N2
    o_m, o_n, o_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    m_m, m_n = (o_m < M)[:, None], (n + o_n < total)[:, None]
    row = (first + o_n).to(tl.int64)[:, None] * K + o_k[None, :]
    at = o_m[:, None] * K + o_k[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    acc_o = tl.zeros([BM, BN], tl.float32)
    acc_u = tl.zeros([BM, BN], tl.float32)
    acc_uo = tl.zeros([BM, BN], tl.float32)
    pp, pf = tl.zeros([BM, BK], tl.float32), tl.zeros([BM, BK], tl.float32)
    oo, op = tl.zeros([BM, BK], tl.float32), tl.zeros([BM, BK], tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        m_k = (k + o_k < K)[None, :]
        b_w = tl.load(p + row + k, mask=m_n & m_k, other=0.0)
        b_x = tl.load(x + at + k, mask=m_m & m_k, other=0.0)
        b_o = b_x
        if GATED:
            b_u = tl.load(w1 + row + k, mask=m_n & m_k, other=0.0)
        if NORM:
            b_g = tl.load(g + k + o_k[None, :], mask=m_k, other=0.0).to(tl.float32)
            b_p = b_x.to(tl.float32)
            pp += b_p * b_p
            if MERGE:
                b_q = tl.load(out + at + k, mask=m_m & m_k, other=0.0).to(tl.float32)
                pf += b_p * tl.load(f + k + o_k[None, :], mask=m_k, other=0.0)
                oo += b_q * b_q
                op += b_q * b_p
                b_o = (b_q * b_g).to(b_w.dtype)
            b_x = (b_p * b_g).to(b_w.dtype)
        acc = tl.dot(b_x, tl.trans(b_w), acc, input_precision="ieee")
        if MERGE:
            acc_o = tl.dot(b_o, tl.trans(b_w), acc_o, input_precision="ieee")
        if GATED:
            acc_u = tl.dot(b_x, tl.trans(b_u), acc_u, input_precision="ieee")
            if MERGE:
                acc_uo = tl.dot(b_o, tl.trans(b_u), acc_uo, input_precision="ieee")
    if MERGE:
        b_l = tl.load(lse + o_m, mask=o_m < M, other=0.0)
        b, r = _share(tl.sum(pp, 1), tl.sum(pf, 1), tl.sum(oo, 1), tl.sum(op, 1), b_l, K, eps, key_eps)
        b, r = b[:, None], r[:, None]
        acc = r * (b * acc + (1 - b) * acc_o)
        acc_u = r * (b * acc_u + (1 - b) * acc_uo)
    elif NORM:
        r = (1.0 / tl.sqrt(tl.sum(pp, 1) / K + eps))[:, None]
        acc *= r
        acc_u *= r
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_u
    to = o_m[:, None].to(tl.int64) * total + (n + o_n)[None, :]
    m = m_m & (n + o_n < total)[None, :]
    if ADD:
        acc += tl.load(add + to, mask=m, other=0.0).to(tl.float32)
    tl.store(y + to, acc.to(y.dtype.element_ty), mask=m)


@triton.jit
def _normed(
    x, g, out, lse, f, y, D, eps, key_eps, MERGE: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m = o_d < D
    h = tl.load(x + t * D + o_d, mask=m, other=0.0).to(tl.float32)
    if MERGE:
        b_o = tl.load(out + t * D + o_d, mask=m, other=0.0).to(tl.float32)
        z = tl.sum(h * tl.load(f + o_d, mask=m, other=0.0), 0) / tl.sqrt(tl.sum(h * h, 0) / D + key_eps)
        h = b_o + tl.sigmoid(z - tl.load(lse + t)) * (h - b_o)
    r = 1.0 / tl.sqrt(tl.sum(h * h, 0) / D + eps)
    h = h * r * tl.load(g + o_d, mask=m, other=0.0).to(tl.float32)
    tl.store(y + t * D + o_d, h.to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["count"])
def _gate(gate, up, y, count, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_g = tl.load(gate + o, mask=o < count, other=0.0).to(tl.float32)
    b_u = tl.load(up + o, mask=o < count, other=0.0).to(tl.float32)
    tl.store(y + o, (b_g * tl.sigmoid(b_g) * b_u).to(y.dtype.element_ty), mask=o < count)


def project(
    x: Tensor,
    weights: Sequence[Tensor],
    norm: Norm | None,
    merge: Merge | None,
    add: Tensor | None,
    gated: bool,
    y: Tensor,
) -> None:
    """Into y (B, N)."""
    launches["project"] += 1
    by_library = len(x) > FEW or any(weight.data_ptr() % 16 for weight in weights)
    if norm is not None and (by_library or len(x) > FOLDED):
        x, norm, merge = read(x, norm, merge), None, None
    if by_library:
        _many(x, weights, add, gated, y)
        return
    sizes = [len(weight) for weight in weights]
    tile, one = (TILE_GATED, ONE_GATED) if gated else (TILE, ONE)
    wide, deep, warps, stages = one if len(x) == 1 else tile
    whole = sizes[:1] if gated else sizes
    streamed = len(x) == 1 and norm is not None and add is None and x.shape[1] <= STREAM_WIDTH
    if streamed:
        wide, warps, stages = STREAM_GATED if gated else STREAM
        deep = power_of_2(x.shape[1])
    wide = min(wide, *(size & -size for size in whole)) if len(whole) > 1 else wide  # a tile is of one weight
    if len(x) > 1:
        wide = max(16, wide)
        if any(size % wide for size in whole[:-1]):
            _many(x if norm is None else read(x, norm, merge), weights, add, gated, y)
            return
    first, eps = (x, 0.0) if norm is None else norm
    out, lse, folded, key_eps = (x, x, x, 0.0) if merge is None else merge
    tensors = (x, first, out, lse, folded, *(weights[min(i, len(weights) - 1)] for i in range(3)))
    tensors += (y if add is None else add, y)
    numbers = (*sizes, *[0] * (3 - len(sizes)), eps, key_eps)
    constants = {
        "K": x.shape[1], "NORM": norm is not None, "MERGE": merge is not None, "GATED": gated,
        "ADD": add is not None, "WEIGHTS": len(weights),
    }  # fmt: skip
    grid = (ceil_div(sum(whole), wide),)
    if streamed:
        rounds = ceil_div(grid[0], stages * processors(x.device))
        constants = {name: value for name, value in constants.items() if name not in ("NORM", "ADD")}
        constants |= {"BN": wide, "BK": deep}
        launch(_stream, (ceil_div(grid[0], rounds),), (*tensors[:8], y), numbers, constants, num_warps=warps)
        return
    deep = min(deep, max(16, power_of_2(x.shape[1])))
    if len(x) == 1:
        launch(_one, grid, tensors, numbers, constants | {"BN": wide, "BK": deep}, num_warps=warps)
        return
    constants |= {"BM": max(16, power_of_2(len(x))), "BN": wide, "BK": deep}
    launch(_few, grid, tensors, (len(x), *numbers), constants, num_warps=warps, num_stages=stages)


def _many(x, weights, add, gated, y) -> None:
    """The library's products."""
    if gated:
        gate, up = (x @ weight.T for weight in weights)
        count = y.numel()
        launch(_gate, (ceil_div(count, 1024),), (gate, up, y), (count,), {"BLOCK": 1024}, num_warps=4)
        return
    if add is not None:
        torch.addmm(add, x, weights[0].T, out=y)
        return
    start = 0
    for weight in weights:
        torch.mm(x, weight.T, out=y[:, start : start + len(weight)])
        start += len(weight)


def read(x: Tensor, norm: Norm, merge: Merge | None) -> Tensor:
    """What the projections see, (B, D)."""
    y, wide = torch.empty_like(x), power_of_2(x.shape[1])
    out, lse, folded, key_eps = (x, x, norm.weight, 0.0) if merge is None else merge
    tensors = (x, norm.weight, out, lse, folded, y)
    numbers = (x.shape[1], norm.eps, key_eps)
    constants = {"MERGE": merge is not None, "BD": wide}
    launch(_normed, (len(x),), tensors, numbers, constants, num_warps=max(1, min(16, wide // 256)))
    return y
