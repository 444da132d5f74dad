# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Phase 2 in one kernel: add y to the block's sum, merge it with phase 1's output, RMSNorm.

    P = partial + y;  r = 1 / rms(P);  z = r <f, P>;  b = sigmoid(z - lse)
    h = (1 - b) out + b P;  x = h / rms(h) * g;  f = query * key_weight

    ds = b (dh.P - dh.h);  dP += b dh + ds r (f - (z r / D) P)
    dout = (1 - b) dh;  dlse = -ds;  df = sum_t ds r P

y is the sublayer's output. The backward never sees `out`: h comes back as x rms(h) / g (see `gain`
for weights of zero), and dh.h = eps / rms(h)^2 <dx g, h / rms(h)>, since a normed vector does not
feel its input's length. If `out` is kept, ds = b (1 - b) dh.(P - out): dh.P and dh.h are nearly the
same if b is near one.

Passes over (tokens x D): forward 3 reads, 2 writes; backward 4 reads, 2 writes. df and dg: one
partial per program, then a sum; no atomics. Tokens go from the last to the first: matrix products
go from the first to the last, so that what the product before has just written, and what the next
will read first, is still in the GPU's cache.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import Launch, launches
from headwater.ops.triton.registration import writer
from headwater.ops.triton.tiles import (
    INTERPRETED,
    add3,
    ceil_div,
    load_wide,
    power_of_2,
    processors,
    shares,
    warps_for,
)

from .mix import gain

# Of the backward: channels per warp, programs per multiprocessor at width 2048, and rows under way
# in a program (at most).
PER_WARP = 512
PER_PROCESSOR = 2
STAGES = 3


@triton.jit
def _sum3(a, b, c, TOGETHER: tl.constexpr):
    """Sum three tensors over one axis; together they cost one exchange between warps."""
    if TOGETHER:
        a, b, c = tl.reduce((a, b, c), 0, add3)
    else:
        a = tl.sum(a, 0)
        b = tl.sum(b, 0)
        c = tl.sum(c, 0)
    return a, b, c


@triton.jit
def _fold(query, key, o_d, m, KEY: tl.constexpr):
    """Load f, the query times the key weight, in fp32."""
    f = load_wide(query + o_d, m)
    if KEY:
        f *= load_wide(key + o_d, m)
    return f


@triton.jit
def _merge(
    y,  # (M, D), the sublayer's output
    partial,  # (M, D), the block's sum before
    out,  # (M, D), phase 1's output
    lse,  # (M,)
    query,  # (D,)
    key,  # (D,)
    g,  # (D,), the norm's weight
    total,  # (M, D), the block's new sum
    x,  # (M, D), the read
    stats,  # (3, M): 1 / rms(P), z, 1 / rms(h)
    D,
    eps,
    norm_eps,
    OPENS: tl.constexpr,  # y is the block's sum
    KEY: tl.constexpr,
    NORM: tl.constexpr,
    BD: tl.constexpr,  # D as a power of two
):
    M = tl.num_programs(0)
    t = (M - 1 - tl.program_id(0)).to(tl.int64)  # backwards, see above
    o_d = tl.arange(0, BD)
    m = o_d < D
    row = t * D + o_d
    # P, rounded as it is stored: the backward reads the same numbers.
    b_p = load_wide(y + row, m)
    if not OPENS:
        b_p += load_wide(partial + row, m)
        low = b_p.to(total.dtype.element_ty)
        tl.store(total + row, low, mask=m)
        b_p = low.to(tl.float32)
    b_o = load_wide(out + row, m)
    b_f = _fold(query, key, o_d, m, KEY)
    r = 1.0 / tl.sqrt(tl.sum(b_p * b_p, 0) / D + eps)
    z = tl.sum(b_p * b_f, 0) * r
    a, b = shares(z - tl.load(lse + t))
    h = a * b_o + b * b_p
    tl.store(stats + t, r)
    tl.store(stats + M + t, z)
    if NORM:
        r = 1.0 / tl.sqrt(tl.sum(h * h, 0) / D + norm_eps)
        tl.store(stats + 2 * M + t, r)
        b_g = tl.load(g + o_d, mask=m, other=1.0).to(tl.float32)
        h = h * r * gain(b_g, x.dtype.element_ty)
    tl.store(x + row, h, mask=m)


@triton.jit(do_not_specialize=["M"])
def _merge_backward(
    dx,
    dtotal,  # (M, D), from later reads
    x,  # (M, D), the read
    total,  # (M, D), P
    out,
    lse,
    query,
    key,
    g,
    stats,  # (3, M), of `_merge`
    rstd,  # (M,), 1 / rms(h) if there are no stats
    dp,  # (M, D), of y and of partial
    dout,
    dlse,
    parts,  # (programs, 2, D): df and dg
    M,
    D,
    norm_eps,
    MERGE: tl.constexpr,  # off for the read that opens a block: h = out
    GIVEN: tl.constexpr,  # there is a dtotal
    OUT: tl.constexpr,  # h comes from out, not from x
    KEY: tl.constexpr,
    NORM: tl.constexpr,
    BD: tl.constexpr,
    TOGETHER: tl.constexpr,  # sums in one exchange
    STAGES: tl.constexpr,  # rows under way
):
    pid = tl.program_id(0)
    o_d = tl.arange(0, BD)
    m = o_d < D
    b_f = tl.zeros([BD], tl.float32)
    b_g = tl.full([BD], 1.0, tl.float32)
    if MERGE:
        b_f = _fold(query, key, o_d, m, KEY)
    if NORM:
        b_g = tl.load(g + o_d, mask=m, other=1.0).to(tl.float32)
        b_g = gain(b_g, x.dtype.element_ty)
    undo = 1.0 / b_g
    df = tl.zeros([BD], tl.float32)
    dg = tl.zeros([BD], tl.float32)
    programs = tl.num_programs(0)
    for i in tl.range(tl.cdiv(M - pid, programs), num_stages=STAGES):
        t = (M - 1 - pid - i * programs).to(tl.int64)
        row = t * D + o_d
        b_dx = load_wide(dx + row, m)
        # The two shares.
        b_p = tl.zeros([BD], tl.float32)
        a, b = 1.0, 0.0
        if MERGE:
            b_p = load_wide(total + row, m)
            z = tl.load(stats + M + t)
            a, b = shares(z - tl.load(lse + t))
        # h, and q, with which dh is multiplied for ds.
        if OUT:
            b_o = load_wide(out + row, m)
            b_h = a * b_o + b * b_p
            b_q = b_p - b_o
        else:
            b_h = load_wide(x + row, m)
            b_q = b_p
        # Back through the norm: b_dx becomes dh, along <dh, h>, past <dh, q>.
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
        tl.store(dout + row, a * b_dx, mask=m)
        # Back through the merge.
        if MERGE:
            if OUT:
                ds = a * b * past
            else:
                ds = b * (past - along)
            r = tl.load(stats + t)
            b_d = b * b_dx + ds * r * (b_f - b_p * (r * z / D))
            if GIVEN:
                b_d += load_wide(dtotal + row, m)
            tl.store(dp + row, b_d, mask=m)
            df += ds * r * b_p
            along = -ds
        tl.store(dlse + t, along)
    if MERGE:
        tl.store(parts + (pid * 2) * D + o_d, df, mask=m)
    if NORM:
        tl.store(parts + (pid * 2 + 1) * D + o_d, dg, mask=m)


@triton.jit(do_not_specialize=["count"])
def _gather(
    parts,  # (count, 2, D), of `_merge_backward`
    query,
    key,
    dquery,
    dkey,
    dg,
    count,  # programs that left a partial
    D,
    MERGE: tl.constexpr,
    KEY: tl.constexpr,
    NORM: tl.constexpr,
    BD: tl.constexpr,  # channels of a program
    BP: tl.constexpr,  # partials at once
):
    """Sum the partials of `count` programs, and take df apart into query and key weight."""
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    df = tl.zeros([BP, BD], tl.float32)
    gg = tl.zeros([BP, BD], tl.float32)
    for i in range(0, count, BP):
        o_p = i + tl.arange(0, BP)
        m = (o_p < count)[:, None] & m_d[None, :]
        if MERGE:
            row = o_p[:, None] * 2
            p_df = parts + row * D + o_d[None, :]
            df += tl.load(p_df, mask=m, other=0.0)
        if NORM:
            row = o_p[:, None] * 2 + 1
            p_dg = parts + row * D + o_d[None, :]
            gg += tl.load(p_dg, mask=m, other=0.0)
    if MERGE:
        b_df = tl.sum(df, 0)
        if KEY:
            b_q = load_wide(query + o_d, m_d)
            b_k = load_wide(key + o_d, m_d)
            tl.store(dkey + o_d, b_df * b_q, mask=m_d)
            b_df *= b_k
        tl.store(dquery + o_d, b_df, mask=m_d)
    if NORM:
        tl.store(dg + o_d, tl.sum(gg, 0), mask=m_d)


@functools.lru_cache(1024)
def _forward(
    shape: torch.Size,
    eps: float,
    norm_eps: float,
    opens: bool,
    key: bool,
    norm: bool,
) -> Launch:
    """Prepare one program per token."""
    *tokens, width = shape
    wide = power_of_2(width)
    constants = {"OPENS": opens, "KEY": key, "NORM": norm, "BD": wide}
    grid, numbers = (math.prod(tokens),), (width, eps, norm_eps)
    return Launch(_merge, grid, numbers, constants, num_warps=warps_for(wide, 256))


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
    """Prepare the pass over tokens and the sum of its partials.

    The first element is the number of programs, which depends on the GPU.
    """
    *tokens, width = shape
    rows, wide = math.prod(tokens), power_of_2(width)
    per_processor = max(1, PER_PROCESSOR * 2048 // wide)
    programs = min(rows, per_processor * processors(device))
    flags = {"MERGE": merge, "KEY": key, "NORM": norm}
    over_tokens = Launch(
        _merge_backward,
        (programs,),
        (rows, width, eps),
        {"GIVEN": given, "OUT": out, **flags, "BD": wide, "TOGETHER": not INTERPRETED},
        num_warps=warps_for(wide, PER_WARP),
        num_stages=STAGES,
    )
    sum_up = Launch(
        _gather,
        (ceil_div(width, 16),),
        (programs, width),
        {**flags, "BD": 16, "BP": 256},
        num_warps=8,
    )
    return programs, over_tokens, sum_up


def _launch_backward(tensors, of_sum, norm_eps, *flags: bool) -> None:
    """Launch the pass over tokens on `tensors`, the first of them dx, and the sum on `of_sum`."""
    dx = tensors[0]
    programs, over_tokens, sum_up = _backward(dx.shape, dx.device, norm_eps, *flags)
    width = dx.shape[-1]
    parts = torch.empty(programs, 2, width, dtype=torch.float32, device=dx.device)
    over_tokens(*tensors, parts)
    sum_up(parts, *of_sum)


def _outputs(y, partial, out, lse, *_):
    total = None if partial is None else torch.empty_like(y)
    return torch.empty_like(y), total, lse.new_empty(3, *lse.shape)


@writer(_outputs, writes=("x", "total", "stats"))
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
    """Write the read, the block's new sum, and per token 1/rms, logit, 1/rms(h).

    Without `partial` there is no new sum: it is y itself.
    """
    launches["merge"] += 1
    flags = (partial is None, key_weight is not None, norm_weight is not None)
    run = _forward(y.shape, eps, norm_eps, *flags)
    # A kernel takes a pointer for every argument; others stand in for absent tensors.
    run(
        y,
        y if partial is None else partial,
        out,
        lse,
        query,
        query if key_weight is None else key_weight,
        query if norm_weight is None else norm_weight,
        x if total is None else total,
        x,
        stats,
    )


def _gradients(
    dx,
    dtotal,
    x,
    total,
    out,
    lse,
    query,
    key_weight,
    norm_weight,
    *_,
):
    return (
        torch.empty_like(dx),
        torch.empty_like(dx),
        torch.empty_like(lse),
        torch.empty_like(query),
        None if key_weight is None else torch.empty_like(key_weight),
        None if norm_weight is None else torch.empty_like(norm_weight),
    )


@writer(_gradients, writes=("dp", "dout", "dlse", "dquery", "dkey", "dg"))
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
    """Write dP, which is the gradient of both y and partial, and all others but dtotal's."""
    launches["merge_backward"] += 1
    key = query if key_weight is None else key_weight
    norm = query if norm_weight is None else norm_weight
    tensors = (
        dx,
        dx if dtotal is None else dtotal,
        x,
        total,
        x if out is None else out,
        lse,
        query,
        key,
        norm,
        stats,
        stats,
        dp,
        dout,
        dlse,
    )
    of_sum = (
        query,
        key,
        dquery,
        dquery if dkey is None else dkey,
        dquery if dg is None else dg,
    )
    flags = (
        dtotal is not None,
        out is not None,
        True,
        key_weight is not None,
        norm_weight is not None,
    )
    _launch_backward(tensors, of_sum, norm_eps, *flags)


def _gradients_of_norm(dx, x, norm_weight, rstd, norm_eps, exact):
    dh = torch.empty_like(dx, dtype=torch.float32 if exact else dx.dtype)
    return dh, torch.empty_like(norm_weight), torch.empty_like(rstd)


@writer(_gradients_of_norm, writes=("dh", "dg", "along"))
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
    """Write, from a folded RMSNorm's output, dh of its input, dg, and <dh, h> of each token.

    exact: dh in fp32.
    """
    launches["norm_backward"] += 1
    # Without a merge most arguments are not read: any tensor stands in.
    of_merge = (dx, x, x, x, rstd, dg, dg)
    tensors = (dx, *of_merge, norm_weight, rstd, rstd, dh, dh, along)
    flags = (False, False, False, False, True)
    _launch_backward(tensors, (dg,) * 5, norm_eps, *flags)
