# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Read, norm and project a few rows in one launch: `operators.project` has the mathematics.

    y = W (g h / rms(h)),   h = (1 - b) o + b P

Bytes: the weights, once; everything else is small beside them. A norm does not wait for its sum:
squares are summed while the weights stream by, and rstd(h) multiplies W (g h). Nor does a merge:
both parts are projected, and b and rstd(h) are known when the last weight has come.

One row is a sum over registers: `_stream`, where the read fits into registers beside the weights
and is made once per program, else `_one`. For more rows the read is a launch before (`_normed`),
and then come products on the matrix units (`_few`) or the library's: `tile_for` has what was
fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import launch, launches
from headwater.ops.triton.tiles import (
    ceil_div,
    load_wide,
    power_of_2,
    processors,
    shares,
    warps_for,
)

from .reading import Merge, Norm

STREAM_WIDTH = 4096  # the widest read that stays in registers
FEW = 64  # rows up to which products on the matrix units are those of this file
LONG = 16384  # output channels of a head rather than of a sublayer


class Tile(NamedTuple):
    """A kernel's name, output channels and inputs of a tile, warps, and tiles under way.

    Of `stream`, `under_way` is programs per multiprocessor.
    """

    kernel: str
    channels: int = 0
    inputs: int = 0
    warps: int = 4
    under_way: int = 1


def tile_for(
    rows: int,
    read: bool,
    gated: bool,
    channels: int,
    width: int,
    device: torch.device,
) -> Tile:
    """Choose what was fastest on an H200 for weights of width 2048 (`benchmarks.projections`).

    `read`: there is a norm, and nothing is added; `channels`: of the output.
    """
    if rows == 1 and read and width <= STREAM_WIDTH:
        inputs = power_of_2(width)
        # Gate and up: 13.4 us; with 4 programs 14.1.
        if gated:
            return Tile("stream", 1, inputs, 4, 8)
        # The head: 33.6 us; with two channels 34.6 to 35.8.
        if channels > LONG:
            return Tile("stream", 4, inputs, 4, 4)
        # Queries, keys and values: 6.7 us; with four channels 6.8.
        return Tile("stream", 2, inputs, 4, 6)
    if rows == 1:
        # Down: 8.6 us; with two channels 9.9.
        if gated or width > STREAM_WIDTH:
            return Tile("one", 4, 1024)
        # Out of attention: 4.3 us; with four channels 4.5.
        return Tile("one", 2, 1024)
    # A head of 16 rows: 38.7 us; with the best tile here 45.2.
    if rows > FEW or channels > LONG:
        return Tile("library")
    # Every program reads all rows. 32 channels at once halve that (gate and up, 16 rows: 18.7 us
    # against 24.2), if there is a program for nearly each multiprocessor; else not (down: 14.4
    # against 12.6).
    enough = channels // 32 >= 0.9 * processors(device)
    return Tile("few", 32 if enough else 16, 128, 4, 5)


@triton.jit
def _weight(
    w0,
    w1,
    w2,
    first,
    N0,
    N1,
    GATED: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    """Find the weight that output channel `first` of all belongs to, and its place there.

    GATED: gate and up have the same channels, and the gate is the first weight.
    """
    p = w0
    if WEIGHTS == 3 and first >= N0 + N1:
        p = w2
        first -= N0 + N1
    elif WEIGHTS > 1 and not GATED and first >= N0:
        p = w1
        first -= N0
    return tl.multiple_of(p, 16), first


@triton.jit
def _channels(N0, N1, N2, GATED: tl.constexpr, WEIGHTS: tl.constexpr):
    """Count the output channels of all weights."""
    total = N0
    if WEIGHTS > 1 and not GATED:
        total += N1
    if WEIGHTS > 2:
        total += N2
    return total


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _share(pp, pf, oo, op, lse, D, key_eps):
    """Return 1 - b, b and the sum of h h, from the sums of P P, P f, o o and o P; and a warning.

    The warning: o and P nearly cancel. Then the squares of h must be summed themselves, since
    rounding leaves little of the difference, and may make it negative.
    """
    a, b = shares(pf / tl.sqrt(pp / D + key_eps) - lse)
    uncrossed = a * a * oo + b * b * pp
    hh = uncrossed + 2 * a * b * op
    return a, b, hh, hh < uncrossed / 16


@triton.jit
def _one(
    x,  # (1, K)
    g,  # (K,), the norm's weight
    out,  # (1, K), phase 1's output
    lse,  # (1,)
    f,  # (K,)
    w0,  # (N0, K)
    w1,  # (N1, K)
    w2,  # (N2, K)
    add,  # (1, N)
    y,  # (1, N)
    N0,
    N1,
    N2,
    eps,
    key_eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    MERGE: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BN: tl.constexpr,  # channels of a program
    BK: tl.constexpr,  # inputs at once
):
    n = tl.program_id(0) * BN
    p, first = _weight(w0, w1, w2, n, N0, N1, GATED, WEIGHTS)
    total = _channels(N0, N1, N2, GATED, WEIGHTS)
    o_n, o_k = tl.arange(0, BN), tl.arange(0, BK)
    m_n = (n + o_n < total)[:, None]
    channel = (first + o_n).to(tl.int64)[:, None]
    row = channel * K + o_k[None, :]

    # Products with both parts of the read, by the weight and, gated, by up; and sums over the read.
    acc = tl.zeros([BN, BK], tl.float32)
    acc_o = tl.zeros([BN, BK], tl.float32)
    acc_u = tl.zeros([BN, BK], tl.float32)
    acc_uo = tl.zeros([BN, BK], tl.float32)
    pp = tl.zeros([1, BK], tl.float32)
    pf = tl.zeros([1, BK], tl.float32)
    oo = tl.zeros([1, BK], tl.float32)
    op = tl.zeros([1, BK], tl.float32)
    for k in tl.static_range(0, K, BK):
        o_c = k + o_k[None, :]
        m_k = (k + o_k < K)[None, :]
        b_w = load_wide(p + row + k, m_n & m_k)
        b_x = load_wide(x + o_c, m_k)
        b_o = b_x
        if GATED:
            b_u = load_wide(w1 + row + k, m_n & m_k)
        if NORM:
            b_g = load_wide(g + o_c, m_k)
            pp += b_x * b_x
            if MERGE:
                b_o = load_wide(out + o_c, m_k)
                pf += b_x * tl.load(f + o_c, mask=m_k, other=0.0)
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

    # Now b and rstd(h) are known.
    b_y, b_u = tl.sum(acc, 1), tl.sum(acc_u, 1)
    if MERGE:
        b_l = tl.load(lse)
        sum_pp, sum_pf = tl.sum(pp), tl.sum(pf)
        sum_oo, sum_op = tl.sum(oo), tl.sum(op)
        a, b, hh, cancels = _share(sum_pp, sum_pf, sum_oo, sum_op, b_l, K, key_eps)
        if cancels:
            squares = tl.zeros([1, BK], tl.float32)
            for c in tl.static_range(0, K, BK):
                o_c = c + o_k[None, :]
                h = b * load_wide(x + o_c, o_c < K)
                h += a * load_wide(out + o_c, o_c < K)
                squares += h * h
            hh = tl.sum(squares)
        r = 1.0 / tl.sqrt(hh / K + eps)
        b_y = r * (b * b_y + a * tl.sum(acc_o, 1))
        b_u = r * (b * b_u + a * tl.sum(acc_uo, 1))
    elif NORM:
        r = 1.0 / tl.sqrt(tl.sum(pp) / K + eps)
        b_y *= r
        b_u *= r
    if GATED:
        b_y = b_y * tl.sigmoid(b_y) * b_u
    m = n + o_n < total
    if ADD:
        b_y += load_wide(add + n + o_n, m)
    tl.store(y + n + o_n, b_y, mask=m)


@triton.jit
def _stream(
    x,  # as in `_one`
    g,
    out,
    lse,
    f,
    w0,
    w1,
    w2,
    y,
    N0,
    N1,
    N2,
    eps,
    key_eps,
    K: tl.constexpr,
    MERGE: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BN: tl.constexpr,  # channels of a tile
    BK: tl.constexpr,  # K as a power of two
):
    block, programs = tl.program_id(0), tl.num_programs(0)
    total = _channels(N0, N1, N2, GATED, WEIGHTS)
    o_n = tl.arange(0, BN)[:, None]
    o_k = tl.arange(0, BK)[None, :]
    m_k = o_k < K

    # The first weights are under way while the read is computed, and then always the next ones.
    n = block * BN
    p, first = _weight(w0, w1, w2, n, N0, N1, GATED, WEIGHTS)
    row = (first + o_n).to(tl.int64) * K + o_k
    m = m_k & (n + o_n < total)
    ahead = tl.load(p + row, mask=m, other=0.0)
    ahead_u = ahead
    if GATED:
        ahead_u = tl.load(w1 + row, mask=m, other=0.0)

    h = load_wide(x + o_k, m_k)
    if MERGE:
        b_o = load_wide(out + o_k, m_k)
        b_f = tl.load(f + o_k, mask=m_k, other=0.0)
        b_l = tl.load(lse)  # before the sum, which it would wait for
        # Four sums at once: the warps meet once.
        products = (h * h, h * b_f, b_o * b_o, b_o * h)
        pp, pf, oo, op = tl.reduce(products, 1, _add4)
        a, b, hh, cancels = _share(pp, pf, oo, op, b_l, K, key_eps)
        h = a[:, None] * b_o + b[:, None] * h
        if tl.max(cancels.to(tl.int32), 0) > 0:
            hh = tl.sum(h * h, 1)
        h = h / tl.sqrt(hh / K + eps)[:, None]
    else:
        h = h / tl.sqrt(tl.sum(h * h) / K + eps)
    # The weight is loaded only here: registers are what is scarce.
    h = h * load_wide(g + o_k, m_k)

    for now in range(block, tl.cdiv(total, BN), programs):
        b_w, b_u = ahead.to(tl.float32), ahead_u.to(tl.float32)
        n = (now + programs) * BN
        p, first = _weight(w0, w1, w2, n, N0, N1, GATED, WEIGHTS)
        row = (first + o_n).to(tl.int64) * K + o_k
        m = m_k & (n + o_n < total)
        ahead = tl.load(p + row, mask=m, other=0.0)
        if GATED:
            ahead_u = tl.load(w1 + row, mask=m, other=0.0)
        b_y = tl.sum(b_w * h, 1)
        if GATED:
            b_y = b_y * tl.sigmoid(b_y) * tl.sum(b_u * h, 1)
        o_y = now * BN + tl.arange(0, BN)
        tl.store(y + o_y, b_y, mask=o_y < total)


@triton.jit(do_not_specialize=["M"])
def _few(
    x,  # (M, K), read and normed
    w0,  # as in `_one`
    w1,
    w2,
    add,  # (M, N)
    y,  # (M, N)
    M,
    N0,
    N1,
    N2,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BM: tl.constexpr,  # M as a power of two
    BN: tl.constexpr,  # channels of a program
    BK: tl.constexpr,  # inputs at once
    STAGES: tl.constexpr,  # tiles under way
):
    n = tl.program_id(0) * BN
    p, first = _weight(w0, w1, w2, n, N0, N1, GATED, WEIGHTS)
    total = _channels(N0, N1, N2, GATED, WEIGHTS)
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_m = (o_m < M)[:, None]
    m_n = (n + o_n < total)[:, None]
    channel = (first + o_n).to(tl.int64)[:, None]
    row = channel * K + o_k[None, :]
    o_x = o_m[:, None] * K + o_k[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    acc_u = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        m_k = (k + o_k < K)[None, :]
        b_w = tl.load(p + row + k, mask=m_n & m_k, other=0.0)
        b_x = tl.load(x + o_x + k, mask=m_m & m_k, other=0.0)
        acc = tl.dot(b_x, tl.trans(b_w), acc, input_precision="ieee")
        if GATED:
            b_u = tl.load(w1 + row + k, mask=m_n & m_k, other=0.0)
            acc_u = tl.dot(b_x, tl.trans(b_u), acc_u, input_precision="ieee")
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_u
    row_y = o_m[:, None].to(tl.int64)
    o_y = row_y * total + (n + o_n)[None, :]
    m = m_m & (n + o_n < total)[None, :]
    if ADD:
        acc += load_wide(add + o_y, m)
    tl.store(y + o_y, acc, mask=m)


@triton.jit
def _normed(
    x,  # (B, D)
    g,  # (D,), the norm's weight
    out,  # (B, D), phase 1's output
    lse,  # (B,)
    f,  # (D,)
    y,  # (B, D)
    D,
    eps,
    key_eps,
    MERGE: tl.constexpr,
    BD: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    row = t * D + o_d
    m = o_d < D
    # Everything is fetched before the first sum: nothing waits for it.
    h = load_wide(x + row, m)
    b_g = load_wide(g + o_d, m)
    if MERGE:
        b_o = load_wide(out + row, m)
        b_f = tl.load(f + o_d, mask=m, other=0.0)
        b_l = tl.load(lse + t)
        products = (h * h, h * b_f, b_o * b_o, b_o * h)
        pp, pf, oo, op = tl.reduce(products, 0, _add4)
        a, b, hh, cancels = _share(pp, pf, oo, op, b_l, D, key_eps)
        h = a * b_o + b * h
        if cancels:
            hh = tl.sum(h * h, 0)
        r = 1.0 / tl.sqrt(hh / D + eps)
    else:
        r = 1.0 / tl.sqrt(tl.sum(h * h, 0) / D + eps)
    tl.store(y + row, h * r * b_g, mask=m)


@triton.jit(do_not_specialize=["count"])
def _gate(gate, up, y, count, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < count
    b_g = load_wide(gate + o, m)
    b_u = load_wide(up + o, m)
    b_y = b_g * tl.sigmoid(b_g) * b_u
    tl.store(y + o, b_y, mask=m)


def project(
    x: Tensor,
    weights: Sequence[Tensor],
    norm: Norm | None,
    merge: Merge | None,
    add: Tensor | None,
    gated: bool,
    y: Tensor,
) -> None:
    """Write y (B, N)."""
    launches["project"] += 1
    # Several rows are read in a launch of its own.
    if norm is not None and len(x) > 1:
        x, norm, merge = read(x, norm, merge), None, None
    streams = norm is not None and add is None
    rows, width = x.shape
    tile = tile_for(rows, streams, gated, y.shape[1], width, x.device)
    tile = _fitting(tile, weights, gated)
    if tile.kernel == "library":
        x = x if norm is None else read(x, norm, merge)
        _many(x, weights, add, gated, y)
        return

    # Kernels take three weights and everything else that one may read; others stand in.
    spare = 3 - len(weights)
    three = (*weights, *[weights[-1]] * spare)
    sizes = (*map(len, weights), *[0] * spare)
    first, eps = (x, 0.0) if norm is None else norm
    out, lse, folded, key_eps = (x, x, x, 0.0) if merge is None else merge
    added = y if add is None else add
    of_read = (x, first, out, lse, folded)
    numbers = (*sizes, eps, key_eps)
    constants = {
        "K": width,
        "GATED": gated,
        "WEIGHTS": len(weights),
        "BN": tile.channels,
        "BK": min(tile.inputs, max(16, power_of_2(width))),
    }
    programs = ceil_div(y.shape[1], tile.channels)
    options = {"num_warps": tile.warps}
    if tile.kernel == "few":
        constants |= {"ADD": add is not None, "BM": max(16, power_of_2(rows))}
        tensors, numbers = (x, *three, added, y), (rows, *sizes)
        options["num_stages"] = tile.under_way
        launch(_few, (programs,), tensors, numbers, constants, **options)
    elif tile.kernel == "stream":
        constants["MERGE"] = merge is not None
        # Programs that run at the same time take equal numbers of tiles.
        rounds = ceil_div(programs, tile.under_way * processors(x.device))
        grid = (ceil_div(programs, rounds),)
        launch(_stream, grid, (*of_read, *three, y), numbers, constants, **options)
    else:
        flags = {"MERGE": merge is not None, "NORM": norm is not None, "ADD": add is not None}
        tensors = (*of_read, *three, added, y)
        launch(_one, (programs,), tensors, numbers, constants | flags, **options)


def _fitting(tile: Tile, weights: Sequence[Tensor], gated: bool) -> Tile:
    """Narrow a tile until its channels are all of one weight.

    If addresses or sizes are too odd for that, return the library's product.
    """
    if any(weight.data_ptr() % 16 for weight in weights):
        return Tile("library")
    channels = tile.channels
    if not gated:
        for weight in weights[:-1]:
            # The largest power of two that divides the weight's channels.
            channels = min(channels, len(weight) & -len(weight))
    if tile.kernel == "few" and channels < 16:  # the least that the matrix units take
        return Tile("library")
    return Tile(tile.kernel, channels, tile.inputs, tile.warps, tile.under_way)


def _many(x, weights, add, gated, y) -> None:
    """Project by the library's products."""
    if gated:
        gate, up = (x @ weight.T for weight in weights)
        count = y.numel()
        grid, constants = (ceil_div(count, 1024),), {"BLOCK": 1024}
        launch(_gate, grid, (gate, up, y), (count,), constants, num_warps=4)
        return
    if add is not None:
        torch.addmm(add, x, weights[0].T, out=y)
        return
    start = 0
    for weight in weights:
        stop = start + len(weight)
        torch.mm(x, weight.T, out=y[:, start:stop])
        start = stop


def read(x: Tensor, norm: Norm, merge: Merge | None) -> Tensor:
    """Compute what the projections see, (B, D)."""
    y = torch.empty_like(x)
    rows, width = x.shape
    wide = power_of_2(width)
    # Without a merge any tensor stands for its parts: nobody reads it.
    out, lse, folded, key_eps = (x, x, norm.weight, 0.0) if merge is None else merge
    tensors = (x, norm.weight, out, lse, folded, y)
    constants = {"MERGE": merge is not None, "BD": wide}
    warps = warps_for(wide, 256 if merge is None else 512)
    numbers = (width, norm.eps, key_eps)
    launch(_normed, (rows,), tensors, numbers, constants, num_warps=warps)
    return y
