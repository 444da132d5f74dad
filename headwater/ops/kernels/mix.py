# mypy: allow-untyped-defs
"""Phase 1: S queries mix N finished sources, given their scores; softmax over sources in fp32, one downcast.

    p_ns = softmax_n(z_ns);  out_s = sum_n p_ns v_n;  lse_s = log sum_n exp(z_ns)      v_n (tokens, D), z (tokens, N, S)
    u_ns = <dout_s, v_n>;   dz_ns = p_ns (u_ns - sum_m p_ms u_ms + dlse_s);   dv_n = sum_s p_ns dout_s
The first query's output may leave through the RMSNorm of the sublayer that opens the block.

Passes over (tokens x D): forward N reads, S writes; backward S + N reads and, into the gradient that later reads of the
same source have begun, N reads and N writes. Forward: a program holds S sums for one token, looping over sources.
Backward: one warp owns a token, so the S * N dot products stay inside it: lane sums, then one exchange per source.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import address_table, launches, row_pointer, rows_of, vectorised

MAX_QUERIES = 32  # per launch: S sums of a token must fit in registers


@triton.jit
def _softmax(z, p, lse, M, N, S, T: tl.constexpr, SP: tl.constexpr):
    o_t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    o_s = tl.arange(0, SP)
    m = (o_t < M)[:, None] & (o_s < S)[None, :]
    o = o_t[:, None] * N * S + o_s[None, :]
    top = tl.full([T, SP], float("-inf"), tl.float32)
    for n in range(N):
        top = tl.maximum(top, tl.load(z + o + n * S, mask=m, other=0.0))
    total = tl.zeros([T, SP], tl.float32)
    for n in range(N):
        total += tl.exp(tl.load(z + o + n * S, mask=m, other=0.0) - top)
    log = top + tl.log(total)
    tl.store(lse + o_s[None, :] * M + o_t[:, None], log, mask=m)
    for n in range(N):
        tl.store(p + o + n * S, tl.exp(tl.load(z + o + n * S, mask=m, other=0.0) - log), mask=m)


@triton.jit
def _mix(
    table, p, out, x, rstd, g, M, N, S, PS, D, eps,
    NORM: tl.constexpr, BD: tl.constexpr, SP: tl.constexpr, TILES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    # out (S, M, D); with NORM the first query goes to x (M, D) instead and out holds the other S - 1
    t = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, SP)
    m_s = o_s < S
    p_t = p + t * N * PS
    squares = tl.zeros([BD], tl.float32)
    first = tl.zeros([BD], tl.float32)
    for c in range(TILES):
        o_d = c * BD + tl.arange(0, BD)
        m_d = o_d < D
        acc = tl.zeros([SP, BD], tl.float32)
        for n in range(N):
            v = tl.load(row_pointer(table, n, t, D, out, VECTOR) + o_d, mask=m_d, other=0.0).to(tl.float32)
            w = tl.load(p_t + n * PS + o_s, mask=m_s, other=0.0)
            acc += w[:, None] * v[None, :]
        if NORM:
            o_out = ((o_s - 1)[:, None] * M + t) * D + o_d[None, :]
            m_out = (m_s & (o_s > 0))[:, None] & m_d[None, :]
            first = tl.sum(tl.where((o_s == 0)[:, None], acc, 0.0), 0)
            squares += first * first
        else:
            o_out = (o_s[:, None] * M + t) * D + o_d[None, :]
            m_out = m_s[:, None] & m_d[None, :]
        tl.store(out + o_out, acc.to(out.dtype.element_ty), mask=m_out)
    if NORM:
        r = 1.0 / tl.sqrt(tl.sum(squares, 0) / D + eps)
        tl.store(rstd + t, r)
        for c in range(TILES):
            o_d = c * BD + tl.arange(0, BD)
            m_d = o_d < D
            if TILES > 1:  # the row does not fit: sum it again from sources that are still in cache
                first = tl.zeros([BD], tl.float32)
                for n in range(N):
                    v = tl.load(row_pointer(table, n, t, D, out, VECTOR) + o_d, mask=m_d, other=0.0).to(tl.float32)
                    first += tl.load(p_t + n * PS) * v
            b_g = gain(tl.load(g + o_d, mask=m_d, other=1.0).to(tl.float32), x.dtype.element_ty)
            tl.store(x + t * D + o_d, (first * r * b_g).to(x.dtype.element_ty), mask=m_d)


@triton.jit
def gain(g, dtype: tl.constexpr):
    """The norm's weight, kept from zero: a product with 2^-96 is still a normal number, and vanishes beside any other.

    The backward rebuilds the norm's input from its output, so the norm must be invertible. fp16 has no room for this.
    """
    if dtype != tl.float16:
        tiny: tl.constexpr = 1.262177448e-29
        g = tl.where(g < 0, tl.minimum(g, -tiny), tl.maximum(g, tiny))
    return g


@triton.jit
def _mix_backward(
    table, p, dlse, dz, like, M, N, S, PS, D, s0,
    FRESH: tl.constexpr, HAS_LSE: tl.constexpr,
    BD: tl.constexpr, SP: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    # table: the addresses of N sources, N incoming gradients (with FRESH: none), N outgoing ones, and all PS douts.
    # dz (M, N, PS) receives u, and is finished in place once all N are known. This launch serves queries s0 to s0 + S.
    t = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, SP)
    m_s = o_s < S
    p_dout = tl.load(table + 3 * N + s0 + o_s, mask=m_s, other=0).to(tl.pointer_type(like.dtype.element_ty))[:, None]
    if VECTOR:
        p_dout = tl.multiple_of(p_dout, [16, 16])
    delta = tl.zeros([SP], tl.float32)
    for n in range(N):
        w = tl.load(p + (t * N + n) * PS + s0 + o_s, mask=m_s, other=0.0)
        p_v = row_pointer(table, n, t, D, like, VECTOR)
        p_in = row_pointer(table, N + n, t, D, like, VECTOR)
        p_out = row_pointer(table, 2 * N + n, t, D, like, VECTOR)
        acc = tl.zeros([SP, 32], tl.float32)
        for c in range(0, D, BD):
            o_d = c + tl.arange(0, BD)
            m_d = o_d < D
            b_do = tl.load(p_dout + t * D + o_d[None, :], mask=m_s[:, None] & m_d[None, :], other=0.0).to(tl.float32)
            b_v = tl.load(p_v + o_d, mask=m_d, other=0.0).to(tl.float32)
            acc += tl.sum(tl.reshape(b_do * b_v[None, :], (SP, 32, BD // 32)), 2)
            g = tl.sum(b_do * w[:, None], 0)
            if not FRESH:
                g += tl.load(p_in + o_d, mask=m_d, other=0.0).to(tl.float32)
            tl.store(p_out + o_d, g.to(like.dtype.element_ty), mask=m_d)
        u = tl.sum(acc, 1)
        delta += w * u
        tl.store(dz + (t * N + n) * PS + s0 + o_s, u, mask=m_s)
    if HAS_LSE:
        delta -= tl.load(dlse + (s0 + o_s) * M + t, mask=m_s, other=0.0)
    tl.debug_barrier()
    for n in range(N):
        o = (t * N + n) * PS + s0 + o_s
        w = tl.load(p + o, mask=m_s, other=0.0)
        tl.store(dz + o, w * (tl.load(dz + o, mask=m_s, other=0.0) - delta), mask=m_s)


def _chunks(count: int) -> list[tuple[int, int]]:
    return [(s, min(MAX_QUERIES, count - s)) for s in range(0, count, MAX_QUERIES)]


@torch.library.custom_op("headwater::mix", mutates_args=())
def mix(
    sources: Sequence[Tensor], z: Tensor, norm_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """N sources (..., D) and scores (..., N, S) to: the first output normed, its 1/rms, the outputs (S, ..., D),
    their log-sum-exp (S, ...) and the weights (..., N, S). With `norm_weight` the outputs lack the first; without, the
    normed one and its 1/rms are empty."""
    launches["mix"] += 1
    rows, width = rows_of(sources[0])
    count, queries = z.shape[-2:]
    x, rstd, out, lse, p = _mix_outputs(sources, z, norm_weight)
    narrow = triton.next_power_of_2(queries)
    _softmax[(triton.cdiv(rows, 32),)](z, p, lse, rows, count, queries, T=32, SP=narrow, num_warps=4)
    table = address_table(sources)
    for s, now in _chunks(queries):
        normed = norm_weight is not None and s == 0
        shift = s - (norm_weight is not None and s > 0)
        sums = triton.next_power_of_2(now)
        block = min(triton.next_power_of_2(width), max(16384 // sums, 128), 4096)
        _mix[(rows,)](
            table, p.view(-1)[s:], out[shift:] if len(out) else x, x, rstd, norm_weight if normed else p,
            rows, count, now, queries, width, eps,
            NORM=normed, BD=block, SP=sums, TILES=triton.cdiv(width, block), VECTOR=vectorised(width, *sources),
            num_warps=max(1, min(8, block * sums // 1024)),
        )  # fmt: skip
    return x, rstd, out, lse, p


def _mix_outputs(sources, z, norm_weight):
    first, shape = sources[0], sources[0].shape
    queries = z.shape[-1]
    normed = norm_weight is not None
    x = torch.empty(shape if normed else (0,), dtype=first.dtype, device=first.device)
    rstd = torch.empty(shape[:-1] if normed else (0,), dtype=torch.float32, device=first.device)
    out = torch.empty(queries - normed, *shape, dtype=first.dtype, device=first.device)
    lse = torch.empty(queries, *shape[:-1], dtype=torch.float32, device=first.device)
    return x, rstd, out, lse, torch.empty(z.shape, dtype=torch.float32, device=first.device)


@mix.register_fake
def _(sources, z, norm_weight, eps):
    return _mix_outputs(sources, z, norm_weight)


def launch_mix_backward(sources, p, douts, dlse, incoming, outgoing) -> Tensor:
    """Writes `outgoing` = `incoming` (may be the same tensors, or empty: none) + dv, and returns dz (..., N, S)."""
    launches["mix_backward"] += 1
    rows, width = rows_of(sources[0])
    count, queries = p.shape[-2:]
    dz = torch.empty_like(p)
    for s, now in _chunks(queries):
        given = incoming if s == 0 else outgoing
        table = address_table([*sources, *(given or outgoing), *outgoing, *douts])
        _mix_backward[(rows,)](
            table, p, p if dlse is None else dlse, dz, sources[0], rows, count, now, queries, width, s,
            FRESH=not given, HAS_LSE=dlse is not None, BD=max(32, min(256, triton.next_power_of_2(width))),
            SP=triton.next_power_of_2(now), VECTOR=vectorised(width, *sources, *outgoing, *douts, *incoming),
            num_warps=1,
        )  # fmt: skip
    return dz


@torch.library.custom_op("headwater::mix_backward", mutates_args=())
def mix_backward(
    sources: Sequence[Tensor],
    p: Tensor,
    douts: Sequence[Tensor],
    dlse: Tensor | None,
    gradients: Sequence[Tensor],
) -> list[Tensor]:
    """[dz, *dv]. `gradients`: what the sources have gathered from later reads; empty means none."""
    outgoing = [torch.empty_like(source) for source in sources]
    return [launch_mix_backward(sources, p, douts, dlse, gradients, outgoing), *outgoing]


@mix_backward.register_fake
def _(sources, p, douts, dlse, gradients):
    return [torch.empty_like(p), *(torch.empty_like(source) for source in sources)]


@torch.library.custom_op("headwater::mix_backward_", mutates_args=("gradients",))
def mix_backward_(
    sources: Sequence[Tensor], p: Tensor, douts: Sequence[Tensor], dlse: Tensor | None, gradients: Sequence[Tensor]
) -> Tensor:
    """As `mix_backward`, adding into `gradients` in place; returns dz."""
    return launch_mix_backward(sources, p, douts, dlse, gradients, gradients)


@mix_backward_.register_fake
def _(sources, p, douts, dlse, gradients):
    return torch.empty_like(p)
