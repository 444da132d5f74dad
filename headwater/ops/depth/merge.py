# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Phase 2 in one kernel: add the sublayer's output to the block's sum, merge it with phase 1's output, RMSNorm.

    P = partial + y;  r = 1 / rms(P);  z = r <f, P>;  b = sigmoid(z - lse);  h = (1 - b) out + b P;  x = h / rms(h) * g
    ds = b (dh.P - dh.h);  dP += b dh + ds r (f - (z r / D) P);  dout = (1 - b) dh;  dlse = -ds;  df = sum_t ds r P
with f = query * key_weight. The backward never sees `out`: h comes back as x rms(h) / g (see `gain` for weights of
zero), and dh.h = eps / rms(h)^2 <dx g, h / rms(h)>, since a normed vector does not feel its input's length. Where `out`
is kept, ds = b (1 - b) dh.(P - out): dh.P and dh.h are nearly the same where b is near one.

Passes over (tokens x D): forward 3 reads, 2 writes; backward 4 reads, 2 writes. df and dg: one partial per program,
then a sum; no atomics. Tokens go from the last to the first: matrix products go from the first to the last, so that
what the one before has just written, and what the next one will read first, is still in the GPU's cache.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import Launch, launches
from headwater.ops.triton.registration import writer
from headwater.ops.triton.tiles import INTERPRETED, add3, ceil_div, power_of_2, processors, shares

from .mix import gain

# Of the backward: channels a warp, programs a multiprocessor at width 2048, and rows under way in a program (at most).
PER_WARP, PER_PROCESSOR, STAGES = 512, 2, 3


@triton.jit
def _sum3(a, b, c, TOGETHER: tl.constexpr):
    """Three sums over one axis; together they cost one exchange between warps."""
    if TOGETHER:
        a, b, c = tl.reduce((a, b, c), 0, add3)
    else:
        a, b, c = tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)
    return a, b, c


@triton.jit
def _merge(
    y, partial, out, lse, query, key, g, total, x, stats, D, eps, norm_eps,
    OPENS: tl.constexpr, KEY: tl.constexpr, NORM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    # stats (3, M): 1 / rms(P), z, 1 / rms(h)
    M = tl.num_programs(0)
    t = (M - 1 - tl.program_id(0)).to(tl.int64)  # backwards, see above
    o_d = tl.arange(0, BD)
    m = o_d < D
    b_p = tl.load(y + t * D + o_d, mask=m, other=0.0).to(tl.float32)
    if not OPENS:
        b_p += tl.load(partial + t * D + o_d, mask=m, other=0.0).to(tl.float32)
        low = b_p.to(total.dtype.element_ty)
        tl.store(total + t * D + o_d, low, mask=m)
        b_p = low.to(tl.float32)
    b_o = tl.load(out + t * D + o_d, mask=m, other=0.0).to(tl.float32)
    b_f = tl.load(query + o_d, mask=m, other=0.0).to(tl.float32)
    if KEY:
        b_f *= tl.load(key + o_d, mask=m, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(b_p * b_p, 0) / D + eps)
    z = tl.sum(b_p * b_f, 0) * r
    a, b = shares(z - tl.load(lse + t))
    h = a * b_o + b * b_p
    tl.store(stats + t, r)
    tl.store(stats + M + t, z)
    if NORM:
        r = 1.0 / tl.sqrt(tl.sum(h * h, 0) / D + norm_eps)
        tl.store(stats + 2 * M + t, r)
        h = h * r * gain(tl.load(g + o_d, mask=m, other=1.0).to(tl.float32), x.dtype.element_ty)
    tl.store(x + t * D + o_d, h.to(x.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["M"])
def _merge_backward(
    dx, dtotal, x, total, out, lse, query, key, g, stats, rstd, dp, dout, dlse, parts, M, D, norm_eps,
    MERGE: tl.constexpr, GIVEN: tl.constexpr, OUT: tl.constexpr, KEY: tl.constexpr, NORM: tl.constexpr,
    BD: tl.constexpr, TOGETHER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # MERGE: off for the read that opens a block (h = out). GIVEN: the sum has a gradient from later.
    # OUT: h comes from out, not from x. rstd: 1 / rms(h) where there are no stats.
    pid = tl.program_id(0)
    o_d = tl.arange(0, BD)
    m = o_d < D
    b_f = tl.zeros([BD], tl.float32)
    b_g = tl.full([BD], 1.0, tl.float32)
    if MERGE:
        b_f = tl.load(query + o_d, mask=m, other=0.0).to(tl.float32)
        if KEY:
            b_f *= tl.load(key + o_d, mask=m, other=0.0).to(tl.float32)
    if NORM:
        b_g = gain(tl.load(g + o_d, mask=m, other=1.0).to(tl.float32), x.dtype.element_ty)
    undo = 1.0 / b_g
    df = tl.zeros([BD], tl.float32)
    dg = tl.zeros([BD], tl.float32)
    programs = tl.num_programs(0)
    for i in tl.range(tl.cdiv(M - pid, programs), num_stages=STAGES):
        t = (M - 1 - pid - i * programs).to(tl.int64)
        row = t * D + o_d
        b_dx = tl.load(dx + row, mask=m, other=0.0).to(tl.float32)
        b_p = tl.zeros([BD], tl.float32)
        a, b = 1.0, 0.0
        if MERGE:
            b_p = tl.load(total + row, mask=m, other=0.0).to(tl.float32)
            z = tl.load(stats + M + t)
            a, b = shares(z - tl.load(lse + t))
        if OUT:
            b_o = tl.load(out + row, mask=m, other=0.0).to(tl.float32)
            b_h = a * b_o + b * b_p
            b_q = b_p - b_o
        else:
            b_h = tl.load(x + row, mask=m, other=0.0).to(tl.float32)
            b_q = b_p
        if NORM:
            if MERGE:
                r = tl.load(stats + 2 * M + t)
            else:
                r = tl.load(rstd + t)
            if OUT:
                b_h *= r
            else:
                b_h *= undo  # both: the normed input, h r
            dg += b_dx * b_h
            b_dx *= b_g
            along, past, between = _sum3(b_dx * b_h, b_dx * b_q, b_h * b_q, TOGETHER)
            b_dx = (b_dx - b_h * (along / D)) * r
            past = (past - between * (along / D)) * r
            along *= norm_eps * r * r
        else:
            along, past, between = _sum3(b_dx * b_h, b_dx * b_q, b_h * b_q, TOGETHER)
        tl.store(dout + row, (a * b_dx).to(dout.dtype.element_ty), mask=m)
        if MERGE:
            if OUT:
                ds = a * b * past
            else:
                ds = b * (past - along)
            r = tl.load(stats + t)
            b_d = b * b_dx + ds * r * (b_f - b_p * (r * z / D))
            if GIVEN:
                b_d += tl.load(dtotal + row, mask=m, other=0.0).to(tl.float32)
            tl.store(dp + row, b_d.to(dp.dtype.element_ty), mask=m)
            df += ds * r * b_p
            along = -ds
        tl.store(dlse + t, along)
    if MERGE:
        tl.store(parts + (pid * 2) * D + o_d, df, mask=m)
    if NORM:
        tl.store(parts + (pid * 2 + 1) * D + o_d, dg, mask=m)


@triton.jit(do_not_specialize=["count"])
def _gather(
    parts, query, key, dquery, dkey, dg, count, D,
    MERGE: tl.constexpr, KEY: tl.constexpr, NORM: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    df = tl.zeros([BP, BD], tl.float32)
    gg = tl.zeros([BP, BD], tl.float32)
    for i in range(0, count, BP):
        o_p = i + tl.arange(0, BP)
        m = (o_p < count)[:, None] & m_d[None, :]
        if MERGE:
            df += tl.load(parts + (o_p[:, None] * 2) * D + o_d[None, :], mask=m, other=0.0)
        if NORM:
            gg += tl.load(parts + (o_p[:, None] * 2 + 1) * D + o_d[None, :], mask=m, other=0.0)
    if MERGE:
        b_df = tl.sum(df, 0)
        if KEY:
            b_q = tl.load(query + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_k = tl.load(key + o_d, mask=m_d, other=0.0).to(tl.float32)
            tl.store(dkey + o_d, (b_df * b_q).to(dkey.dtype.element_ty), mask=m_d)
            b_df *= b_k
        tl.store(dquery + o_d, b_df.to(dquery.dtype.element_ty), mask=m_d)
    if NORM:
        tl.store(dg + o_d, tl.sum(gg, 0).to(dg.dtype.element_ty), mask=m_d)


@functools.lru_cache(1024)
def _forward(
    shape: torch.Size, eps: float, norm_eps: float, opens: bool, key: bool, norm: bool
) -> Launch:
    """One program a token."""
    *tokens, width = shape
    wide = power_of_2(width)
    constants = {"OPENS": opens, "KEY": key, "NORM": norm, "BD": wide}
    warps = max(1, min(16, wide // 256))
    return Launch(_merge, (math.prod(tokens),), (width, eps, norm_eps), constants, num_warps=warps)


@functools.lru_cache(1024)
def _backward(
    shape: torch.Size,
    device: torch.device,
    eps: float,
    given: bool,
    out: bool,
    merge: bool,
    key: bool,
    norm: bool,
) -> tuple[int, Launch, Launch]:
    """The pass over tokens on a fixed number of programs, that number, and the sum of their partials."""
    *tokens, width = shape
    rows, wide = math.prod(tokens), power_of_2(width)
    programs = min(rows, max(1, PER_PROCESSOR * 2048 // wide) * processors(device))
    flags = {"MERGE": merge, "KEY": key, "NORM": norm}
    constants = {"GIVEN": given, "OUT": out} | flags | {"BD": wide, "TOGETHER": not INTERPRETED}
    options = {"num_warps": max(1, min(16, wide // PER_WARP)), "num_stages": STAGES}
    over_tokens = Launch(_merge_backward, (programs,), (rows, width, eps), constants, **options)
    of_sum = flags | {"BD": 16, "BP": 256}
    return (
        programs,
        over_tokens,
        Launch(_gather, (ceil_div(width, 16),), (programs, width), of_sum, num_warps=8),
    )


def _launch_backward(args, gather, norm_eps, *flags: bool) -> None:
    dx = args[0]
    programs, over_tokens, sum_up = _backward(dx.shape, dx.device, norm_eps, *flags)
    parts = torch.empty(programs, 2, dx.shape[-1], dtype=torch.float32, device=dx.device)
    over_tokens(*args, parts)
    sum_up(parts, *gather)


def _outputs(y, partial, out, lse, query, key_weight, norm_weight, eps, norm_eps):
    total = None if partial is None else torch.empty_like(y)
    return torch.empty_like(y), total, lse.new_empty(3, *lse.shape)


@writer(_outputs)
def merge(
    y: Tensor,
    partial: Tensor | None,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float,
    x: Tensor,
    total: Tensor | None,
    stats: Tensor,
) -> None:
    """The read, the block's new sum (none without `partial`: it is y itself), and per token 1/rms, logit, 1/rms(h)."""
    launches["merge"] += 1
    flags = (partial is None, key_weight is not None, norm_weight is not None)
    _forward(y.shape, eps, norm_eps, *flags)(
        y, y if partial is None else partial, out, lse, query, query if key_weight is None else key_weight,
        query if norm_weight is None else norm_weight, x if total is None else total, x, stats,
    )  # fmt: skip


def _gradients(dx, dtotal, x, total, out, lse, query, key_weight, norm_weight, stats, norm_eps):
    dkey = None if key_weight is None else torch.empty_like(key_weight)
    dg = None if norm_weight is None else torch.empty_like(norm_weight)
    return (
        torch.empty_like(dx),
        torch.empty_like(dx),
        torch.empty_like(lse),
        torch.empty_like(query),
        dkey,
        dg,
    )


@writer(_gradients)
def merge_backward(
    dx: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    total: Tensor,
    out: Tensor | None,
    lse: Tensor,
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    stats: Tensor,
    norm_eps: float,
    dp: Tensor,
    dout: Tensor,
    dlse: Tensor,
    dquery: Tensor,
    dkey: Tensor | None,
    dg: Tensor | None,
) -> None:
    """dP (the gradient of both y and partial), dout, dlse, and the gradients of query, key weight and norm weight."""
    launches["merge_backward"] += 1
    key = query if key_weight is None else key_weight
    args = (
        dx, dx if dtotal is None else dtotal, x, total, x if out is None else out, lse, query, key,
        query if norm_weight is None else norm_weight, stats, stats, dp, dout, dlse,
    )  # fmt: skip
    gather = (query, key, dquery, dquery if dkey is None else dkey, dquery if dg is None else dg)
    flags = (
        dtotal is not None,
        out is not None,
        True,
        key_weight is not None,
        norm_weight is not None,
    )
    _launch_backward(args, gather, norm_eps, *flags)


def _gradients_of_norm(dx, x, norm_weight, rstd, norm_eps, exact):
    dh = torch.empty_like(dx, dtype=torch.float32 if exact else dx.dtype)
    return dh, torch.empty_like(norm_weight), torch.empty_like(rstd)


@writer(_gradients_of_norm)
def norm_backward(
    dx: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    rstd: Tensor,
    norm_eps: float,
    exact: bool,
    dh: Tensor,
    dg: Tensor,
    along: Tensor,
) -> None:
    """From a folded RMSNorm's output: the gradients dh of its input and of its weight, and <dh, h> of each token.
    exact: dh in fp32."""
    launches["norm_backward"] += 1
    args = (dx, dx, x, x, x, rstd, dg, dg, norm_weight, rstd, rstd, dh, dh, along)
    _launch_backward(args, (dg, dg, dg, dg, dg), norm_eps, False, False, False, False, True)
