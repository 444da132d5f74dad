# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Sinkhorn's iteration on matrices of more rows than `registers` takes, forward and backward: see `operators`. A
program has those of a few tokens, spread over its threads. The backward runs the forward once more, which writes every
c and r to a scratch of 2 I n numbers a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import launch, launches
from headwater.ops.triton.tiles import ceil_div, power_of_2

from .reference import FLOOR

TOKENS = 32  # a program
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _exponentials(logits, o_t, T, n, FLOOR: tl.constexpr, N: tl.constexpr):
    """K, zero outside, with the offsets and the mask of its elements."""
    o_n = tl.arange(0, N)
    offset = o_t[:, None, None] * n * n + o_n[None, :, None] * n + o_n[None, None, :]
    m = (o_t < T)[:, None, None] & (o_n < n)[None, :, None] & (o_n < n)[None, None, :]
    b_x = tl.load(logits + offset, mask=m, other=LOWEST)
    b_k = tl.maximum(tl.exp(b_x - tl.max(b_x, 1)[:, None, :]), FLOOR)
    return tl.where(m, b_k, 0.0), offset, m


@triton.jit(do_not_specialize=["T"])
def _forward(
    logits, out, history, T, n,
    ITERATIONS: tl.constexpr, KEEP: tl.constexpr, FLOOR: tl.constexpr, N: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    b_k, offset, m = _exponentials(logits, o_t, T, n, FLOOR, N)
    o_v = o_t[:, None] * (2 * ITERATIONS * n) + tl.arange(0, N)[None, :]
    m_v = (o_t < T)[:, None] & (tl.arange(0, N) < n)[None, :]
    b_r = tl.sum(b_k, 2) * 0.0 + 1.0
    b_c = tl.sum(b_k, 1) * 0.0
    for t in range(ITERATIONS):
        b_c = 1.0 / tl.maximum(tl.sum(b_k * b_r[:, :, None], 1), 1e-37)  # padding has sums of zero
        b_r = 1.0 / tl.maximum(tl.sum(b_k * b_c[:, None, :], 2), 1e-37)
        if KEEP:
            tl.store(history + o_v + 2 * t * n, b_c, mask=m_v)
            tl.store(history + o_v + (2 * t + 1) * n, b_r, mask=m_v)
    if not KEEP:
        tl.store(out + offset, b_r[:, :, None] * b_k * b_c[:, None, :], mask=m)


@triton.jit(do_not_specialize=["T"])
def _backward(
    logits, gradient, history, out, T, n,
    ITERATIONS: tl.constexpr, FLOOR: tl.constexpr, N: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    b_k, offset, m = _exponentials(logits, o_t, T, n, FLOOR, N)
    o_v = o_t[:, None] * (2 * ITERATIONS * n) + tl.arange(0, N)[None, :]
    m_v = (o_t < T)[:, None] & (tl.arange(0, N) < n)[None, :]
    b_c = tl.load(history + o_v + (2 * ITERATIONS - 2) * n, mask=m_v, other=0.0)
    b_r = tl.load(history + o_v + (2 * ITERATIONS - 1) * n, mask=m_v, other=0.0)
    b_g = tl.load(gradient + offset, mask=m, other=0.0)
    b_g -= (tl.sum(b_g * b_k * b_c[:, None, :], 2) * b_r)[
        :, :, None
    ]  # see `centred` of the reference
    b_dk = b_r[:, :, None] * b_g * b_c[:, None, :]
    b_dr = tl.sum(b_g * b_k * b_c[:, None, :], 2)
    b_dc = tl.sum(b_g * b_k * b_r[:, :, None], 1)
    for back in range(ITERATIONS):
        t = ITERATIONS - 1 - back
        b_c = tl.load(history + o_v + 2 * t * n, mask=m_v, other=0.0)
        b_r = tl.load(history + o_v + (2 * t + 1) * n, mask=m_v, other=0.0)
        b_before = tl.load(
            history + o_v + (2 * t - 1) * n, mask=m_v & (t > 0), other=1.0
        )  # r starts at one
        b_da = -b_dr * b_r * b_r
        b_dc += tl.sum(b_k * b_da[:, :, None], 1)
        b_db = -b_dc * b_c * b_c
        b_dk += b_da[:, :, None] * b_c[:, None, :] + b_before[:, :, None] * b_db[:, None, :]
        b_dr = tl.sum(b_k * b_db[:, None, :], 2)
        b_dc = b_dc * 0.0
    tl.store(out + offset, tl.where(b_k > FLOOR, b_dk * b_k, 0.0), mask=m)


def forward(logits: Tensor, iterations: int) -> Tensor:
    launches["sinkhorn"] += 1
    out = torch.empty_like(logits)
    _launch_forward(logits, out, out, iterations, keep=False)
    return out


def backward(logits: Tensor, gradient: Tensor, iterations: int) -> Tensor:
    launches["sinkhorn_backward"] += 1
    rows, n = logits.numel() // logits.shape[-1] ** 2, logits.shape[-1]
    history = torch.empty(rows, 2 * iterations, n, dtype=torch.float32, device=logits.device)
    _launch_forward(logits, logits, history, iterations, keep=True)
    out = torch.empty_like(logits)
    constants = {"ITERATIONS": iterations, "FLOOR": FLOOR, "N": power_of_2(n), "BT": TOKENS}
    args = (logits, gradient, history, out)
    launch(_backward, (ceil_div(rows, TOKENS),), args, (rows, n), constants, num_warps=1)
    return out


def _launch_forward(
    logits: Tensor, out: Tensor, history: Tensor, iterations: int, *, keep: bool
) -> None:
    rows, n = logits.numel() // logits.shape[-1] ** 2, logits.shape[-1]
    constants = {
        "ITERATIONS": iterations,
        "KEEP": keep,
        "FLOOR": FLOOR,
        "N": power_of_2(n),
        "BT": TOKENS,
    }
    launch(
        _forward,
        (ceil_div(rows, TOKENS),),
        (logits, out, history),
        (rows, n),
        constants,
        num_warps=1,
    )
