# mypy: allow-untyped-defs
"""Scores of one source for Q queries: the logits that all later reads of it need, from one pass over it.

    r_t = 1 / sqrt(mean_d(v_td^2) + eps);   z_tq = r_t <f_q, v_t>;   f = query * key_weight, (Q, D) in fp32
    dv_t = r_t sum_q dz_tq f_q - (r_t^2 / D) (sum_q dz_tq z_tq) v_t;   df_q = sum_t dz_tq r_t v_t

Passes over (tokens x D): forward one read; backward two reads and one write, the gradient that reads of the source have
gathered included. The products with Q queries run on the matrix units; a program owns a tile of tokens (forward) or a
tile of channels and a range of tokens (backward), so that df needs no atomics: one partial per range, then a sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import exact_dot, half, launches, processors, rows_of, split

MAX_QUERIES = 64  # per launch; more queries read the source again


@triton.jit
def _score(v, f, z, rstd, M, D, Q, ZQ, eps, T: tl.constexpr, BD: tl.constexpr, QP: tl.constexpr, HALF: tl.constexpr):
    o_t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    o_q = tl.arange(0, QP)
    m_t = o_t < M
    acc = tl.zeros([QP, T], tl.float32)
    squares = tl.zeros([T, BD], tl.float32)
    for c in range(0, D, BD):
        o_d = c + tl.arange(0, BD)
        m_d = o_d < D
        b_v = tl.load(v + o_t[:, None] * D + o_d[None, :], mask=m_t[:, None] & m_d[None, :], other=0.0)
        b_f = tl.load(f + o_q[:, None] * D + o_d[None, :], mask=(o_q < Q)[:, None] & m_d[None, :], other=0.0)
        acc = exact_dot(b_f, tl.trans(b_v), acc, HALF)
        b_v = b_v.to(tl.float32)
        squares += b_v * b_v
    r = 1.0 / tl.sqrt(tl.sum(squares, 1) / D + eps)
    tl.store(rstd + o_t, r, mask=m_t)
    tl.store(z + o_t[None, :] * ZQ + o_q[:, None], acc * r[None, :], mask=m_t[None, :] & (o_q < Q)[:, None])


@triton.jit
def _score_backward(
    v, f, z, rstd, dz, g_in, g_out, df, M, D, Q, ZQ, tokens,
    HAS_G: tl.constexpr, T: tl.constexpr, BD: tl.constexpr, QP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    o_q = tl.arange(0, QP)
    m_d = o_d < D
    m_q = o_q < Q
    b_f = tl.load(f + o_q[:, None] * D + o_d[None, :], mask=m_q[:, None] & m_d[None, :], other=0.0)
    acc = tl.zeros([QP, BD], tl.float32)
    start = tl.program_id(1).to(tl.int64) * tokens
    for i in range(0, tokens, T):
        o_t = start + i + tl.arange(0, T)
        m_t = o_t < M
        m_tq = m_t[:, None] & m_q[None, :]
        m_td = m_t[:, None] & m_d[None, :]
        b_dz = tl.load(dz + o_t[:, None] * ZQ + o_q[None, :], mask=m_tq, other=0.0)
        b_z = tl.load(z + o_t[:, None] * ZQ + o_q[None, :], mask=m_tq, other=0.0)
        b_r = tl.load(rstd + o_t, mask=m_t, other=0.0)
        b_v = tl.load(v + o_t[:, None] * D + o_d[None, :], mask=m_td, other=0.0)
        dzr = b_dz * b_r[:, None]
        pull = tl.sum(b_dz * b_z, 1) * b_r * b_r / D
        g = -pull[:, None] * b_v.to(tl.float32)
        if HAS_G:
            g += tl.load(g_in + o_t[:, None] * D + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
        if HALF:
            f_high, f_low = split(b_f, b_v.dtype)
            g = exact_dot(dzr, f_high, g, True)
            g = tl.dot(dzr.to(b_v.dtype), f_low, g)
        else:
            g = exact_dot(dzr, b_f, g, False)
        acc = exact_dot(tl.trans(dzr), b_v, acc, HALF)
        tl.store(g_out + o_t[:, None] * D + o_d[None, :], g.to(g_out.dtype.element_ty), mask=m_td)
    p_df = df + (tl.program_id(1) * Q + o_q[:, None]).to(tl.int64) * D + o_d[None, :]
    tl.store(p_df, acc, mask=m_q[:, None] & m_d[None, :])


def _padded(count: int) -> int:
    return 16 if count <= 16 else 64


@torch.library.custom_op("headwater::score", mutates_args=())
def score(source: Tensor, folded: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`source` (..., D) and `folded` (Q, D) fp32 to logits (..., Q) and 1/rms (...), both fp32."""
    launches["score"] += 1
    rows, width = rows_of(source)
    count = len(folded)
    z = torch.empty(*source.shape[:-1], count, dtype=torch.float32, device=source.device)
    rstd = torch.empty(source.shape[:-1], dtype=torch.float32, device=source.device)
    for q in range(0, count, MAX_QUERIES):
        now = min(count - q, MAX_QUERIES)
        tile = 32
        _score[(triton.cdiv(rows, tile),)](
            source, folded[q:], z.view(rows, count)[:, q:], rstd, rows, width, now, count, eps,
            T=tile, BD=128, QP=_padded(now), HALF=half(source), num_warps=4, num_stages=3,
        )  # fmt: skip
    return z, rstd


@score.register_fake
def _(source, folded, eps):
    like = {"dtype": torch.float32, "device": source.device}
    return torch.empty(*source.shape[:-1], len(folded), **like), torch.empty(source.shape[:-1], **like)


def launch_score_backward(source, folded, z, rstd, dz, gradient, out) -> Tensor:
    """Writes gradient + dv to `out` (which may be `gradient` itself) and returns df."""
    launches["score_backward"] += 1
    rows, width = rows_of(source)
    count = len(folded)
    tile, channels = 32, 128
    columns = triton.cdiv(width, channels)
    ranges = max(1, min(triton.cdiv(rows, tile), 4 * processors(source.device) // columns))
    tokens = triton.cdiv(triton.cdiv(rows, ranges), tile) * tile
    ranges = triton.cdiv(rows, tokens)
    df = torch.empty(count, width, dtype=torch.float32, device=source.device)
    for q in range(0, count, MAX_QUERIES):
        now = min(count - q, MAX_QUERIES)
        parts = torch.empty(ranges, now, width, dtype=torch.float32, device=source.device)
        given = gradient if q == 0 else out
        _score_backward[(columns, ranges)](
            source, folded[q:], z.view(rows, count)[:, q:], rstd, dz.view(rows, count)[:, q:],
            source if given is None else given, out, parts, rows, width, now, count, tokens,
            HAS_G=given is not None, T=tile, BD=channels, QP=_padded(now), HALF=half(source), num_warps=4, num_stages=2,
        )  # fmt: skip
        torch.sum(parts, 0, out=df[q : q + now])
    return df


@torch.library.custom_op("headwater::score_backward", mutates_args=())
def score_backward(
    source: Tensor, folded: Tensor, z: Tensor, rstd: Tensor, dz: Tensor, gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(source)
    return out, launch_score_backward(source, folded, z, rstd, dz, gradient, out)


@score_backward.register_fake
def _(source, folded, z, rstd, dz, gradient):
    return torch.empty_like(source), torch.empty_like(folded)


@torch.library.custom_op("headwater::score_backward_", mutates_args=("gradient",))
def score_backward_(source: Tensor, folded: Tensor, z: Tensor, rstd: Tensor, dz: Tensor, gradient: Tensor) -> Tensor:
    """As `score_backward`, adding into `gradient` in place."""
    return launch_score_backward(source, folded, z, rstd, dz, gradient, gradient)


@score_backward_.register_fake
def _(source, folded, z, rstd, dz, gradient):
    return torch.empty_like(folded)
