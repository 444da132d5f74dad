# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Coefficients of mHC, forward and backward.

    pre = sigmoid(s_a a + bias_a);   post = 2 sigmoid(s_b b + bias_b)
    res = Sinkhorn(exp(s_C C + bias_C));   z = (a, b, C) has Q = n^2 + 2 n numbers per token

Numbers moved per token: 2 Q forward and 3 Q backward, besides the scratch of the iterations. A
thread owns a token, all of whose numbers are registers (`sinkhorn.kernel`). The gradients of bias
and scale are sums over tokens: a program leaves one number each, and these are added up in their
order.
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
)
from headwater.ops.sinkhorn.reference import FLOOR
from headwater.ops.triton.launch import Launch, launches
from headwater.ops.triton.registration import writer
from headwater.ops.triton.tiles import ceil_div, program_tokens

from .reference import streams_of

SUMMED = 1024  # programs whose sums are added up at once


@triton.jit
def _logits(
    z,
    bias,
    scales,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    PART: tl.constexpr,
):
    """Compute the logits of one part, whose numbers z begin at FIRST in a row."""
    b_s = tl.load(scales + PART).to(tl.float32)
    logits = ()
    for k in tl.static_range(COUNT):
        b_bias = tl.load(bias + FIRST + k).to(tl.float32)
        logits = logits + (b_s * z[k] + b_bias,)
    return logits


@triton.jit
def _sigmoids(logits, times: tl.constexpr, N: tl.constexpr):
    numbers = ()
    for k in tl.static_range(N):
        numbers = numbers + (times * tl.sigmoid(logits[k]),)
    return numbers


@triton.jit
def _through_sigmoids(logits, gradient, times: tl.constexpr, N: tl.constexpr):
    """Return the gradient of the logits of `_sigmoids`."""
    numbers = ()
    for k in tl.static_range(N):
        b = tl.sigmoid(logits[k])
        numbers = numbers + (times * gradient[k] * b * (1.0 - b),)
    return numbers


@triton.jit(do_not_specialize=["M"])
def _gate_streams(
    z,  # (M, N N + 2 N)
    bias,  # (N N + 2 N,)
    scales,  # (3,)
    pre,  # (M, N)
    post,  # (M, N)
    res,  # (M, N, N)
    M,
    ITERATIONS: tl.constexpr,
    FLOOR: tl.constexpr,
    N: tl.constexpr,
    T: tl.constexpr,  # tokens of a program
):
    o_t, m = program_tokens(M, T)
    p_z = z + o_t * (2 * N + N * N)
    # A row of z has the numbers of pre, of post and of res.
    z_pre = load_numbers(p_z, m, N)
    z_post = load_numbers(p_z + N, m, N)
    z_res = load_numbers(p_z + 2 * N, m, N * N)
    b_pre = _logits(z_pre, bias, scales, 0, N, 0)
    b_post = _logits(z_post, bias, scales, N, N, 1)
    b_res = _logits(z_res, bias, scales, 2 * N, N * N, 2)
    store_numbers(pre + o_t * N, _sigmoids(b_pre, 1.0, N), m, N)
    store_numbers(post + o_t * N, _sigmoids(b_post, 2.0, N), m, N)
    matrix = balance(b_res, o_t, m, M, ITERATIONS, FLOOR, N)
    store_numbers(res + o_t * (N * N), matrix, m, N * N)


@triton.jit
def _through_logits(
    gradient,  # of the logits of this part
    z,
    scales,
    p_dz,
    parts,  # (Q + 3, programs)
    m,
    FIRST: tl.constexpr,  # place of the part in a row
    COUNT: tl.constexpr,  # numbers of the part
    PART: tl.constexpr,  # its scale
    Q: tl.constexpr,
):
    """Store dz of one part, and this program's sums for bias and scales, (Q + 3, programs)."""
    b_s = tl.load(scales + PART).to(tl.float32)
    count = tl.num_programs(0)
    p_sum = parts + tl.program_id(0)
    along = gradient[0] * z[0]
    numbers = ()
    for k in tl.static_range(COUNT):
        b_sum = tl.sum(gradient[k], 0)
        tl.store(p_sum + (FIRST + k) * count, b_sum)
        numbers = numbers + (b_s * gradient[k],)
        if k > 0:
            along += gradient[k] * z[k]
    tl.store(p_sum + (Q + PART) * count, tl.sum(along, 0))
    store_numbers(p_dz + FIRST, numbers, m, COUNT)


@triton.jit(do_not_specialize=["M"])
def _gate_streams_backward(
    z,  # (M, Q)
    bias,  # (Q,)
    scales,  # (3,)
    dpre,  # (M, N)
    dpost,  # (M, N)
    dres,  # (M, N, N)
    dz,  # (M, Q)
    history,  # scratch of the iterations
    parts,  # (Q + 3, programs)
    M,
    ITERATIONS: tl.constexpr,
    FLOOR: tl.constexpr,
    N: tl.constexpr,
    T: tl.constexpr,
):
    # The last program's spare tokens have gradients of zero, and add nothing to the sums.
    Q: tl.constexpr = 2 * N + N * N
    o_t, m = program_tokens(M, T)
    p_z = z + o_t * Q
    p_dz = dz + o_t * Q
    # pre
    b_z = load_numbers(p_z, m, N)
    b_gradient = load_numbers(dpre + o_t * N, m, N)
    logits = _logits(b_z, bias, scales, 0, N, 0)
    b_dx = _through_sigmoids(logits, b_gradient, 1.0, N)
    _through_logits(b_dx, b_z, scales, p_dz, parts, m, 0, N, 0, Q)
    # post
    b_z = load_numbers(p_z + N, m, N)
    b_gradient = load_numbers(dpost + o_t * N, m, N)
    logits = _logits(b_z, bias, scales, N, N, 1)
    b_dx = _through_sigmoids(logits, b_gradient, 2.0, N)
    _through_logits(b_dx, b_z, scales, p_dz, parts, m, N, N, 1, Q)
    # res
    b_z = load_numbers(p_z + 2 * N, m, N * N)
    b_gradient = load_numbers(dres + o_t * (N * N), m, N * N)
    logits_of_res = _logits(b_z, bias, scales, 2 * N, N * N, 2)
    b_dx_of_res = balance_backward(
        logits_of_res, b_gradient, history, o_t, m, M, ITERATIONS, FLOOR, N
    )
    _through_logits(b_dx_of_res, b_z, scales, p_dz, parts, m, 2 * N, N * N, 2, Q)


@triton.jit(do_not_specialize=["count"])
def _gate_streams_sums(parts, dbias, dscale, count, Q: tl.constexpr, B: tl.constexpr):
    """Compute one of the Q + 3 sums over programs."""
    k = tl.program_id(0)
    b = tl.zeros([B], tl.float32)
    for i in range(0, count, B):
        o = i + tl.arange(0, B)
        b += tl.load(parts + k * count + o, mask=o < count, other=0.0)
    total = tl.sum(b, 0)
    if k < Q:
        tl.store(dbias + k, total)
    else:
        tl.store(dscale + k - Q, total)


@functools.lru_cache(1024)
def _launches(
    rows: int,
    n: int,
    iterations: int,
) -> tuple[int, Launch, Launch, Launch]:
    """Return the number of programs, and launches: forward, backward, sums over programs."""
    programs = ceil_div(rows, TOKENS)
    q = 2 * n + n * n
    constants = {"ITERATIONS": iterations, "FLOOR": FLOOR, "N": n, "T": TOKENS}
    forward = Launch(_gate_streams, (programs,), (rows,), constants, num_warps=1)
    backward = Launch(_gate_streams_backward, (programs,), (rows,), constants, num_warps=1)
    of_sums = {"Q": q, "B": SUMMED}
    sums = Launch(_gate_streams_sums, (q + 3,), (programs,), of_sums, num_warps=4)
    return programs, forward, backward, sums


def _coefficients(z, bias, *_):
    tokens, n = z.shape[:-1], streams_of(bias)
    shapes = ((*tokens, n), (*tokens, n), (*tokens, n, n))
    return tuple(z.new_empty(shape) for shape in shapes)


@writer(_coefficients, writes=("pre", "post", "res"))
def gate_streams(
    z: Tensor,
    bias: Tensor,
    scale: Tensor,
    iterations: int,
    pre: Tensor,
    post: Tensor,
    res: Tensor,
) -> None:
    """Write coefficients of `z` (..., n^2 + 2 n), all in fp32.

    These are `pre` (..., n), `post` (..., n) and `res` (..., n, n).
    """
    launches["gate_streams"] += 1
    rows, n = z.numel() // len(bias), streams_of(bias)
    _, forward, _, _ = _launches(rows, n, iterations)
    forward(z, bias, scale, pre, post, res)


def _gradients(z, bias, scale, *_):
    return torch.empty_like(z), torch.empty_like(bias), torch.empty_like(scale)


@writer(_gradients, writes=("dz", "dbias", "dscale"))
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
    """Write the gradients of everything that `gate_streams` takes."""
    launches["gate_streams_backward"] += 1
    rows, n = z.numel() // len(bias), streams_of(bias)
    programs, _, backward, sums = _launches(rows, n, iterations)
    parts = z.new_empty(len(bias) + 3, programs)
    history = scratch(rows, iterations, n, z)
    backward(z, bias, scale, dpre, dpost, dres, dz, history, parts)
    sums(parts, dbias, dscale)
