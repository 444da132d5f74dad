# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Sinkhorn's iteration on matrices of up to four rows, forward and backward.

    K = exp(logits), each column less its largest logit;   r = 1
    repeat:   c = 1 / (K^T r);   r = 1 / (K c)
    output  = diag(r) K diag(c)                                              (tokens, n, n)

Numbers moved per token: 2 n n forward, 3 n n backward and a scratch of 2 (I - 1) n. A thread owns a
token, whose matrix is a tuple of n n tiles (tokens,), row by row: sums of rows and columns add
registers, and no thread waits for another. Eight rows would fit too, without spills, but take a
compiler half a minute.

The backward iterates once more and keeps every r but the last, in a scratch (I - 1, n, tokens) of
which a warp stores whole lines. It makes each c again from the r before. Registers would hold them
only with all iterations unrolled.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import launch, launches
from headwater.ops.triton.tiles import ceil_div, program_tokens

from .reference import FLOOR

TOKENS = 32  # a program, which is one warp


@triton.jit
def load_numbers(p, m, COUNT: tl.constexpr):
    """Load COUNT neighbouring numbers of each token, a tile (T,) each."""
    numbers = ()
    # Four at once are one load of 16 bytes.
    if COUNT % 4 == 0:
        for k in tl.static_range(0, COUNT, 4):
            o_four = k + tl.arange(0, 4)
            p_four = p[:, None] + o_four[None, :]
            b = tl.load(p_four, mask=m[:, None], other=0.0)
            pairs = tl.reshape(b, (b.shape[0], 2, 2))
            even, odd = tl.split(pairs)
            b_0, b_2 = tl.split(even)
            b_1, b_3 = tl.split(odd)
            numbers = numbers + (b_0, b_1, b_2, b_3)
    else:
        for k in tl.static_range(COUNT):
            numbers = numbers + (tl.load(p + k, mask=m, other=0.0),)
    return numbers


@triton.jit
def store_numbers(p, numbers, m, COUNT: tl.constexpr):
    """Store what `load_numbers` loads."""
    if COUNT % 4 == 0:
        for k in tl.static_range(0, COUNT, 4):
            even = tl.join(numbers[k], numbers[k + 2])
            odd = tl.join(numbers[k + 1], numbers[k + 3])
            pairs = tl.join(even, odd)
            b = tl.reshape(pairs, (even.shape[0], 4))
            o_four = k + tl.arange(0, 4)
            p_four = p[:, None] + o_four[None, :]
            tl.store(p_four, b, mask=m[:, None])
    else:
        for k in tl.static_range(COUNT):
            tl.store(p + k, numbers[k], mask=m)


@triton.jit
def _across(matrix, vector, N: tl.constexpr):
    """Return matrix @ vector."""
    products = ()
    for i in tl.static_range(N):
        total = matrix[i * N] * vector[0]
        for j in tl.static_range(1, N):
            total += matrix[i * N + j] * vector[j]
        products = products + (total,)
    return products


@triton.jit
def _down(matrix, vector, N: tl.constexpr):
    """Return vector @ matrix."""
    products = ()
    for j in tl.static_range(N):
        total = matrix[j] * vector[0]
        for i in tl.static_range(1, N):
            total += matrix[i * N + j] * vector[i]
        products = products + (total,)
    return products


@triton.jit
def _reciprocals(vector, N: tl.constexpr):
    numbers = ()
    for i in tl.static_range(N):
        numbers = numbers + (1.0 / vector[i],)
    return numbers


@triton.jit
def _through_reciprocals(gradient, reciprocals, N: tl.constexpr):
    """Return the gradient of the numbers whose reciprocals these are."""
    numbers = ()
    for i in tl.static_range(N):
        numbers = numbers + (-gradient[i] * reciprocals[i] * reciprocals[i],)
    return numbers


@triton.jit
def _exponentials(logits, FLOOR: tl.constexpr, N: tl.constexpr):
    """Compute K."""
    # The largest logit of each column.
    largest = ()
    for j in tl.static_range(N):
        top = logits[j]
        for i in tl.static_range(1, N):
            top = tl.maximum(top, logits[i * N + j])
        largest = largest + (top,)
    numbers = ()
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            b = tl.exp(logits[i * N + j] - largest[j])
            numbers = numbers + (tl.maximum(b, FLOOR),)
    return numbers


@triton.jit
def _scalings(
    k,
    history,
    o_t,
    m,
    M,
    ITERATIONS: tl.constexpr,
    N: tl.constexpr,
):
    """Return the last c and r. Every earlier r goes to the history, if there is one."""
    r = ()
    for _ in tl.static_range(N):
        one = tl.full([o_t.shape[0]], 1.0, tl.float32)
        r = r + (one,)
    c = r
    for t in range(ITERATIONS):
        c = _reciprocals(_down(k, r, N), N)
        r = _reciprocals(_across(k, c, N), N)
        if history is not None:
            for i in tl.static_range(N):
                p_r = history + o_t + (t * N + i) * M.to(tl.int64)
                tl.store(p_r, r[i], mask=m & (t < ITERATIONS - 1))
    return c, r


@triton.jit
def _load_scalings(history, t, o_t, m, M, N: tl.constexpr):
    """Load r after iteration t; before the first it is one."""
    r = ()
    for i in tl.static_range(N):
        p_r = history + o_t + (t * N + i) * M.to(tl.int64)
        b_r = tl.load(p_r, mask=m & (t >= 0), other=1.0)
        r = r + (b_r,)
    return r


@triton.jit
def balance(
    logits,
    o_t,
    m,
    M,
    ITERATIONS: tl.constexpr,
    FLOOR: tl.constexpr,
    N: tl.constexpr,
):
    """Compute the doubly stochastic matrices of tokens `o_t` of M."""
    k = _exponentials(logits, FLOOR, N)
    c, r = _scalings(k, None, o_t, m, M, ITERATIONS, N)
    numbers = ()
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            numbers = numbers + (r[i] * k[i * N + j] * c[j],)
    return numbers


@triton.jit
def balance_backward(
    logits,
    gradient,
    history,
    o_t,
    m,
    M,
    ITERATIONS: tl.constexpr,
    FLOOR: tl.constexpr,
    N: tl.constexpr,
):
    """Compute the gradient of the logits."""
    k = _exponentials(logits, FLOOR, N)
    c, r = _scalings(k, history, o_t, m, M, ITERATIONS, N)
    tl.debug_barrier()  # what was stored can be loaded
    before = _load_scalings(history, ITERATIONS - 2, o_t, m, M, N)

    # The output is r K c: gradients of K, of the last r and of the last c.
    dk = ()
    kg = ()
    for i in tl.static_range(N):
        mean = gradient[i * N] * k[i * N] * c[0]
        for j in tl.static_range(1, N):
            mean += gradient[i * N + j] * k[i * N + j] * c[j]
        # Less the row's mean: see `centred` of the reference.
        for j in tl.static_range(N):
            g = gradient[i * N + j] - mean * r[i]
            dk = dk + (r[i] * g * c[j],)
            kg = kg + (k[i * N + j] * g,)
    dr = _across(kg, c, N)
    dc = _down(kg, r, N)

    # Back through r = 1 / (K c), then c = 1 / (K^T r), of every iteration.
    for back in range(ITERATIONS):
        earlier = _load_scalings(history, ITERATIONS - 3 - back, o_t, m, M, N)  # for the next turn
        c = _reciprocals(_down(k, before, N), N)
        da = _through_reciprocals(dr, r, N)
        through_rows = _down(k, da, N)
        dc_total = ()
        zeros = ()
        for j in tl.static_range(N):
            dc_total = dc_total + (dc[j] + through_rows[j],)
            zeros = zeros + (dc[j] * 0.0,)
        db = _through_reciprocals(dc_total, c, N)
        dk_total = ()
        for i in tl.static_range(N):
            for j in tl.static_range(N):
                term = dk[i * N + j] + da[i] * c[j] + before[i] * db[j]
                dk_total = dk_total + (term,)
        dk = dk_total
        dr = _across(k, db, N)
        dc = zeros
        r = before
        before = earlier
    # A logit below the floor has no effect, and no gradient.
    numbers = ()
    for n in tl.static_range(N * N):
        number = tl.where(k[n] > FLOOR, dk[n] * k[n], 0.0)
        numbers = numbers + (number,)
    return numbers


@triton.jit(do_not_specialize=["M"])
def _balance(
    logits,
    out,
    M,
    ITERATIONS: tl.constexpr,
    FLOOR: tl.constexpr,
    N: tl.constexpr,
    T: tl.constexpr,
):
    o_t, m = program_tokens(M, T)
    b_logits = load_numbers(logits + o_t * (N * N), m, N * N)
    numbers = balance(b_logits, o_t, m, M, ITERATIONS, FLOOR, N)
    store_numbers(out + o_t * (N * N), numbers, m, N * N)


@triton.jit(do_not_specialize=["M"])
def _balance_backward(
    logits,  # (M, N, N)
    gradient,  # (M, N, N)
    history,  # (ITERATIONS - 1, N, M)
    out,  # (M, N, N)
    M,
    ITERATIONS: tl.constexpr,
    FLOOR: tl.constexpr,
    N: tl.constexpr,
    T: tl.constexpr,
):
    o_t, m = program_tokens(M, T)
    b_logits = load_numbers(logits + o_t * (N * N), m, N * N)
    b_g = load_numbers(gradient + o_t * (N * N), m, N * N)
    numbers = balance_backward(b_logits, b_g, history, o_t, m, M, ITERATIONS, FLOOR, N)
    store_numbers(out + o_t * (N * N), numbers, m, N * N)


def scratch(rows: int, iterations: int, n: int, like: Tensor) -> Tensor:
    """Allocate the `history` of a backward."""
    numbers = max(1, iterations - 1) * n * rows
    return torch.empty(numbers, dtype=torch.float32, device=like.device)


def forward(logits: Tensor, iterations: int) -> Tensor:
    launches["sinkhorn"] += 1
    out = torch.empty_like(logits)
    _launch(_balance, (logits, out), iterations)
    return out


def backward(logits: Tensor, gradient: Tensor, iterations: int) -> Tensor:
    launches["sinkhorn_backward"] += 1
    out = torch.empty_like(logits)
    rows, n, _ = logits.shape
    history = scratch(rows, iterations, n, logits)
    _launch(_balance_backward, (logits, gradient, history, out), iterations)
    return out


def _launch(kernel, tensors: tuple[Tensor, ...], iterations: int) -> None:
    rows, n, _ = tensors[0].shape
    constants = {"ITERATIONS": iterations, "FLOOR": FLOOR, "N": n, "T": TOKENS}
    grid = (ceil_div(rows, TOKENS),)
    launch(kernel, grid, tensors, (rows,), constants, num_warps=1)
