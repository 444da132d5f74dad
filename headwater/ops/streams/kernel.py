# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Reads and writes of n streams, forward and backward.

    h = sum_j pre_j X_j;   X'_i = sum_j res_ij X_j + post_i y                               X (..., n, D); h, y (..., D)
    dpre_j = <dh, X_j>;   dres_ij = <dX'_i, X_j>;   dpost_i = <dX'_i, y>
    dX_j = sum_i res_ij dX'_i;   dy = sum_i post_i dX'_i

Passes over (tokens x D): a read moves n + 1 forward and backward, a write 2 n + 1 forward and 3 n + 2 backward. fp32
inside, one rounding at each store. A program owns a few tokens. It sums over channels itself (the gradients of
coefficients), so nothing is added by two programs. n is compiled in: streams are a tuple of tiles (tokens, channels)
in registers.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.depth.score import launch_score_backward
from headwater.ops.triton.launch import Launch, launches
from headwater.ops.triton.registration import writer
from headwater.ops.triton.tiles import ceil_div, power_of_2

# Numbers of a stream in a tile, channels of a tile at most, warps.
READ, WRITE = (512, 512, 2), (512, 512, 2)
READ_BACKWARD, WRITE_BACKWARD = (
    (512, 512, 1),
    (256, 128, 1),
)  # a token's sums are one warp's: they wait for no other


@triton.jit
def _load_streams(p, m, D, N: tl.constexpr):
    """The N tiles that begin at `p`, in fp32."""
    tiles = ()
    for j in tl.static_range(N):
        tiles = tiles + (tl.load(p + j * D, mask=m, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def _load_numbers(p, m, N: tl.constexpr, STEP: tl.constexpr):
    """N numbers of each token, each so far from the one before, as columns (T, 1)."""
    columns = ()
    for j in tl.static_range(N):
        columns = columns + (tl.load(p + j * STEP, mask=m, other=0.0)[:, None],)
    return columns


@triton.jit
def _combine(weights, tiles, N: tl.constexpr):
    """sum_j weights_j tiles_j."""
    total = weights[0] * tiles[0]
    for j in tl.static_range(1, N):
        total += weights[j] * tiles[j]
    return total


@triton.jit(do_not_specialize=["M"])
def _read(x, pre, h, M, D, N: tl.constexpr, T: tl.constexpr, BD: tl.constexpr):
    o_t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_t = o_t < M
    m = m_t[:, None] & (o_d < D)[None, :]
    weights = _load_numbers(pre + o_t * N, m_t, N, 1)
    streams = _load_streams(x + o_t[:, None] * (N * D) + o_d[None, :], m, D, N)
    b_h = _combine(weights, streams, N)
    tl.store(h + o_t[:, None] * D + o_d[None, :], b_h.to(h.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["M"])
def _read_backward(x, dh, dpre, M, D, N: tl.constexpr, T: tl.constexpr, BD: tl.constexpr):
    o_t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    m_t = o_t < M
    sums = ()
    for _ in tl.static_range(N):
        sums = sums + (tl.zeros([T, BD], tl.float32),)
    for c in range(0, D, BD):
        o_d = c + tl.arange(0, BD)
        m = m_t[:, None] & (o_d < D)[None, :]
        b_dh = tl.load(dh + o_t[:, None] * D + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        streams = _load_streams(x + o_t[:, None] * (N * D) + o_d[None, :], m, D, N)
        grown = ()
        for j in tl.static_range(N):
            grown = grown + (sums[j] + b_dh * streams[j],)
        sums = grown
    for j in tl.static_range(N):
        tl.store(dpre + o_t * N + j, tl.sum(sums[j], 1), mask=m_t)


@triton.jit(do_not_specialize=["M"])
def _write(x, y, post, res, out, M, D, N: tl.constexpr, T: tl.constexpr, BD: tl.constexpr):
    o_t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_t = o_t < M
    m = m_t[:, None] & (o_d < D)[None, :]
    o_x = o_t[:, None] * (N * D) + o_d[None, :]
    streams = _load_streams(x + o_x, m, D, N)
    b_y = tl.load(y + o_t[:, None] * D + o_d[None, :], mask=m, other=0.0).to(tl.float32)
    for i in tl.static_range(N):
        row = _load_numbers(res + o_t * (N * N) + i * N, m_t, N, 1)
        b_post = tl.load(post + o_t * N + i, mask=m_t, other=0.0)
        b_out = _combine(row, streams, N) + b_post[:, None] * b_y
        tl.store(out + o_x + i * D, b_out.to(out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["M"])
def _write_backward(
    g, x, y, post, res, dx, dy, dpost, dres, M, D, N: tl.constexpr, T: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    o_t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    m_t = o_t < M
    sums = ()  # of the gradients of res, row by row, and then of post
    for _ in tl.static_range(N * N + N):
        sums = sums + (tl.zeros([T], tl.float32),)
    for c in range(0, D, BD):
        o_d = c + tl.arange(0, BD)
        m = m_t[:, None] & (o_d < D)[None, :]
        o_x = o_t[:, None] * (N * D) + o_d[None, :]
        o_y = o_t[:, None] * D + o_d[None, :]
        gradients = _load_streams(g + o_x, m, D, N)
        streams = _load_streams(x + o_x, m, D, N)
        b_y = tl.load(y + o_y, mask=m, other=0.0).to(tl.float32)
        grown = ()
        for i in tl.static_range(N):
            for j in tl.static_range(N):
                grown = grown + (sums[i * N + j] + tl.sum(gradients[i] * streams[j], 1),)
        for i in tl.static_range(N):
            grown = grown + (sums[N * N + i] + tl.sum(gradients[i] * b_y, 1),)
        sums = grown
        for j in tl.static_range(N):
            column = _load_numbers(
                res + o_t * (N * N) + j, m_t, N, N
            )  # here: registers hold none of them for long
            b_dx = _combine(column, gradients, N)
            tl.store(dx + o_x + j * D, b_dx.to(dx.dtype.element_ty), mask=m)
        b_dy = _combine(_load_numbers(post + o_t * N, m_t, N, 1), gradients, N)
        tl.store(dy + o_y, b_dy.to(dy.dtype.element_ty), mask=m)
    for k in tl.static_range(N * N):
        tl.store(dres + o_t * (N * N) + k, sums[k], mask=m_t)
    for i in tl.static_range(N):
        tl.store(dpost + o_t * N + i, sums[N * N + i], mask=m_t)


@functools.lru_cache(1024)
def _launch(
    kernel, tile: tuple[int, int, int], tokens: int, streams: int, width: int, whole: bool
) -> Launch:
    """`whole`: a program takes all channels of its tokens; otherwise each tile is one's. Above four streams a tile has
    half as many numbers, and so on, for its streams to stay in registers."""
    numbers, channels, warps = tile
    channels = min(channels, max(16, power_of_2(width)))
    rows = max(1, numbers // channels * 4 // max(4, power_of_2(streams)))
    grid = (
        (ceil_div(tokens, rows),) if whole else (ceil_div(tokens, rows), ceil_div(width, channels))
    )
    constants = {"N": streams, "T": rows, "BD": channels}
    return Launch(kernel, grid, (tokens, width), constants, num_warps=warps)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    *_, streams, width = x.shape
    return x.numel() // (streams * width), streams, width


def _reading(x: Tensor, pre: Tensor) -> tuple[Tensor]:
    return (x.new_empty(*x.shape[:-2], x.shape[-1]),)


@writer(_reading)
def read_streams(x: Tensor, pre: Tensor, h: Tensor) -> None:
    """`x` (..., n, D) and `pre` (..., n) fp32 to `h` (..., D) in the dtype of x."""
    launches["read_streams"] += 1
    _launch(_read, READ, *_sizes(x), False)(x, pre, h)


def _reading_backward(x: Tensor, dh: Tensor) -> tuple[Tensor]:
    return (x.new_empty(x.shape[:-1], dtype=torch.float32),)


@writer(_reading_backward)
def read_streams_backward(x: Tensor, dh: Tensor, dpre: Tensor) -> None:
    """The gradient of `pre` alone, (..., n) in fp32: that of x is pre_j dh, which whoever adds it up makes."""
    launches["read_streams_backward"] += 1
    _launch(_read_backward, READ_BACKWARD, *_sizes(x), True)(x, dh, dpre)


def _writing(x: Tensor, y: Tensor, post: Tensor, res: Tensor) -> tuple[Tensor]:
    return (torch.empty_like(x),)


@writer(_writing)
def write_streams(x: Tensor, y: Tensor, post: Tensor, res: Tensor, out: Tensor) -> None:
    """`x` (..., n, D), `y` (..., D), `post` (..., n) and `res` (..., n, n) fp32 to `out` (..., n, D)."""
    launches["write_streams"] += 1
    _launch(_write, WRITE, *_sizes(x), False)(x, y, post, res, out)


def _writing_backward(
    gradient: Tensor, x: Tensor, y: Tensor, post: Tensor, res: Tensor
) -> tuple[Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(y), torch.empty_like(post), torch.empty_like(res)


@writer(_writing_backward)
def write_streams_backward(
    gradient: Tensor,
    x: Tensor,
    y: Tensor,
    post: Tensor,
    res: Tensor,
    dx: Tensor,
    dy: Tensor,
    dpost: Tensor,
    dres: Tensor,
) -> None:
    """The gradients of all that `write_streams` takes."""
    launches["write_streams_backward"] += 1
    arguments = (gradient, x, y, post, res, dx, dy, dpost, dres)
    _launch(_write_backward, WRITE_BACKWARD, *_sizes(x), True)(*arguments)


def _projecting_backward(
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    rstd: Tensor,
    dz: Tensor,
    gradient: Tensor | None,
    dh: Tensor,
    pre: Tensor,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@writer(_projecting_backward)
def project_streams_backward(
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    rstd: Tensor,
    dz: Tensor,
    gradient: Tensor | None,
    dh: Tensor,
    pre: Tensor,
    dx: Tensor,
    dweight: Tensor,
) -> None:
    """The whole gradient of `x` (..., n, D): `gradient` of the write, pre_j dh of the read, and that of products `z`
    with `weight` (Q, n D) or (Q, D), whose gradient is the other one."""
    source, out = by_row(x, weight), by_row(dx, weight)
    later = None if gradient is None else by_row(gradient, weight)
    launch_score_backward(source, weight, z, rstd, dz, later, out, dweight, read=(dh, pre))


def by_row(x: Tensor, weight: Tensor) -> Tensor:
    """Streams (..., n, D) as what a row of `weight` is multiplied with: all of a token, (..., n D), or each."""
    return x if weight.shape[-1] == x.shape[-1] else x.flatten(-2)
