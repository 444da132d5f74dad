# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Reads and writes of n streams, forward and backward.

    h = sum_j pre_j X_j;   X'_i = sum_j res_ij X_j + post_i y           X (..., n, D); h, y (..., D)
    dpre_j = <dh, X_j>;   dres_ij = <dX'_i, X_j>;   dpost_i = <dX'_i, y>
    dX_j = sum_i res_ij dX'_i;   dy = sum_i post_i dX'_i

Passes over (tokens x D): a read moves n + 1 forward and backward, a write 2 n + 1 forward and
3 n + 2 backward. fp32 inside, one rounding at each store. A program owns a few tokens. It sums over
channels itself (the gradients of coefficients), so nothing is added by two programs. n is compiled
in: streams are a tuple of tiles (tokens, channels) in registers.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.depth.score import launch_score_backward
from headwater.ops.triton.launch import Launch, launches
from headwater.ops.triton.registration import writer
from headwater.ops.triton.tiles import (
    ceil_div,
    load_wide,
    power_of_2,
    program_tokens,
)

# Numbers of a stream in a tile, channels of a tile at most, warps.
READ = (512, 512, 2)
WRITE = (512, 512, 2)
# One warp has all sums of a token: it waits for no other.
READ_BACKWARD = (512, 512, 1)
WRITE_BACKWARD = (256, 128, 1)


@triton.jit
def _load_streams(p, m, D, N: tl.constexpr):
    """Load the N tiles that begin at `p`, in fp32."""
    tiles = ()
    for j in tl.static_range(N):
        tiles = tiles + (load_wide(p + j * D, m),)
    return tiles


@triton.jit
def _load_numbers(p, m, N: tl.constexpr, STEP: tl.constexpr):
    """Load N numbers of each token, STEP apart, as columns (T, 1)."""
    columns = ()
    for j in tl.static_range(N):
        column = tl.load(p + j * STEP, mask=m, other=0.0)
        columns = columns + (column[:, None],)
    return columns


@triton.jit
def _combine(weights, tiles, N: tl.constexpr):
    """Return sum_j weights_j tiles_j."""
    total = weights[0] * tiles[0]
    for j in tl.static_range(1, N):
        total += weights[j] * tiles[j]
    return total


@triton.jit
def _offsets(o_t, m_t, o_d, D, N: tl.constexpr):
    """Return offsets of tokens' first streams and of rows (T, BD), and their mask."""
    m = m_t[:, None] & (o_d < D)[None, :]
    o_x = o_t[:, None] * (N * D) + o_d[None, :]
    o_y = o_t[:, None] * D + o_d[None, :]
    return o_x, o_y, m


@triton.jit(do_not_specialize=["M"])
def _read(
    x,  # (M, N, D)
    pre,  # (M, N)
    h,  # (M, D)
    M,
    D,
    N: tl.constexpr,
    T: tl.constexpr,  # tokens of a program
    BD: tl.constexpr,  # channels of a tile
):
    o_t, m_t = program_tokens(M, T)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    o_x, o_h, m = _offsets(o_t, m_t, o_d, D, N)
    weights = _load_numbers(pre + o_t * N, m_t, N, 1)
    streams = _load_streams(x + o_x, m, D, N)
    b_h = _combine(weights, streams, N)
    tl.store(h + o_h, b_h, mask=m)


@triton.jit(do_not_specialize=["M"])
def _read_backward(
    x,  # (M, N, D)
    dh,  # (M, D)
    dpre,  # (M, N)
    M,
    D,
    N: tl.constexpr,
    T: tl.constexpr,
    BD: tl.constexpr,
):
    o_t, m_t = program_tokens(M, T)
    sums = ()
    for _ in tl.static_range(N):
        sums = sums + (tl.zeros([T, BD], tl.float32),)
    # Channel by channel first; the sums over a tile's channels come at the end.
    for c in range(0, D, BD):
        o_d = c + tl.arange(0, BD)
        o_x, o_h, m = _offsets(o_t, m_t, o_d, D, N)
        b_dh = load_wide(dh + o_h, m)
        streams = _load_streams(x + o_x, m, D, N)
        new_sums = ()
        for j in tl.static_range(N):
            new_sums = new_sums + (sums[j] + b_dh * streams[j],)
        sums = new_sums
    for j in tl.static_range(N):
        b_dpre = tl.sum(sums[j], 1)
        tl.store(dpre + o_t * N + j, b_dpre, mask=m_t)


@triton.jit(do_not_specialize=["M"])
def _write(
    x,  # (M, N, D)
    y,  # (M, D)
    post,  # (M, N)
    res,  # (M, N, N)
    out,  # (M, N, D)
    M,
    D,
    N: tl.constexpr,
    T: tl.constexpr,
    BD: tl.constexpr,
):
    o_t, m_t = program_tokens(M, T)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    o_x, o_y, m = _offsets(o_t, m_t, o_d, D, N)
    streams = _load_streams(x + o_x, m, D, N)
    b_y = load_wide(y + o_y, m)
    for i in tl.static_range(N):
        row = _load_numbers(res + o_t * (N * N) + i * N, m_t, N, 1)
        b_post = tl.load(post + o_t * N + i, mask=m_t, other=0.0)
        b_out = _combine(row, streams, N) + b_post[:, None] * b_y
        tl.store(out + o_x + i * D, b_out, mask=m)


@triton.jit(do_not_specialize=["M"])
def _write_backward(
    g,  # (M, N, D), dX'
    x,  # (M, N, D)
    y,  # (M, D)
    post,  # (M, N)
    res,  # (M, N, N)
    dx,
    dy,
    dpost,
    dres,
    M,
    D,
    N: tl.constexpr,
    T: tl.constexpr,
    BD: tl.constexpr,
):
    o_t, m_t = program_tokens(M, T)
    # Sums for the gradients of res, row by row, and then of post.
    sums = ()
    for _ in tl.static_range(N * N + N):
        sums = sums + (tl.zeros([T], tl.float32),)
    for c in range(0, D, BD):
        o_d = c + tl.arange(0, BD)
        o_x, o_y, m = _offsets(o_t, m_t, o_d, D, N)
        gradients = _load_streams(g + o_x, m, D, N)
        streams = _load_streams(x + o_x, m, D, N)
        b_y = load_wide(y + o_y, m)
        new_sums = ()
        for i in tl.static_range(N):
            for j in tl.static_range(N):
                product = tl.sum(gradients[i] * streams[j], 1)
                new_sums = new_sums + (sums[i * N + j] + product,)
        for i in tl.static_range(N):
            product = tl.sum(gradients[i] * b_y, 1)
            new_sums = new_sums + (sums[N * N + i] + product,)
        sums = new_sums
        # Coefficients are loaded here, so that registers hold none of them for long.
        for j in tl.static_range(N):
            column = _load_numbers(res + o_t * (N * N) + j, m_t, N, N)
            b_dx = _combine(column, gradients, N)
            tl.store(dx + o_x + j * D, b_dx, mask=m)
        weights = _load_numbers(post + o_t * N, m_t, N, 1)
        b_dy = _combine(weights, gradients, N)
        tl.store(dy + o_y, b_dy, mask=m)
    p_res = dres + o_t * (N * N)
    for k in tl.static_range(N * N):
        tl.store(p_res + k, sums[k], mask=m_t)
    p_post = dpost + o_t * N
    for i in tl.static_range(N):
        tl.store(p_post + i, sums[N * N + i], mask=m_t)


@functools.lru_cache(1024)
def _launch(
    kernel,
    tile: tuple[int, int, int],
    tokens: int,
    streams: int,
    width: int,
    whole: bool,
) -> Launch:
    """Prepare a launch. `whole`: a program takes all channels of its tokens, else one tile."""
    numbers, channels, warps = tile
    channels = min(channels, max(16, power_of_2(width)))
    # Above four streams a tile has half as many numbers, and so on, so that registers hold them.
    rows = max(1, numbers // channels * 4 // max(4, power_of_2(streams)))
    grid = (ceil_div(tokens, rows),)
    if not whole:
        grid = (*grid, ceil_div(width, channels))
    constants = {"N": streams, "T": rows, "BD": channels}
    return Launch(kernel, grid, (tokens, width), constants, num_warps=warps)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    *_, streams, width = x.shape
    return x.numel() // (streams * width), streams, width


def _read_output(x, pre):
    *tokens, _, width = x.shape
    return (x.new_empty(*tokens, width),)


@writer(_read_output, writes=("h",))
def read_streams(x: Tensor, pre: Tensor, h: Tensor) -> None:
    """Read `x` (..., n, D) by `pre` (..., n) fp32 to `h` (..., D) in the dtype of x."""
    launches["read_streams"] += 1
    _launch(_read, READ, *_sizes(x), False)(x, pre, h)


def _gradient_of_pre(x, dh):
    return (x.new_empty(x.shape[:-1], dtype=torch.float32),)


@writer(_gradient_of_pre, writes=("dpre",))
def read_streams_backward(x: Tensor, dh: Tensor, dpre: Tensor) -> None:
    """Write the gradient of `pre`, (..., n) in fp32.

    The gradient of x is pre_j dh, which whoever adds it up makes.
    """
    launches["read_streams_backward"] += 1
    _launch(_read_backward, READ_BACKWARD, *_sizes(x), True)(x, dh, dpre)


def _written_streams(x, *_):
    return (torch.empty_like(x),)


@writer(_written_streams, writes=("out",))
def write_streams(
    x: Tensor,
    y: Tensor,
    post: Tensor,
    res: Tensor,
    out: Tensor,
) -> None:
    """Write `x` (..., n, D) and `y` (..., D), mixed by fp32 coefficients, to `out` (..., n, D).

    Coefficients are `post` (..., n) and `res` (..., n, n).
    """
    launches["write_streams"] += 1
    _launch(_write, WRITE, *_sizes(x), False)(x, y, post, res, out)


def _gradients_of_write(gradient, *inputs):
    return tuple(torch.empty_like(tensor) for tensor in inputs)


@writer(_gradients_of_write, writes=("dx", "dy", "dpost", "dres"))
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
    """Write the gradients of everything that `write_streams` takes."""
    launches["write_streams_backward"] += 1
    over_tokens = _launch(_write_backward, WRITE_BACKWARD, *_sizes(x), True)
    over_tokens(gradient, x, y, post, res, dx, dy, dpost, dres)


def _gradients_of_projection(x, weight, *_):
    return torch.empty_like(x), torch.empty_like(weight)


@writer(_gradients_of_projection, writes=("dx", "dweight"))
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
    """Write the whole gradient of `x` (..., n, D), and that of `weight` (Q, n D) or (Q, D).

    The first has three parts: `gradient` from the write, pre_j dh from the read, and that of the
    products `z`.
    """
    source, out = by_row(x, weight), by_row(dx, weight)
    later = None if gradient is None else by_row(gradient, weight)
    read = (dh, pre)
    launch_score_backward(source, weight, z, rstd, dz, later, out, dweight, read)


def by_row(x: Tensor, weight: Tensor) -> Tensor:
    """View streams (..., n, D) as rows that `weight` multiplies: (..., n D), or each stream."""
    return x if weight.shape[-1] == x.shape[-1] else x.flatten(-2)
