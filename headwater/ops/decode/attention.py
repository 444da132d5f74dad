# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Attention of one new token per row over a cache, in one launch.

    y_h = sum_t softmax_t(scale <q_h, k_t>) v_t      over the row's tokens and the new one

`operators.attend` has the mathematics with norm, rotation and window. Bytes: the keys and values
that there are, once for all queries that share them.

The rows' lengths are read on the device, so that a captured launch serves every length and reads no
more than there is. A program takes one head of keys and a part of the tokens (flash decoding);
where a row has tokens for fewer parts, the other programs leave at once. The last program of a head
to finish sums the parts, always in the same order. Keys are handled in two halves, whose channels a
rotation pairs; if the width is odd, the left half has one channel more.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import launch, launches
from headwater.ops.triton.tiles import ceil_div, load_wide, power_of_2, processors

from .reading import Norm

PROGRAMS = 2  # per multiprocessor, if there are tokens for them
LEAST = 64  # tokens that are worth a program
TOGETHER = 16  # parts that are summed at once


@triton.jit
def _turned(
    left,
    right,
    gl,
    gr,
    cos,
    sin,
    D,
    eps,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Norm and turn rows in two halves, (rows, D / 2) each."""
    if NORM:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        r = (1.0 / tl.sqrt(squares / D + eps))[:, None]
        left, right = left * r * gl, right * r * gr
    if ROTATE:
        left, right = left * cos - right * sin, right * cos + left * sin
    return left, right


@triton.jit
def _tokens(
    keys,
    values,
    b,
    h,
    n,
    end,
    room,
    KV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SV: tl.constexpr,
    BH: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
):
    """Load keys, in two halves, and values of tokens n to n + BN, or to `end`."""
    H: tl.constexpr = (D + 1) // 2
    o_h = tl.arange(0, BH)[None, :]
    o_v = tl.arange(0, BV)[None, :]
    place = (n + tl.arange(0, BN))[:, None]
    row = (b * room + place) * KV + h
    m_n = place < end
    p_left = keys + row * D + o_h
    left = tl.load(p_left, mask=m_n & (o_h < H), other=0.0)
    m_right = m_n & (o_h < D - H)
    right = tl.load(p_left + H, mask=m_right, other=0.0)
    p_value = values + row * SV + o_v
    value = tl.load(p_value, mask=m_n & (o_v < DV), other=0.0)
    return left, right, value


@triton.jit
def _combine(
    parts,  # (B KV SPLITS, G, DV)
    stats,  # (B KV SPLITS, 2, G)
    y,
    one,  # the head of keys
    used,  # parts that it has
    G: tl.constexpr,
    DV: tl.constexpr,
    SPLITS: tl.constexpr,
    BS: tl.constexpr,
    CG: tl.constexpr,
    BV: tl.constexpr,
):
    """Sum the first `used` parts of one head of keys into y, BS parts and CG queries at once.

    Each part brings its largest logit, its sum of exponentials and its weighted sum of values.
    """
    o_s = tl.arange(0, BS)
    o_c = tl.arange(0, CG)
    o_v = tl.arange(0, BV)[None, None, :]
    for start in range(0, G, CG):
        query = start + o_c[None, :]
        # Not minus infinity: queries beyond the last have no part, and would give NaN.
        top = tl.full([CG], -1e30, tl.float32)
        total = tl.zeros([CG], tl.float32)
        acc = tl.zeros([CG, BV], tl.float32)
        for begin in range(0, used, BS):
            part = one * SPLITS + begin + o_s[:, None]
            m = (begin + o_s < used)[:, None] & (query < G)
            p_top = stats + part * 2 * G + query
            tops = tl.load(p_top, mask=m, other=float("-inf"))
            sums = tl.load(p_top + G, mask=m, other=0.0)
            p_part = parts + ((part * G + query) * DV)[:, :, None] + o_v
            m_part = m[:, :, None] & (o_v < DV)
            b_p = tl.load(p_part, mask=m_part, other=0.0)
            new = tl.maximum(top, tl.max(tops, 0))
            keep = tl.exp(top - new)
            w = tl.exp(tops - new[None, :])
            total = total * keep + tl.sum(w * sums, 0)
            weighted = tl.sum(w[:, :, None] * b_p, 0)
            acc = acc * keep[:, None] + weighted
            top = new
        o_q = (start + o_c)[:, None]
        o_y = tl.arange(0, BV)[None, :]
        b_y = acc / tl.maximum(total, 1e-30)[:, None]
        p_y = y + (one * G + o_q) * DV + o_y
        tl.store(p_y, b_y, mask=(o_q < G) & (o_y < DV))


@triton.jit(do_not_specialize=["scale"])
def _attend(
    q,  # (B, KV G, D), rows s_q apart
    k,  # (B, KV, D), rows s_k apart
    v,  # (B, KV, DV), rows s_v apart
    keys,  # (B, room, KV, D)
    values,  # (B, room, KV, SV), of which DV count
    lengths,  # (B,)
    cos,  # (positions, D / 2)
    sin,
    gq,  # (D,), weight of the queries' norm
    gk,  # (D,), of the keys'
    y,  # (B, KV G DV)
    parts,  # (B KV SPLITS, G, DV)
    stats,  # (B KV SPLITS, 2, G): maximum and sum
    counters,  # (B KV,), of parts that are done
    s_q,
    s_k,
    s_v,
    room,
    eps_q,
    eps_k,
    scale,
    window,
    G: tl.constexpr,  # queries of a head of keys
    KV: tl.constexpr,  # heads of keys
    D: tl.constexpr,
    DV: tl.constexpr,  # width of a value
    SV: tl.constexpr,  # distance between values
    SPLITS: tl.constexpr,  # parts of a row at most
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    WINDOW: tl.constexpr,
    BG: tl.constexpr,  # G as a power of two
    BH: tl.constexpr,  # half of D as a power of two
    BV: tl.constexpr,  # DV as a power of two
    BN: tl.constexpr,  # tokens of a tile
    BS: tl.constexpr,  # parts summed at once
    CG: tl.constexpr,  # queries summed at once
    AHEAD: tl.constexpr,  # tiles are fetched ahead by hand
):
    one, split = tl.program_id(0), tl.program_id(1)
    b, h = (one // KV).to(tl.int64), one % KV
    H: tl.constexpr = (D + 1) // 2
    o_g = tl.arange(0, BG)
    o_h = tl.arange(0, BH)
    o_v = tl.arange(0, BV)
    o_n = tl.arange(0, BN)
    m_h = (o_h < H)[None, :]
    m_r = (o_h < D - H)[None, :]
    m_v = (o_v < DV)[None, :]
    length = tl.load(lengths + b)

    # This program's part of the tokens, in whole tiles; a short row needs fewer parts.
    first = 0
    if WINDOW:
        first = tl.maximum(0, length + 1 - window)
    visible = length - first
    tiles = tl.cdiv(tl.cdiv(visible, SPLITS), BN)
    size = tl.maximum(tiles, 1) * BN
    used = tl.maximum(tl.cdiv(visible, size), 1)
    if split >= used:
        return
    begin = first + split * size
    end = tl.minimum(begin + size, length)

    # The first keys and values are under way while the query is made ready, later always the next.
    if AHEAD:
        b_l, b_r, b_w = _tokens(keys, values, b, h, begin, end, room, KV, D, DV, SV, BH, BV, BN)

    # Queries, normed, turned and scaled.
    c, s, gl, gr, kgl, kgr = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    if ROTATE:
        o_angle = length * H + o_h[None, :]
        c = tl.load(cos + o_angle, mask=m_h, other=0.0)
        s = tl.load(sin + o_angle, mask=m_h, other=0.0)
    if NORM:
        p_gq = gq + o_h[None, :]
        p_gk = gk + o_h[None, :]
        gl = load_wide(p_gq, m_h)
        gr = load_wide(p_gq + H, m_r)
        kgl = load_wide(p_gk, m_h)
        kgr = load_wide(p_gk + H, m_r)
    head = (h * G + o_g)[:, None]
    p_q = q + b * s_q + head * D + o_h[None, :]
    m_g = (o_g < G)[:, None]
    ql = load_wide(p_q, m_g & m_h)
    qr = load_wide(p_q + H, m_g & m_r)
    ql, qr = _turned(ql, qr, gl, gr, c, s, D, eps_q, NORM, ROTATE)
    ql = (ql * scale).to(keys.dtype.element_ty)
    qr = (qr * scale).to(keys.dtype.element_ty)
    top = tl.full([BG], float("-inf"), tl.float32)
    total = tl.zeros([BG], tl.float32)
    acc = tl.zeros([BG, BV], tl.float32)

    # The first part also has the new token: it is written to the cache, and attended to.
    if split == 0:
        p_k = k + b * s_k + h * D + o_h[None, :]
        kl = load_wide(p_k, m_h)
        kr = load_wide(p_k + H, m_r)
        kl, kr = _turned(kl, kr, kgl, kgr, c, s, D, eps_k, NORM, ROTATE)
        kl = kl.to(keys.dtype.element_ty)
        kr = kr.to(keys.dtype.element_ty)
        p_v = v + b * s_v + h * DV + o_v[None, :]
        b_v = tl.load(p_v, mask=m_v, other=0.0).to(values.dtype.element_ty)
        row = (b * room + length) * KV + h
        p_left = keys + row * D + o_h[None, :]
        tl.store(p_left, kl, mask=m_h)
        tl.store(p_left + H, kr, mask=m_r)
        tl.store(values + row * SV + o_v[None, :], b_v, mask=m_v)
        # Its logit is the first maximum, so that its weight is one.
        product_l = ql.to(tl.float32) * kl.to(tl.float32)
        product_r = qr.to(tl.float32) * kr.to(tl.float32)
        top = tl.sum(product_l + product_r, 1)
        total += 1.0
        acc += b_v.to(tl.float32)

    # The other tokens, tile by tile, with a running maximum.
    for n in range(begin, end, BN):
        if AHEAD:
            a_l, a_r, a_w = b_l, b_r, b_w
            b_l, b_r, b_w = _tokens(
                keys, values, b, h, n + BN, end, room, KV, D, DV, SV, BH, BV, BN
            )
        else:
            a_l, a_r, a_w = _tokens(keys, values, b, h, n, end, room, KV, D, DV, SV, BH, BV, BN)
        z = tl.dot(ql, tl.trans(a_l), input_precision="ieee")
        z = tl.dot(qr, tl.trans(a_r), z, input_precision="ieee")
        z = tl.where((n + o_n < end)[None, :], z, float("-inf"))
        new = tl.maximum(top, tl.max(z, 1))
        keep = tl.exp(top - new)
        w = tl.exp(z - new[:, None])
        total = total * keep + tl.sum(w, 1)
        acc = acc * keep[:, None]
        acc = tl.dot(w.to(a_w.dtype), a_w, acc, input_precision="ieee")
        top = new

    # One part is the result. Of several, the last program to finish sums all.
    m_y = m_g & m_v
    o_y = o_g[:, None] * DV + o_v[None, :]
    if used == 1:
        b_y = acc / total[:, None]
        p_y = y + one.to(tl.int64) * G * DV + o_y
        tl.store(p_y, b_y, mask=m_y)
    else:
        slot = (one * SPLITS + split).to(tl.int64)
        tl.store(parts + slot * G * DV + o_y, acc, mask=m_y)
        p_top = stats + slot * 2 * G + o_g
        tl.store(p_top, top, mask=o_g < G)
        tl.store(p_top + G, total, mask=o_g < G)
        tl.debug_barrier()
        if tl.atomic_add(counters + one, 1, sem="acq_rel") == used - 1:
            _combine(parts, stats, y, one.to(tl.int64), used, G, DV, SPLITS, BS, CG, BV)
            tl.store(counters + one, 0)


@functools.cache  # never dropped: a CUDA graph that has recorded an address goes on using it
def _counters(device: torch.device, programs: int) -> Tensor:
    """Counters at zero; every launch leaves them at zero again."""
    return torch.zeros(programs, dtype=torch.int32, device=device)


def splits_of(batch: int, heads: int, room: int, device: torch.device) -> int:
    """Count the parts that a row's tokens are divided into."""
    enough = PROGRAMS * processors(device) // (batch * heads)
    return max(1, min(enough, ceil_div(room, LEAST)))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    norms: tuple[Norm, Norm] | None,
    window: int | None,
    scale: float,
    y: Tensor,
) -> None:
    """Write y (B, H * DV).

    q (B, H, D), k (B, KV, D) and v (B, KV, DV) may be parts of one tensor's rows.
    """
    launches["attend"] += 1
    batch, room, heads, width = keys.shape
    group, value = q.shape[1] // heads, values.shape[-1]
    visible = room if window is None else min(room, window)
    splits = splits_of(batch, heads, visible, q.device)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    parts = torch.empty(batch * heads * splits, group, value, **fp32)
    stats = torch.empty(batch * heads * splits, 2, group, **fp32)
    counters = _counters(q.device, batch * heads)
    # Without a norm or rotation, any tensor stands for its numbers: nobody reads it.
    cos, sin = (y, y) if rotary is None else rotary
    gq, eps_q = (y, 0.0) if norms is None else norms[0]
    gk, eps_k = (y, 0.0) if norms is None else norms[1]
    inputs = (q, k, v, keys, values, lengths, cos, sin, gq, gk)
    tensors = (*inputs, y, parts, stats, counters)
    strides = (q.stride(0), k.stride(0), v.stride(0))
    numbers = (*strides, room, eps_q, eps_k, scale, window or 0)
    half = max(16, power_of_2(ceil_div(width, 2)))
    wide = max(16, power_of_2(value))
    narrow = half <= 64
    # A part of one tile has nothing to overlap but its own start. In longer parts Triton's pipeline
    # is faster: with 64 and 256 rows of 1024 tokens, tiles fetched ahead by hand cost a step 0.5
    # and 0.8 ms. What is ahead stays in registers.
    short = room <= LEAST * splits
    constants = {
        "G": group,
        "KV": heads,
        "D": width,
        "DV": value,
        "SV": values.stride(2),
        "SPLITS": splits,
        "NORM": norms is not None,
        "ROTATE": rotary is not None,
        "WINDOW": window is not None,
        "BG": max(16, power_of_2(group)),
        "BH": half,
        "BV": wide,
        "BN": LEAST if narrow else 32,
        "BS": min(TOGETHER, power_of_2(splits)),
        "CG": max(1, min(power_of_2(group), 4096 // (TOGETHER * wide))),
        "AHEAD": short and narrow and keys.dtype != torch.float32,
    }
    warps = 4 if narrow else 8
    grid = (batch * heads, splits)
    launch(_attend, grid, tensors, numbers, constants, num_warps=warps, num_stages=2)
