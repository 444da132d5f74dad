# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Coefficients of mHC, forward and backward.

    pre = sigmoid(s_a a + bias_a);   post = 2 sigmoid(s_b b + bias_b);   res = Sinkhorn(exp(s_C C + bias_C))
    z = (a, b, C) has Q = n^2 + 2 n numbers per token

Numbers moved per token: 2 Q forward and 3 Q backward, besides the scratch of the iterations. A thread owns a token, all
of whose numbers are registers (`sinkhorn.kernel`). The gradients of bias and scale are sums over tokens: a program
leaves one number each, and these are added up in their order.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.sinkhorn.kernel import (
    TOKENS,
    balance,
    balance_backward,
    load_numbers,
    scratch,
    store_numbers,
    tokens,
)
from headwater.ops.sinkhorn.reference import FLOOR
from headwater.ops.triton.launch import Launch, launches
from headwater.ops.triton.registration import writer
from headwater.ops.triton.tiles import ceil_div

from .reference import streams_of

SUMMED = 1024  # programs at once, of those whose sums are added up


@triton.jit
def _logits(z, bias, scales, FIRST: tl.constexpr, COUNT: tl.constexpr, PART: tl.constexpr):
    """Logits of one part, whose numbers z begin at FIRST in a row."""
    b_s = tl.load(scales + PART).to(tl.float32)
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (b_s * z[k] + tl.load(bias + FIRST + k).to(tl.float32),)
    return found


@triton.jit
def _sigmoids(logits, times: tl.constexpr, N: tl.constexpr):
    numbers = ()
    for k in tl.static_range(N):
        numbers = numbers + (times * tl.sigmoid(logits[k]),)
    return numbers


@triton.jit
def _through_sigmoids(logits, gradient, times: tl.constexpr, N: tl.constexpr):
    numbers = ()
    for k in tl.static_range(N):
        b = tl.sigmoid(logits[k])
        numbers = numbers + (times * gradient[k] * b * (1.0 - b),)
    return numbers


@triton.jit(do_not_specialize=["M"])
def _gate_streams(
    z, bias, scales, pre, post, res, M,
    ITERATIONS: tl.constexpr, FLOOR: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    o_t, m = tokens(M, T)
    p_z = z + o_t * (2 * N + N * N)
    b_pre = _logits(load_numbers(p_z, m, N), bias, scales, 0, N, 0)
    b_post = _logits(load_numbers(p_z + N, m, N), bias, scales, N, N, 1)
    b_res = _logits(load_numbers(p_z + 2 * N, m, N * N), bias, scales, 2 * N, N * N, 2)
    store_numbers(pre + o_t * N, _sigmoids(b_pre, 1.0, N), m, N)
    store_numbers(post + o_t * N, _sigmoids(b_post, 2.0, N), m, N)
    store_numbers(res + o_t * (N * N), balance(b_res, o_t, m, M, ITERATIONS, FLOOR, N), m, N * N)


@triton.jit
def _through_logits(
    gradient, z, scales, p_dz, parts, m, FIRST: tl.constexpr, COUNT: tl.constexpr, PART: tl.constexpr, Q: tl.constexpr
):  # fmt: skip
    """Stores dz of one part, and this program's sums for bias and scales, (Q + 3, programs)."""
    b_s = tl.load(scales + PART).to(tl.float32)
    count = tl.num_programs(0)
    p_sum = parts + tl.program_id(0)
    along = gradient[0] * z[0]
    numbers = ()
    for k in tl.static_range(COUNT):
        tl.store(p_sum + (FIRST + k) * count, tl.sum(gradient[k], 0))
        numbers = numbers + (b_s * gradient[k],)
        if k > 0:
            along += gradient[k] * z[k]
    tl.store(p_sum + (Q + PART) * count, tl.sum(along, 0))
    store_numbers(p_dz + FIRST, numbers, m, COUNT)


@triton.jit(do_not_specialize=["M"])
def _gate_streams_backward(
    z, bias, scales, dpre, dpost, dres, dz, history, parts, M,
    ITERATIONS: tl.constexpr, FLOOR: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    # Tokens that there are not have gradients of zero, and add nothing to the sums.
    Q: tl.constexpr = 2 * N + N * N
    o_t, m = tokens(M, T)
    p_z = z + o_t * Q
    p_dz = dz + o_t * Q
    b_z = load_numbers(p_z, m, N)
    b_gradient = load_numbers(dpre + o_t * N, m, N)
    b_dx = _through_sigmoids(_logits(b_z, bias, scales, 0, N, 0), b_gradient, 1.0, N)
    _through_logits(b_dx, b_z, scales, p_dz, parts, m, 0, N, 0, Q)
    b_z = load_numbers(p_z + N, m, N)
    b_gradient = load_numbers(dpost + o_t * N, m, N)
    b_dx = _through_sigmoids(_logits(b_z, bias, scales, N, N, 1), b_gradient, 2.0, N)
    _through_logits(b_dx, b_z, scales, p_dz, parts, m, N, N, 1, Q)
    b_z = load_numbers(p_z + 2 * N, m, N * N)
    b_gradient = load_numbers(dres + o_t * (N * N), m, N * N)
    logits = _logits(b_z, bias, scales, 2 * N, N * N, 2)
    b_dx = balance_backward(logits, b_gradient, history, o_t, m, M, ITERATIONS, FLOOR, N)
    _through_logits(b_dx, b_z, scales, p_dz, parts, m, 2 * N, N * N, 2, Q)


@triton.jit(do_not_specialize=["count"])
def _gate_streams_sums(parts, dbias, dscale, count, Q: tl.constexpr, B: tl.constexpr):
    """One of the Q + 3 sums over programs."""
    k = tl.program_id(0)
    b = tl.zeros([B], tl.float32)
    for i in range(0, count, B):
        o = i + tl.arange(0, B)
        b += tl.load(parts + k * count + o, mask=o < count, other=0.0)
    total = tl.sum(b, 0)
    if k < Q:
        tl.store(dbias + k, total.to(dbias.dtype.element_ty))
    else:
        tl.store(dscale + k - Q, total.to(dscale.dtype.element_ty))


@functools.lru_cache(1024)
def _launches(rows: int, n: int, iterations: int) -> tuple[int, Launch, Launch, Launch]:
    """Return the number of programs, and the launches: forward, backward, the sum of what programs leave."""
    programs, q = ceil_div(rows, TOKENS), 2 * n + n * n
    constants = {"ITERATIONS": iterations, "FLOOR": FLOOR, "N": n, "T": TOKENS}
    forward = Launch(_gate_streams, (programs,), (rows,), constants, num_warps=1)
    backward = Launch(_gate_streams_backward, (programs,), (rows,), constants, num_warps=1)
    sums = Launch(_gate_streams_sums, (q + 3,), (programs,), {"Q": q, "B": SUMMED}, num_warps=4)
    return programs, forward, backward, sums


def _gating(
    z: Tensor, bias: Tensor, scale: Tensor, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    lead, n = z.shape[:-1], streams_of(bias)
    return z.new_empty(*lead, n), z.new_empty(*lead, n), z.new_empty(*lead, n, n)


@writer(_gating)
def gate_streams(
    z: Tensor, bias: Tensor, scale: Tensor, iterations: int, pre: Tensor, post: Tensor, res: Tensor
) -> None:
    """`z` (..., n^2 + 2 n) fp32 to `pre` (..., n), `post` (..., n) and `res` (..., n, n) fp32."""
    launches["gate_streams"] += 1
    _, forward, _, _ = _launches(z.numel() // len(bias), streams_of(bias), iterations)
    forward(z, bias, scale, pre, post, res)


def _gating_backward(
    z: Tensor,
    bias: Tensor,
    scale: Tensor,
    dpre: Tensor,
    dpost: Tensor,
    dres: Tensor,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(z), torch.empty_like(bias), torch.empty_like(scale)


@writer(_gating_backward)
def gate_streams_backward(
    z: Tensor,
    bias: Tensor,
    scale: Tensor,
    dpre: Tensor,
    dpost: Tensor,
    dres: Tensor,
    iterations: int,
    dz: Tensor,
    dbias: Tensor,
    dscale: Tensor,
) -> None:
    """The gradients of all that `gate_streams` takes."""
    launches["gate_streams_backward"] += 1
    rows, n = z.numel() // len(bias), streams_of(bias)
    programs, _, backward, sums = _launches(rows, n, iterations)
    parts = z.new_empty(len(bias) + 3, programs)
    backward(z, bias, scale, dpre, dpost, dres, dz, scratch(rows, iterations, n, z), parts)
    sums(parts, dbias, dscale)
