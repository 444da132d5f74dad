# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Scores of one source for Q queries: the logits that all later reads of it need, in one pass.

    r_t = 1 / sqrt(mean_d(v_td^2) + eps);   z_tq = r_t <f_q, v_t>;   f = query * key_weight, (Q, D)
    dv_t = r_t sum_q dz_tq f_q - (r_t^2 / D) (sum_q dz_tq z_tq) v_t;   df_q = sum_t dz_tq r_t v_t

Passes over (tokens x D): forward one read; backward two reads and one write, which includes the
gradient that reads of the source have gathered. The products with Q queries run on the matrix
units. A program owns a tile of tokens (forward) or a tile of channels and a range of tokens
(backward), so that df needs no atomics: one partial per range, then a sum.

A source may be S parallel streams of D / S channels, read besides as h_t = sum_s p_ts v_ts (see
`ops.streams`): the backward adds what that leaves, p_ts dh_t, from its two factors.

For bf16 sources each query is split into a high and a low part of bf16 beforehand, once: the matrix
units take both straight from memory. f is fp32.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import Launch, launches
from headwater.ops.triton.registration import writer
from headwater.ops.triton.tiles import (
    ceil_div,
    half,
    load_wide,
    power_of_2,
    processors,
    program_tokens,
    rows_of,
    split,
)


class Tile(NamedTuple):
    """Tokens and channels of a tile, warps, stages.

    `repeat`: forward, the tiles that the matrix units sum; backward, programs per multiprocessor.
    """

    tokens: int
    channels: int
    warps: int
    stages: int
    repeat: int


# In bf16, and otherwise.
FORWARD = Tile(128, 64, 4, 3, 2)
FORWARD_WIDE = Tile(64, 128, 4, 3, 1)
BACKWARD = Tile(64, 128, 4, 3, 2)
# With a read of streams besides.
STREAMS_BACKWARD = Tile(64, 64, 4, 3, 2)
STREAMS_BACKWARD_WIDE = Tile(32, 32, 4, 3, 2)
LEAST_TOKENS = 32  # of a tile, down to which it shrinks for a GPU to have work everywhere
MAX_QUERIES = 64  # per launch; more queries read the source again


@triton.jit(do_not_specialize=["count"])
def _split(f, parts, count, B: tl.constexpr):
    """Write f = high + low to parts (2, count)."""
    o = tl.program_id(0) * B + tl.arange(0, B)
    m = o < count
    b_f = tl.load(f + o, mask=m, other=0.0)
    high, low = split(b_f, parts.dtype.element_ty)
    tl.store(parts + o, high, mask=m)
    tl.store(parts + count + o, low, mask=m)


@triton.jit(do_not_specialize=["M", "Q", "ZQ"])
def _score(
    v,  # (M, D), the source
    f,  # (ZQ, D) fp32, or halves (2, ZQ, D)
    z,  # (M, ZQ)
    rstd,  # (M,)
    M,
    D,
    Q,  # queries of this launch
    ZQ,  # queries in all
    eps,
    T: tl.constexpr,  # tokens of a tile
    BD: tl.constexpr,  # channels of a tile
    RUN: tl.constexpr,  # tiles that the matrix units sum
    QP: tl.constexpr,  # Q, padded
    HALF: tl.constexpr,  # f comes in bf16 halves
):
    o_t, m_t = program_tokens(M, T)
    o_q = tl.arange(0, QP)
    m_q = o_q < Q
    acc = tl.zeros([QP, T], tl.float32)
    squares = tl.zeros([T, BD // 8], tl.float32)
    for c in range(0, D, BD * RUN):
        # Every RUN tiles the sum starts from zero: the matrix units truncate as they add, which
        # shows after some thousand channels.
        part = tl.zeros([QP, T], tl.float32)
        for k in tl.static_range(RUN):
            o_d = c + k * BD + tl.arange(0, BD)
            m_d = o_d < D
            p_v = v + o_t[:, None] * D + o_d[None, :]
            m_v = m_t[:, None] & m_d[None, :]
            b_v = tl.load(p_v, mask=m_v, other=0.0)
            p_f = f + o_q[:, None] * D + o_d[None, :]
            m_f = m_q[:, None] & m_d[None, :]
            b_f = tl.load(p_f, mask=m_f, other=0.0)
            if HALF:
                b_low = tl.load(p_f + ZQ * D, mask=m_f, other=0.0)
                part = tl.dot(b_f, tl.trans(b_v), part)
                part = tl.dot(b_low, tl.trans(b_v), part)
            b_v = b_v.to(tl.float32)
            if not HALF:
                part = tl.dot(b_f, tl.trans(b_v), part, input_precision="tf32x3")
            # Eight neighbours lie in one thread, which adds them up without an exchange.
            eights = tl.reshape(b_v * b_v, (T, BD // 8, 8))
            squares += tl.sum(eights, 2)
        acc += part
    r = 1.0 / tl.sqrt(tl.sum(squares, 1) / D + eps)
    tl.store(rstd + o_t, r, mask=m_t)
    p_z = z + o_t[None, :] * ZQ + o_q[:, None]
    m_z = m_t[None, :] & m_q[:, None]
    tl.store(p_z, acc * r[None, :], mask=m_z)


@triton.jit(do_not_specialize=["M", "Q", "ZQ"])
def _prepare(
    z,  # (M, ZQ)
    dz,  # (M, ZQ)
    rstd,  # (M,)
    high,  # (M, QP)
    low,  # (M, QP)
    pull,  # (M,)
    M,
    D,
    Q,
    ZQ,
    T: tl.constexpr,
    QP: tl.constexpr,
    HALF: tl.constexpr,
):
    """Write dz r as high + low, (M, QP), and the pull towards each token's own direction.

    The matrix units take both parts from memory.
    """
    o_t, m_t = program_tokens(M, T)
    o_q = tl.arange(0, QP)
    m = m_t[:, None] & (o_q < Q)[None, :]
    o_z = o_t[:, None] * ZQ + o_q[None, :]
    b_dz = tl.load(dz + o_z, mask=m, other=0.0)
    b_z = tl.load(z + o_z, mask=m, other=0.0)
    b_r = tl.load(rstd + o_t, mask=m_t, other=0.0)
    b_pull = tl.sum(b_dz * b_z, 1) * b_r * b_r / D
    tl.store(pull + o_t, b_pull, mask=m_t)
    dzr = b_dz * b_r[:, None]
    b_high = dzr.to(high.dtype.element_ty)
    o_part = o_t[:, None] * QP + o_q[None, :]
    tl.store(high + o_part, b_high, mask=m_t[:, None])
    if HALF:
        b_low = (dzr - b_high.to(tl.float32)).to(low.dtype.element_ty)
        tl.store(low + o_part, b_low, mask=m_t[:, None])


@triton.jit(do_not_specialize=["M", "Q", "tokens"])
def _score_backward(
    v,  # (M, D), the source
    f,  # (ZQ, D)
    high,  # (M, QP), of `_prepare`
    low,  # (M, QP)
    pull,  # (M,)
    g_in,  # (M, D), what later reads gathered
    g_out,  # (M, D)
    df,  # (ranges, Q, D), partials
    dh,  # (M / SHARED, W), of the read of streams
    p,  # (M, STREAMS), weights of that read
    M,
    W,  # channels of a stream
    Q,
    tokens,  # of a range
    HAS_G: tl.constexpr,  # there is a g_in
    T: tl.constexpr,
    BD: tl.constexpr,
    QP: tl.constexpr,
    HALF: tl.constexpr,
    STREAMS: tl.constexpr,  # of a row
    SHARED: tl.constexpr,  # rows that are the streams of one read
    HAS_H: tl.constexpr,  # there is such a read
):
    # A tile lies in one stream of a row. One of STREAMS and SHARED is 1.
    D = W * STREAMS
    stream = tl.program_id(0) % STREAMS
    o_w = tl.program_id(0) // STREAMS * BD + tl.arange(0, BD)
    o_d = stream * W + o_w
    o_q = tl.arange(0, QP)
    m_d = o_w < W
    m_q = o_q < Q
    m_f = m_q[:, None] & m_d[None, :]
    p_f = f + o_q[:, None] * D + o_d[None, :]
    b_f = tl.load(p_f, mask=m_f, other=0.0)
    if HALF:
        b_f = b_f.to(v.dtype.element_ty)
    acc = tl.zeros([QP, BD], tl.float32)
    # Ranges go backwards: the end of a gradient has just been written, and is still in cache.
    range_backwards = tl.num_programs(1) - 1 - tl.program_id(1)
    start = range_backwards.to(tl.int64) * tokens
    for i in range(0, tokens, T):
        o_t = start + i + tl.arange(0, T)
        m_t = o_t < M
        m_td = m_t[:, None] & m_d[None, :]
        o_part = o_t[:, None] * QP + o_q[None, :]
        o_td = o_t[:, None] * D + o_d[None, :]
        b_high = tl.load(high + o_part, mask=m_t[:, None], other=0.0)
        b_v = tl.load(v + o_td, mask=m_td, other=0.0)
        # The gradient: less the pull, plus what later reads gathered, plus the read of streams.
        b_pull = tl.load(pull + o_t, mask=m_t, other=0.0)
        g = -b_pull[:, None] * b_v.to(tl.float32)
        if HAS_G:
            g += load_wide(g_in + o_td, m_td)
        if HAS_H:
            p_dh = dh + (o_t // SHARED)[:, None] * W + o_w[None, :]
            b_dh = load_wide(p_dh, m_td)
            b_p = tl.load(p + o_t * STREAMS + stream, mask=m_t, other=0.0)
            g += b_p[:, None] * b_dh
        # Plus the products: dz r with the queries for g, and with the source for df.
        if HALF:
            b_low = tl.load(low + o_part, mask=m_t[:, None], other=0.0)
            g = tl.dot(b_high, b_f, g)
            g = tl.dot(b_low, b_f, g)
            acc = tl.dot(tl.trans(b_high), b_v, acc)
            acc = tl.dot(tl.trans(b_low), b_v, acc)
        else:
            b_v = b_v.to(tl.float32)
            b_high = b_high.to(tl.float32)
            g = tl.dot(b_high, b_f, g, input_precision="tf32x3")
            acc = tl.dot(tl.trans(b_high), b_v, acc, input_precision="tf32x3")
        tl.store(g_out + o_td, g, mask=m_td)
    # This range's partial of df.
    row = tl.program_id(1) * Q + o_q[:, None]
    p_df = df + row.to(tl.int64) * D + o_d[None, :]
    tl.store(p_df, acc, mask=m_f)


def _padded(count: int) -> int:
    """Return the queries of a tile: at least 16, which the matrix units take."""
    return max(16, power_of_2(count))


# Kernels take tensors by address: only where one begins counts, so nothing is cut off at the end.
def _rows(tensor: Tensor, q: int) -> Tensor:
    return tensor[q:] if q else tensor


def _columns(tensor: Tensor, q: int) -> Tensor:
    return tensor[..., q:] if q else tensor


@functools.lru_cache(1024)
def _forward(
    rows: int,
    width: int,
    count: int,
    eps: float,
    halves: bool,
    device: torch.device,
):
    """Prepare the split of queries, if there is one, and the scores of each chunk of queries."""
    tile, channels, warps, stages, run = FORWARD if halves else FORWARD_WIDE
    # 8192 tokens in tiles of 128 would leave half of an H200 idle.
    while tile > LEAST_TOKENS and 2 * ceil_div(rows, tile) < processors(device):
        tile //= 2
    splits = None
    if halves:
        numbers = count * width
        grid = (ceil_div(numbers, 1024),)
        splits = Launch(_split, grid, (numbers,), {"B": 1024}, num_warps=4)
    scores = []
    grid = (ceil_div(rows, tile),)
    options = {"num_warps": warps, "num_stages": stages}
    for q in range(0, count, MAX_QUERIES):
        now = min(count - q, MAX_QUERIES)
        constants = {
            "T": tile,
            "BD": channels,
            "RUN": run,
            "QP": _padded(now),
            "HALF": halves,
        }
        numbers = (rows, width, now, count, eps)
        scores.append((q, Launch(_score, grid, numbers, constants, **options)))
    return splits, scores


def _scores(source, folded, eps):
    tokens = source.shape[:-1]
    return folded.new_empty(*tokens, len(folded)), folded.new_empty(tokens)


@writer(_scores, writes=("z", "rstd"))
def score(
    source: Tensor,
    folded: Tensor,
    eps: float,
    z: Tensor,
    rstd: Tensor,
) -> None:
    """Write logits `z` (..., Q) and 1/rms (...), both fp32.

    `source` is (..., D), `folded` (Q, D) in fp32.
    """
    launches["score"] += 1
    rows, width = rows_of(source)
    count = len(folded)
    splits, launches_by_query = _forward(rows, width, count, eps, half(source), source.device)
    if splits is not None:
        parts = source.new_empty(2 * count, width)
        splits(folded, parts)
        folded = parts
    for q, run in launches_by_query:
        run(source, _rows(folded, q), _columns(z, q), rstd)


@functools.lru_cache(1024)
def _backward(
    rows: int,
    width: int,
    count: int,
    has_gradient: bool,
    halves: bool,
    streams: int,
    shared: int,
    device: torch.device,
):
    """Return the number of ranges of tokens, and launches for each chunk of queries.

    Each chunk has its first query, its length, the padded length, and two launches. If a row has
    `streams`, or several rows are streams of one (`shared`), their read's gradient is added.
    """
    tile = BACKWARD
    if shared:
        tile = STREAMS_BACKWARD if halves else STREAMS_BACKWARD_WIDE
    columns = streams * ceil_div(width // streams, tile.channels)
    # As many ranges as fill the GPU, of equal length, in whole tiles.
    enough = tile.repeat * processors(device) // columns
    ranges = max(1, min(ceil_div(rows, tile.tokens), enough))
    tokens = ceil_div(ceil_div(rows, ranges), tile.tokens) * tile.tokens
    ranges = ceil_div(rows, tokens)
    launches_by_query = []
    for q in range(0, count, MAX_QUERIES):
        now = min(count - q, MAX_QUERIES)
        both = {"QP": _padded(now), "HALF": halves}
        grid = (ceil_div(rows, 32),)
        numbers = (rows, width, now, count)
        prepare = Launch(_prepare, grid, numbers, {"T": 32} | both, num_warps=4)
        # Later chunks add to what the first has written.
        first = q == 0
        constants = {
            "HAS_G": has_gradient or not first,
            "T": tile.tokens,
            "BD": tile.channels,
            **both,
            "STREAMS": streams,
            "SHARED": max(1, shared),
            "HAS_H": shared > 0 and first,
        }
        numbers = (rows, width // streams, now, tokens)
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        spread = Launch(_score_backward, (columns, ranges), numbers, constants, **options)
        launches_by_query.append((q, now, _padded(now), prepare, spread))
    return ranges, launches_by_query


def launch_score_backward(
    source,
    folded,
    z,
    rstd,
    dz,
    gradient,
    out,
    df,
    read=None,
) -> None:
    """Write gradient + dv to `out` (which may be `gradient` itself), and df.

    `read`: dh (..., D / S) and p (..., n) in fp32, of n streams read to one h, of which a row of
    the source has S.
    """
    launches["score_backward"] += 1
    rows, width = rows_of(source)
    count, halves = len(folded), half(source)
    # Without a read any tensors stand for its factors: nobody reads them.
    dh, p = (source, rstd) if read is None else read
    streams = width // dh.shape[-1]
    shared = 0 if read is None else p.shape[-1] // streams
    has_gradient = gradient is not None
    ranges, launches_by_query = _backward(
        rows, width, count, has_gradient, halves, streams, shared, source.device
    )
    pull = rstd.new_empty(rows)
    earlier = gradient if has_gradient else source
    dtype = source.dtype if halves else torch.float32
    for q, now, wide, prepare, spread in launches_by_query:
        high = torch.empty(rows, wide, dtype=dtype, device=source.device)
        low = torch.empty_like(high) if halves else high
        prepare(_columns(z, q), _columns(dz, q), rstd, high, low, pull)
        parts = rstd.new_empty(ranges, now, width)
        queries = _rows(folded, q)
        spread(source, queries, high, low, pull, earlier, out, parts, dh, p)
        earlier = out
        chunk_df = df if now == count else df[q : q + now]
        torch.sum(parts, 0, out=chunk_df)


def _gradients(source, folded, *_):
    return torch.empty_like(source), torch.empty_like(folded)


@writer(_gradients, writes=("out", "df"))
def score_backward(
    source: Tensor,
    folded: Tensor,
    z: Tensor,
    rstd: Tensor,
    dz: Tensor,
    gradient: Tensor | None,
    out: Tensor,
    df: Tensor,
) -> None:
    """Write the gradients of the source and of `folded`.

    The first includes what later reads gathered for the source in `gradient`.
    """
    launch_score_backward(source, folded, z, rstd, dz, gradient, out, df)


def _gradient_of_queries(source, folded, *_):
    return (torch.empty_like(folded),)


@writer(_gradient_of_queries, writes=("df",), adds_to=("gradient",))
def score_backward_(
    source: Tensor,
    folded: Tensor,
    z: Tensor,
    rstd: Tensor,
    dz: Tensor,
    gradient: Tensor,
    df: Tensor,
) -> None:
    """Do as `score_backward` does, adding into `gradient` in place."""
    launch_score_backward(source, folded, z, rstd, dz, gradient, gradient, df)
