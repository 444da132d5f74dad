# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Phase 1 of Block Attention Residuals for a few rows, in one launch.

    z_n = <f_s, v_n> / rms(v_n);   out_s = sum_n softmax_n(z) v_n;   lse_s = log sum_n exp z_n

v_n are the N sources (B, D), f_s the S queries. Bytes: every query reads the sources, which are in
the GPU's cache by then, so that the time of one program counts and not how often they are read.

A program takes one row and one query, and some sources at once. If there are many programs, each
takes one source after the other: a multiprocessor then holds ten programs rather than one, and has
room for what runs beside. With 64 rows nothing of this launch shows in a step; with 16 rows, one
source after the other took 11 us a step more than two at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import launch, launches
from headwater.ops.triton.tiles import load_wide, power_of_2, processors, rows_of, warps_for

TOGETHER = 16384  # numbers of sources that a program holds at once
FEW = 16  # sources: with several rows two at once are fastest, by 3 us a step with 16 rows
MANY = 1  # programs per multiprocessor, beyond which each takes one source after the other


@triton.jit(do_not_specialize=["N", "B", "s_l"])
def _open(
    sources,  # (N, B, D)
    folded,  # (S, D)
    outs,  # (S, B, D)
    lses,  # (S, B), rows s_l apart
    N,
    B,
    s_l,
    D,
    eps,
    BN: tl.constexpr,  # sources at once
    BD: tl.constexpr,  # D as a power of two
):
    b, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_n, o_d = tl.arange(0, BN), tl.arange(0, BD)
    m_d = o_d < D
    b_f = load_wide(folded + s * D + o_d, m_d)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BD], tl.float32)
    # BN sources at once, with a running maximum of their logits.
    for n in range(0, N, BN):
        m_n = n + o_n < N
        row = (n + o_n)[:, None] * B + b
        p_v = sources + row * D + o_d[None, :]
        b_v = load_wide(p_v, m_n[:, None] & m_d[None, :])
        along = tl.sum(b_v * b_f[None, :], 1)
        z = along / tl.sqrt(tl.sum(b_v * b_v, 1) / D + eps)
        z = tl.where(m_n, z, float("-inf"))
        new = tl.maximum(top, tl.max(z, 0))
        keep = tl.exp(top - new)
        w = tl.exp(z - new)
        total = total * keep + tl.sum(w, 0)
        acc = acc * keep + tl.sum(w[:, None] * b_v, 0)
        top = new
    b_out = acc / total
    tl.store(outs + (s * B + b) * D + o_d, b_out, mask=m_d)
    tl.store(lses + s * s_l + b, top + tl.log(total))


def open_span(
    sources: Tensor,
    folded: Tensor,
    eps: float,
    outs: Tensor,
    lses: Tensor,
) -> None:
    """Write outs (S, B, D) and lses (S, B), whose rows may be strided."""
    launches["open_span"] += 1
    count, queries = len(sources), len(folded)
    rows, width = rows_of(sources[0])
    wide = power_of_2(width)
    many = rows * queries > MANY * processors(sources.device)
    together = 1
    if not many:
        limit = TOGETHER // wide if rows == 1 or count > FEW else 2
        together = max(1, min(power_of_2(count), limit))
    warps = warps_for(together * wide, 512 if many else 1024)
    constants = {"BN": together, "BD": wide}
    tensors = (sources, folded, outs, lses)
    numbers = (count, rows, lses.stride(0), width, eps)
    launch(_open, (rows, queries), tensors, numbers, constants, num_warps=warps)
