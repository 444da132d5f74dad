# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Scores of one source for Q queries: the logits that all later reads of it need, from one pass over it.

    r_t = 1 / sqrt(mean_d(v_td^2) + eps);   z_tq = r_t <f_q, v_t>;   f = query * key_weight, (Q, D) in fp32
    dv_t = r_t sum_q dz_tq f_q - (r_t^2 / D) (sum_q dz_tq z_tq) v_t;   df_q = sum_t dz_tq r_t v_t

Passes over (tokens x D): forward one read; backward two reads and one write, the gradient that reads of the source have
gathered included. The products with Q queries run on the matrix units; a program owns a tile of tokens (forward) or a
tile of channels and a range of tokens (backward), so that df needs no atomics: one partial per range, then a sum.
A source may be S parallel streams of D / S channels, read besides as h_t = sum_s p_ts v_ts (see `ops.streams`): the
backward adds what that leaves, p_ts dh_t, from its two factors.
For bf16 sources each query is split into a high and a low part of bf16 beforehand, once: the matrix units take both
straight from memory.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import Launch, launches
from headwater.ops.triton.registration import writer
from headwater.ops.triton.tiles import ceil_div, half, power_of_2, processors, rows_of, split

# Tokens and channels of a tile, warps, stages, tiles summed by the matrix units; in bf16, and otherwise.
FORWARD, FORWARD_WIDE = (128, 64, 4, 3, 2), (64, 128, 4, 3, 1)
BACKWARD = (
    64,
    128,
    4,
    3,
    2,
)  # tokens and channels of a tile, warps, stages, programs a multiprocessor
STREAMS_BACKWARD, STREAMS_BACKWARD_WIDE = (
    (64, 64, 4, 3, 2),
    (32, 32, 4, 3, 2),
)  # with a read besides
LEAST_TOKENS = 32  # of a tile, down to which it shrinks for a GPU to have work everywhere
MAX_QUERIES = 64  # per launch; more queries read the source again


@triton.jit(do_not_specialize=["count"])
def _split(f, parts, count, B: tl.constexpr):
    """f = high + low: parts (2, count) of it, so many numbers."""
    o = tl.program_id(0) * B + tl.arange(0, B)
    m = o < count
    high, low = split(tl.load(f + o, mask=m, other=0.0), parts.dtype.element_ty)
    tl.store(parts + o, high, mask=m)
    tl.store(parts + count + o, low, mask=m)


@triton.jit(do_not_specialize=["M", "Q", "ZQ"])
def _score(
    v, f, z, rstd, M, D, Q, ZQ, eps,
    T: tl.constexpr, BD: tl.constexpr, RUN: tl.constexpr, QP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    # HALF: f is (2, ZQ, D), the high parts of all queries and then the low ones; this launch serves Q of them.
    o_t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    o_q = tl.arange(0, QP)
    m_t = o_t < M
    acc = tl.zeros([QP, T], tl.float32)
    squares = tl.zeros([T, BD // 8], tl.float32)
    for c in range(0, D, BD * RUN):
        # every RUN tiles the sum starts from zero: the matrix units truncate as they add, which shows after some
        # thousand channels
        part = tl.zeros([QP, T], tl.float32)
        for k in tl.static_range(RUN):
            o_d = c + k * BD + tl.arange(0, BD)
            m_d = o_d < D
            b_v = tl.load(
                v + o_t[:, None] * D + o_d[None, :], mask=m_t[:, None] & m_d[None, :], other=0.0
            )
            p_f = f + o_q[:, None] * D + o_d[None, :]
            m_f = (o_q < Q)[:, None] & m_d[None, :]
            b_f = tl.load(p_f, mask=m_f, other=0.0)
            if HALF:
                b_low = tl.load(p_f + ZQ * D, mask=m_f, other=0.0)
                part = tl.dot(b_f, tl.trans(b_v), part)
                part = tl.dot(b_low, tl.trans(b_v), part)
            b_v = b_v.to(tl.float32)
            if not HALF:
                part = tl.dot(b_f, tl.trans(b_v), part, input_precision="tf32x3")
            squares += tl.sum(
                tl.reshape(b_v * b_v, (T, BD // 8, 8)), 2
            )  # eight neighbours lie in one thread
        acc += part
    r = 1.0 / tl.sqrt(tl.sum(squares, 1) / D + eps)
    tl.store(rstd + o_t, r, mask=m_t)
    tl.store(
        z + o_t[None, :] * ZQ + o_q[:, None],
        acc * r[None, :],
        mask=m_t[None, :] & (o_q < Q)[:, None],
    )


@triton.jit(do_not_specialize=["M", "Q", "ZQ"])
def _prepare(
    z, dz, rstd, high, low, pull, M, D, Q, ZQ, T: tl.constexpr, QP: tl.constexpr, HALF: tl.constexpr
):
    """dz r as high + low, (M, QP), ready for the matrix units, and the pull towards each token's own direction."""
    o_t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    o_q = tl.arange(0, QP)
    m_t = o_t < M
    m = m_t[:, None] & (o_q < Q)[None, :]
    b_dz = tl.load(dz + o_t[:, None] * ZQ + o_q[None, :], mask=m, other=0.0)
    b_z = tl.load(z + o_t[:, None] * ZQ + o_q[None, :], mask=m, other=0.0)
    b_r = tl.load(rstd + o_t, mask=m_t, other=0.0)
    tl.store(pull + o_t, tl.sum(b_dz * b_z, 1) * b_r * b_r / D, mask=m_t)
    dzr = b_dz * b_r[:, None]
    b_high = dzr.to(high.dtype.element_ty)
    tl.store(high + o_t[:, None] * QP + o_q[None, :], b_high, mask=m_t[:, None])
    if HALF:
        b_low = (dzr - b_high.to(tl.float32)).to(low.dtype.element_ty)
        tl.store(low + o_t[:, None] * QP + o_q[None, :], b_low, mask=m_t[:, None])


@triton.jit(do_not_specialize=["M", "Q", "tokens"])
def _score_backward(
    v, f, high, low, pull, g_in, g_out, df, dh, p, M, W, Q, tokens,
    HAS_G: tl.constexpr, T: tl.constexpr, BD: tl.constexpr, QP: tl.constexpr, HALF: tl.constexpr,
    STREAMS: tl.constexpr, SHARED: tl.constexpr, HAS_H: tl.constexpr,
):  # fmt: skip
    # STREAMS: of W channels each, in a row; a tile has one. SHARED: so many rows are the streams of one read.
    D = W * STREAMS
    stream = tl.program_id(0) % STREAMS
    o_w = tl.program_id(0) // STREAMS * BD + tl.arange(0, BD)
    o_d = stream * W + o_w
    o_q = tl.arange(0, QP)
    m_d = o_w < W
    m_q = o_q < Q
    b_f = tl.load(f + o_q[:, None] * D + o_d[None, :], mask=m_q[:, None] & m_d[None, :], other=0.0)
    if HALF:
        b_f = b_f.to(v.dtype.element_ty)
    acc = tl.zeros([QP, BD], tl.float32)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)).to(
        tl.int64
    ) * tokens  # backwards: a gradient is just written
    for i in range(0, tokens, T):
        o_t = start + i + tl.arange(0, T)
        m_t = o_t < M
        m_td = m_t[:, None] & m_d[None, :]
        b_high = tl.load(high + o_t[:, None] * QP + o_q[None, :], mask=m_t[:, None], other=0.0)
        b_v = tl.load(v + o_t[:, None] * D + o_d[None, :], mask=m_td, other=0.0)
        g = -tl.load(pull + o_t, mask=m_t, other=0.0)[:, None] * b_v.to(tl.float32)
        if HAS_G:
            g += tl.load(g_in + o_t[:, None] * D + o_d[None, :], mask=m_td, other=0.0).to(
                tl.float32
            )
        if HAS_H:
            b_dh = tl.load(
                dh + (o_t // SHARED)[:, None] * W + o_w[None, :], mask=m_td, other=0.0
            ).to(tl.float32)
            g += tl.load(p + o_t * STREAMS + stream, mask=m_t, other=0.0)[:, None] * b_dh
        if HALF:
            b_low = tl.load(low + o_t[:, None] * QP + o_q[None, :], mask=m_t[:, None], other=0.0)
            g = tl.dot(b_high, b_f, g)
            g = tl.dot(b_low, b_f, g)
            acc = tl.dot(tl.trans(b_high), b_v, acc)
            acc = tl.dot(tl.trans(b_low), b_v, acc)
        else:
            b_v = b_v.to(tl.float32)
            b_high = b_high.to(tl.float32)
            g = tl.dot(b_high, b_f, g, input_precision="tf32x3")
            acc = tl.dot(tl.trans(b_high), b_v, acc, input_precision="tf32x3")
        tl.store(g_out + o_t[:, None] * D + o_d[None, :], g.to(g_out.dtype.element_ty), mask=m_td)
    p_df = df + (tl.program_id(1) * Q + o_q[:, None]).to(tl.int64) * D + o_d[None, :]
    tl.store(p_df, acc, mask=m_q[:, None] & m_d[None, :])


def _padded(count: int) -> int:
    return max(16, power_of_2(count))


# Kernels take tensors by address: where one begins is all that counts, and to cut nothing off costs the host nothing.
def _rows(tensor: Tensor, q: int) -> Tensor:
    return tensor[q:] if q else tensor


def _columns(tensor: Tensor, q: int) -> Tensor:
    return tensor[..., q:] if q else tensor


@functools.lru_cache(1024)
def _forward(rows: int, width: int, count: int, eps: float, halves: bool, device: torch.device):
    """The split of queries, where there is one, and the scores of every so many of them."""
    tile, channels, warps, stages, run = FORWARD if halves else FORWARD_WIDE
    while tile > LEAST_TOKENS and 2 * ceil_div(rows, tile) < processors(device):
        tile //= 2  # 8192 tokens in tiles of 128 would leave half of an H200 idle
    numbers, scores = count * width, []
    splits = (
        Launch(_split, (ceil_div(numbers, 1024),), (numbers,), {"B": 1024}, num_warps=4)
        if halves
        else None
    )
    for q in range(0, count, MAX_QUERIES):
        now = min(count - q, MAX_QUERIES)
        constants = {"T": tile, "BD": channels, "RUN": run, "QP": _padded(now), "HALF": halves}
        grid, options = (ceil_div(rows, tile),), {"num_warps": warps, "num_stages": stages}
        scores.append(
            (q, Launch(_score, grid, (rows, width, now, count, eps), constants, **options))
        )
    return splits, scores


def _scores(source, folded, eps):
    tokens = source.shape[:-1]
    return folded.new_empty(*tokens, len(folded)), folded.new_empty(tokens)


@writer(_scores)
def score(source: Tensor, folded: Tensor, eps: float, z: Tensor, rstd: Tensor) -> None:
    """`source` (..., D) and `folded` (Q, D) fp32 to logits `z` (..., Q) and 1/rms (...), both fp32."""
    launches["score"] += 1
    rows, width = rows_of(source)
    splits, launches_by_query = _forward(rows, width, len(folded), eps, half(source), source.device)
    if splits is not None:
        parts = torch.empty(2 * len(folded), width, dtype=source.dtype, device=source.device)
        splits(folded, parts)
        folded = parts
    for q, run in launches_by_query:
        run(source, _rows(folded, q), _columns(z, q), rstd)


@functools.lru_cache(1024)
def _backward(
    rows: int,
    width: int,
    count: int,
    given: bool,
    halves: bool,
    streams: int,
    shared: int,
    device: torch.device,
):
    """Ranges of tokens, and of every so many queries the first, how many, those padded, and what is launched. Where a
    row has `streams`, or several rows are streams of one (`shared`), their read's gradient is added."""
    of_streams = STREAMS_BACKWARD if halves else STREAMS_BACKWARD_WIDE
    tile, channels, warps, stages, waves = of_streams if shared else BACKWARD
    columns = streams * ceil_div(width // streams, channels)
    ranges = max(1, min(ceil_div(rows, tile), waves * processors(device) // columns))
    tokens = ceil_div(ceil_div(rows, ranges), tile) * tile
    ranges, launches_by_query = ceil_div(rows, tokens), []
    for q in range(0, count, MAX_QUERIES):
        now = min(count - q, MAX_QUERIES)
        both = {"QP": _padded(now), "HALF": halves}
        prepare = Launch(
            _prepare,
            (ceil_div(rows, 32),),
            (rows, width, now, count),
            {"T": 32} | both,
            num_warps=4,
        )
        read = {"STREAMS": streams, "SHARED": max(1, shared), "HAS_H": shared > 0 and q == 0}
        constants = {"HAS_G": given or q > 0, "T": tile, "BD": channels} | both | read
        options = {"num_warps": warps, "num_stages": stages}
        numbers = (rows, width // streams, now, tokens)
        spread = Launch(_score_backward, (columns, ranges), numbers, constants, **options)
        launches_by_query.append((q, now, _padded(now), prepare, spread))
    return ranges, launches_by_query


def launch_score_backward(source, folded, z, rstd, dz, gradient, out, df, read=None) -> None:
    """Writes gradient + dv to `out` (which may be `gradient` itself), and df. `read`: dh (..., D / S) and p (..., n) in
    fp32, of n streams read to one h, of which a row of the source has S."""
    launches["score_backward"] += 1
    (rows, width), count, halves = rows_of(source), len(folded), half(source)
    dh, p = (source, rstd) if read is None else read
    streams = width // dh.shape[-1]
    shared = 0 if read is None else p.shape[-1] // streams
    ranges, launches_by_query = _backward(
        rows, width, count, gradient is not None, halves, streams, shared, source.device
    )
    pull = rstd.new_empty(rows)
    for q, now, wide, prepare, spread in launches_by_query:
        high = torch.empty(
            rows, wide, dtype=source.dtype if halves else torch.float32, device=source.device
        )
        low = torch.empty_like(high) if halves else high
        prepare(_columns(z, q), _columns(dz, q), rstd, high, low, pull)
        parts = rstd.new_empty(ranges, now, width)
        earlier = gradient if q == 0 else out
        spread(
            source,
            _rows(folded, q),
            high,
            low,
            pull,
            source if earlier is None else earlier,
            out,
            parts,
            dh,
            p,
        )
        torch.sum(parts, 0, out=df if now == count else df[q : q + now])


def _gradients(source, folded, z, rstd, dz, gradient):
    return torch.empty_like(source), torch.empty_like(folded)


@writer(_gradients)
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
    """The gradients of the source, with what later reads gathered for it in `gradient`, and of `folded`."""
    launch_score_backward(source, folded, z, rstd, dz, gradient, out, df)


def _gradient_of_queries(source, folded, z, rstd, dz, gradient):
    return (torch.empty_like(folded),)


@writer(_gradient_of_queries, adds_to=("gradient",))
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
