# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Phase 1: S queries mix N finished sources, given their scores.

    p_ns = softmax_n(z_ns);  out_s = sum_n p_ns v_n;  lse_s = log sum_n exp(z_ns)
    u_ns = <dout_s, v_n>;   dz_ns = p_ns (u_ns - sum_m p_ms u_ms + dlse_s)
    dv_n = sum_s p_ns dout_s

v_n are (tokens, D), z (tokens, N, S); the softmax is fp32, with one downcast. The first query's
output may leave through the RMSNorm of the sublayer that opens the block. Weights may be given
instead of scores (see `ops.banks`): u_ns is then the gradient of p_ns.

Passes over (tokens x D): forward N reads, S writes; backward S + N reads and, into the gradient
that later reads of the same source have begun, N reads and N writes. Forward: a program holds S
sums for one token, looping over sources. Backward: one or two warps own a token and take four
sources at once, so that the S rows of dout are fetched N / 4 times, from cache; the S * N dot
products are summed per thread first, and exchanged once per source.
"""

import functools
import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import Launch, address_table, addresses_of, launches
from headwater.ops.triton.registration import writer
from headwater.ops.triton.tiles import (
    ceil_div,
    load_wide,
    power_of_2,
    program_tokens,
    row_pointer,
    rows_of,
    vectorised,
)

GROUP = 4  # sources that a program of the backward takes at once (at most)
# Queries per launch: a token's sums stay in registers. More queries read the sources again.
MAX_QUERIES = 16
MAX_QUERIES_BACKWARD = 8


@triton.jit
def _scores(table, n, o_t, o_s, m, N, like):
    """Load scores of source n for tokens o_t and queries o_s.

    After N sources the table has the addresses of their first token's scores, and then of their
    second token's: the difference is the distance between tokens.
    """
    start = tl.load(table + N + n)
    address = start + o_t * (tl.load(table + 2 * N + n) - start)
    p_z = address.to(tl.pointer_type(like.dtype.element_ty))
    p_z = p_z[:, None] + o_s[None, :]
    return tl.load(p_z, mask=m, other=0.0)


@triton.jit(do_not_specialize=["M", "N", "S"])
def _softmax(
    table,
    p,
    lse,
    M,
    N,
    S,
    T: tl.constexpr,
    SP: tl.constexpr,
):
    o_t, m_t = program_tokens(M, T)
    o_s = tl.arange(0, SP)
    m = m_t[:, None] & (o_s < S)[None, :]
    p_weights = p + o_t[:, None] * N * S + o_s[None, :]
    # Three passes over the scores, which are small: the maximum, the sum, the weights.
    top = tl.full([T, SP], float("-inf"), tl.float32)
    for n in range(N):
        z = _scores(table, n, o_t, o_s, m, N, p)
        top = tl.maximum(top, z)
    total = tl.zeros([T, SP], tl.float32)
    for n in range(N):
        z = _scores(table, n, o_t, o_s, m, N, p)
        total += tl.exp(z - top)
    log = top + tl.log(total)
    p_lse = lse + o_s[None, :] * M + o_t[:, None]
    tl.store(p_lse, log, mask=m)
    for n in range(N):
        z = _scores(table, n, o_t, o_s, m, N, p)
        tl.store(p_weights + n * S, tl.exp(z - log), mask=m)


@triton.jit
def _place(n, s, N, PS, GIVEN: tl.constexpr):
    """Return the offset of source n's weight for query s among a token's weights.

    These are (N, PS), or (PS, N) if weights are given.
    """
    return s * N + n if GIVEN else n * PS + s


@triton.jit
def _sums(
    table,  # addresses of N sources
    p,  # weights of token t
    t,
    o_d,
    m_d,
    N,
    PS,
    D,
    like,  # carries the sources' element type
    S: tl.constexpr,
    VECTOR: tl.constexpr,
    GIVEN: tl.constexpr,
):
    """Sum the sources of token t for S queries and channels o_d.

    The next source is under way while one is used.
    """
    sums = ()
    for _ in tl.static_range(S):
        sums = sums + (tl.zeros_like(o_d).to(tl.float32),)
    p_first = row_pointer(table, 0, t, D, like, VECTOR)
    ahead = tl.load(p_first + o_d, mask=m_d, other=0.0)
    p_next = row_pointer(table, tl.minimum(1, N - 1), t, D, like, VECTOR)
    for n in range(N):
        v = ahead.to(tl.float32)
        ahead = tl.load(p_next + o_d, mask=m_d & (n + 1 < N), other=0.0)
        p_next = row_pointer(table, tl.minimum(n + 2, N - 1), t, D, like, VECTOR)
        new_sums = ()
        for s in tl.static_range(S):
            weight = tl.load(p + _place(n, s, N, PS, GIVEN))
            new_sums = new_sums + (sums[s] + weight * v,)
        sums = new_sums
    return sums


@triton.jit(do_not_specialize=["M", "N", "PS", "PT"])
def _mix(
    table,  # addresses of N sources
    p,  # weights: (M, N, PS), or (PS, N) of each or all tokens
    like,  # carries the sources' element type
    out,  # (S, M, D), or without the first
    x,  # (M, D), the first query's output, normed
    rstd,  # (M,)
    g,  # (D,), the norm's weight
    M,
    N,
    PS,  # queries in all
    PT,  # numbers between tokens' weights
    D,
    eps,
    S: tl.constexpr,  # queries of this launch
    NORM: tl.constexpr,  # the first goes through a norm
    BD: tl.constexpr,
    ONE: tl.constexpr,  # BD >= D
    VECTOR: tl.constexpr,  # rows start at 16-byte boundaries
    GIVEN: tl.constexpr,  # weights are given
):
    # With NORM the first query goes to x, and out holds the other S - 1. Tokens go backwards, as in
    # merge.py.
    t = (M - 1 - tl.program_id(0)).to(tl.int64)
    p += t * PT
    squares = tl.zeros([BD], tl.float32)
    first = tl.zeros([BD], tl.float32)
    for c in range(0, BD if ONE else D, BD):
        o_d = c + tl.arange(0, BD)
        m_d = o_d < D
        sums = _sums(table, p, t, o_d, m_d, N, PS, D, like, S, VECTOR, GIVEN)
        if NORM:
            first = sums[0]
            squares += first * first
        for s in tl.static_range(NORM, S):
            p_out = out + ((s - NORM) * M + t) * D + o_d
            tl.store(p_out, sums[s], mask=m_d)
    if NORM:
        r = 1.0 / tl.sqrt(tl.sum(squares, 0) / D + eps)
        tl.store(rstd + t, r)
        for c in range(0, BD if ONE else D, BD):
            o_d = c + tl.arange(0, BD)
            m_d = o_d < D
            # A row that does not fit is summed again, from sources that are still in cache.
            if not ONE:
                first = _sums(table, p, t, o_d, m_d, N, PS, D, like, 1, VECTOR, GIVEN)[0]
            b_g = tl.load(g + o_d, mask=m_d, other=1.0).to(tl.float32)
            b_g = gain(b_g, x.dtype.element_ty)
            tl.store(x + t * D + o_d, first * r * b_g, mask=m_d)


@triton.jit
def gain(g, dtype: tl.constexpr):
    """Return the norm's weight, kept from zero.

    The backward rebuilds the norm's input from its output, so the norm must be invertible. A
    product with 2^-96 is still a normal number, and vanishes beside any other. fp16 has no room for
    this.
    """
    if dtype != tl.float16:
        tiny: tl.constexpr = 1.262177448e-29
        g = tl.where(g < 0, tl.minimum(g, -tiny), tl.maximum(g, tiny))
    return g


@triton.jit
def _sum_together(parts, COUNT: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum each of COUNT = 2 ** LEVELS vectors, in one exchange between threads."""
    for level in tl.static_range(LEVELS):
        joined = ()
        for e in tl.static_range(COUNT >> (level + 1)):
            pair = tl.join(parts[e], parts[e + (COUNT >> (level + 1))])
            joined = joined + (pair,)
        parts = joined
    return tl.sum(tl.reshape(parts[0], (WIDTH, COUNT)), 0)


@triton.jit(do_not_specialize=["M", "N", "PS", "PT", "s0", "unasked"])
def _mix_backward(
    table,  # addresses of sources, gradients, douts and dlses
    p,  # weights, as in `_mix`
    dz,  # (M, N, PS), or u (M, PS, N)
    whole,  # (M,), <dout, out>
    like,  # carries the sources' element type
    grad,  # carries the gradients'
    dout,  # carries the douts'
    M,
    N,
    PS,  # queries in all
    PT,  # numbers between tokens' weights
    D,
    s0,  # the first query of this launch
    unasked,  # queries before the first dlse
    S: tl.constexpr,  # queries of this launch
    SP: tl.constexpr,  # S as a power of two
    LEVELS: tl.constexpr,  # its logarithm
    FRESH: tl.constexpr,  # gradients are written, not added to
    HAS_LSE: tl.constexpr,  # there are dlses
    BD: tl.constexpr,
    GROUP: tl.constexpr,  # sources at once
    VECTOR: tl.constexpr,  # rows start at 16-byte boundaries
    REBUILD: tl.constexpr,  # the first source was not kept
    GIVEN: tl.constexpr,  # weights are given
):
    # The table has the addresses of N sources, N gradients, all PS douts, and the dlses of all
    # queries but the first `unasked`. This launch serves queries s0 to s0 + S. dz receives u, and
    # is finished once all N are known; if weights are given, u is the result.
    # REBUILD: there is one query, and before the N sources another that was not kept. Its share
    # follows from `whole`; the address of its gradient follows the dout's; p and dz have N + 1
    # rows.
    t = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, SP)
    p += t * PT + _place(0, s0, N, PS, GIVEN)
    dz += t * (N + REBUILD) * PS + _place(0, s0, N, PS, GIVEN)
    w_0 = 0.0
    if REBUILD:
        w_0 = tl.load(p)
        p += 1
        dz += 1
    douts = ()
    for s in tl.static_range(S):
        p_dout = row_pointer(table, 2 * N + s0 + s, t, D, dout, VECTOR)
        douts = douts + (p_dout,)
    delta = tl.zeros([SP], tl.float32)
    for n0 in range(0, N, GROUP):
        # Pointers, weights and sums of GROUP sources.
        p_v = ()
        p_g = ()
        dots = ()
        weights = ()
        for k in tl.static_range(GROUP):
            n = tl.minimum(n0 + k, N - 1)
            p_v = p_v + (row_pointer(table, n, t, D, like, VECTOR),)
            p_g = p_g + (row_pointer(table, N + n, t, D, grad, VECTOR),)
            for s in tl.static_range(S):
                dots = dots + (tl.zeros([BD // 8], tl.float32),)
                weight = tl.load(p + _place(n, s, N, PS, GIVEN))
                weights = weights + (weight,)
        for c in range(0, D, BD):
            o_d = c + tl.arange(0, BD)
            m_d = o_d < D
            v = ()
            g = ()
            for k in tl.static_range(GROUP):
                m = m_d & (n0 + k < N)
                b_v = tl.load(p_v[k] + o_d, mask=m, other=0.0)
                v = v + (b_v,)
                if FRESH:
                    g = g + (tl.zeros([BD], tl.float32),)
                else:
                    g = g + (load_wide(p_g[k] + o_d, m),)
            # Each dout goes into the dot products, and into the gradients of the sources.
            new_dots = ()
            for s in tl.static_range(S):
                d = load_wide(douts[s] + o_d, m_d)
                if REBUILD:
                    first = row_pointer(table, 2 * N + 1, t, D, grad, VECTOR)
                    b_first = (w_0 * d).to(grad.dtype.element_ty)
                    tl.store(first + o_d, b_first, mask=m_d & (n0 == 0))
                new_g = ()
                for k in tl.static_range(GROUP):
                    # Eight neighbours lie in one thread, which adds them up without an exchange.
                    product = d * v[k].to(tl.float32)
                    eights = tl.sum(tl.reshape(product, (BD // 8, 8)), 1)
                    new_dots = new_dots + (dots[s * GROUP + k] + eights,)
                    new_g = new_g + (g[k] + weights[k * S + s] * d,)
                g = new_g
            dots = new_dots
            for k in tl.static_range(GROUP):
                m = m_d & (n0 + k < N)
                tl.store(p_g[k] + o_d, g[k], mask=m)
        # u of each source, and what delta needs of it.
        for k in tl.static_range(GROUP):
            parts = ()
            for s in tl.static_range(SP):
                part = dots[s * GROUP + k] if s < S else tl.zeros([BD // 8], tl.float32)
                parts = parts + (part,)
            u = _sum_together(parts, SP, LEVELS, BD // 8)
            n = n0 + k
            m = (o_s < S) & (n < N)
            if not GIVEN:
                w = tl.load(p + n * PS + o_s, mask=m, other=0.0)
                delta += w * u
            tl.store(dz + _place(n, o_s, N, PS, GIVEN), u, mask=m)
    if REBUILD:
        b_whole = tl.load(whole + t + o_s)
        tl.store(dz - 1 + o_s, b_whole * (1.0 - w_0) - delta)
        delta = b_whole
    if HAS_LSE:
        m = (o_s < S) & (s0 + o_s >= unasked)
        p_address = table + 2 * N + PS + s0 + o_s - unasked
        address = tl.load(p_address, mask=m, other=0)
        p_dlse = address.to(tl.pointer_type(tl.float32)) + t
        delta -= tl.load(p_dlse, mask=m, other=0.0)
    # Now that all sources are known, u becomes dz.
    if not GIVEN:
        tl.debug_barrier()
        m = o_s < S
        for n in range(N):
            o_n = n * PS + o_s
            w = tl.load(p + o_n, mask=m, other=0.0)
            u = tl.load(dz + o_n, mask=m, other=0.0)
            tl.store(dz + o_n, w * (u - delta), mask=m)


def _chunks(count: int, most: int) -> list[tuple[int, int]]:
    """Cut queries into chunks: the first of each, and how many."""
    return [(s, min(most, count - s)) for s in range(0, count, most)]


def _floor_power(value: int) -> int:
    """Return the largest power of two that is not above the value."""
    return 1 << (value.bit_length() - 1)


@functools.lru_cache(1024)
def _normalise(rows: int, count: int, queries: int) -> Launch:
    grid = (ceil_div(rows, 32),)
    constants = {"T": 32, "SP": power_of_2(queries)}
    return Launch(_softmax, grid, (rows, count, queries), constants, num_warps=4)


@functools.lru_cache(1024)
def _forward(
    rows: int,
    width: int,
    count: int,
    queries: int,
    step: int,
    eps: float,
    norm: bool,
    vector: bool,
    given: bool,
):
    """Prepare the sums: the first query of each chunk, and its launch."""
    numbers = (rows, count, queries, step, width, eps)
    sums = []
    for s, now in _chunks(queries, MAX_QUERIES):
        # A program has 16384 numbers of sums at most: many queries take a row in parts.
        block = min(power_of_2(width), max(128, _floor_power(16384 // now)))
        least_warps = max(ceil_div(now * block, 1536), ceil_div(block, 1024))
        constants = {
            "S": now,
            "NORM": norm and s == 0,
            "BD": block,
            "ONE": block >= width,
            "VECTOR": vector,
            "GIVEN": given,
        }
        warps = min(8, power_of_2(least_warps))
        run = Launch(_mix, (rows,), numbers, constants, num_warps=warps)
        sums.append((s, run))
    return sums


def launch_mix_given(sources, weights, out) -> None:
    """Sum the sources by weights (..., S, N), or (S, N) for all tokens, to `out` (S, ..., D)."""
    queries, count = weights.shape[-2:]
    addresses = addresses_of(sources)
    table = address_table(addresses, weights.device)
    options = (_step(weights), 0.0, False, vectorised(sources[0], addresses), True)
    for s, run in _forward(*rows_of(sources[0]), count, queries, *options):
        chunk_weights = weights.view(-1)[s * count :] if s else weights
        chunk_out = out[s:] if s else out
        run(table, chunk_weights, sources[0], chunk_out, out, weights, weights)


def _step(weights: Tensor) -> int:
    """Return the numbers from a token's weights to the next token's: 0 if all have the same."""
    by_token = weights.dim() > 2
    return math.prod(weights.shape[-2:]) if by_token else 0


def _outputs(sources, scores, norm_weight, eps, exact):
    source, score, normed = sources[0], scores[0], norm_weight is not None
    tokens, queries = source.shape[:-1], score.shape[-1]
    return (
        torch.empty_like(source) if normed else None,
        score.new_empty(tokens) if normed else None,
        (score if exact else source).new_empty(queries - normed, *source.shape),
        score.new_empty(queries, *tokens),
        score.new_empty(*tokens, len(sources), queries),
    )


@writer(_outputs, writes=("x", "rstd", "out", "lse", "p"))
def mix(
    sources: Sequence[Tensor],
    scores: Sequence[Tensor],
    norm_weight: Tensor | None,
    eps: float,
    exact: bool,
    x: Tensor | None,
    rstd: Tensor | None,
    out: Tensor,
    lse: Tensor,
    p: Tensor,
) -> None:
    """Mix N sources (..., D) by their scores, (..., N, S) in fp32 in parts (..., n, S).

    Writes the first output normed `x`, its 1/rms `rstd`, the outputs `out` (S, ..., D), their
    log-sum-exps `lse` (S, ...) and the weights `p` (..., N, S). With `norm_weight`, `out` lacks the
    first; without, x and rstd are None. exact: `out` in fp32.
    """
    launches["mix"] += 1
    count, queries = p.shape[-2:]
    norm, addresses = norm_weight is not None, addresses_of(sources)
    placed = [*map(_at_even_distances, scores)]
    table = address_table([*addresses, *_first_tokens(placed)], sources[0].device)
    vector = vectorised(sources[0], addresses)
    rows, width = rows_of(sources[0])
    _normalise(rows, count, queries)(table, p, lse)
    # A kernel takes a pointer for every argument; others stand in for absent tensors.
    first = p if x is None else x
    options = (count * queries, eps, norm, vector, False)
    for s, run in _forward(rows, width, count, queries, *options):
        shift = s - (norm and s > 0)
        chunk_out = out[shift:] if shift else out
        run(
            table,
            p.view(-1)[s:] if s else p,
            sources[0],
            chunk_out if out.numel() else first,
            first,
            p if rstd is None else rstd,
            norm_weight if norm_weight is not None and s == 0 else p,
        )


def _at_even_distances(scores: Tensor) -> tuple[Tensor, int]:
    """Return scores (..., n, S), and the distance between tokens.

    They are copied unless their queries lie side by side and tokens at one distance, over the ends
    of rows too. To join by torch.cat what is used where it lies would take as long as two passes.
    """
    *lengths, _, _ = scores.shape
    *strides, _, one = scores.stride()
    axes = [axis for axis in zip(lengths, strides) if axis[0] > 1]
    even = all(far == near * length for (_, far), (length, near) in pairwise(axes))
    if one == 1 and even:
        return scores, axes[-1][1] if axes else 0
    return scores.contiguous(), scores.shape[-2] * scores.shape[-1]


def _first_tokens(scores: Sequence[tuple[Tensor, int]]) -> list[int]:
    """List the addresses of each source's scores for the first token, then for the second."""
    first, second = [], []
    for piece, distance in scores:
        start, step = piece.data_ptr(), 4 * piece.stride(-2)
        for n in range(piece.shape[-2]):
            first.append(start + step * n)
            second.append(start + step * n + 4 * distance)
    return first + second


@functools.lru_cache(1024)
def _backward(
    rows: int,
    width: int,
    count: int,
    queries: int,
    step: int,
    dlses: int,
    fresh: bool,
    vector: bool,
    rebuild: bool,
    given: bool,
):
    """Prepare a launch for each chunk of queries."""
    warps = 1 if width <= 512 else 2  # narrow: a fifth faster on an H200
    chunks = []
    for s, now in _chunks(queries, MAX_QUERIES_BACKWARD):
        constants = {
            "S": now,
            "SP": power_of_2(now),
            "LEVELS": (now - 1).bit_length(),
            "FRESH": fresh and s == 0,
            "HAS_LSE": dlses > 0,
            "BD": 256 * warps,
            "GROUP": min(GROUP, count),
            "VECTOR": vector,
            "REBUILD": rebuild,
            "GIVEN": given,
        }
        numbers = (rows, count, queries, step, width, s, queries - dlses)
        chunks.append(Launch(_mix_backward, (rows,), numbers, constants, num_warps=warps))
    return chunks


def launch_mix_backward(
    sources, p, douts, dlses, gradients, whole, dz, first, *, fresh: bool
) -> None:
    """Add dv to `gradients` (fresh: write it there), and write dz (..., N, S).

    With `whole`, write the gradient `first` of the source that was not kept: such a read has one
    query and no log-sum-exp.
    """
    launches["mix_backward"] += 1
    rebuild = whole is not None
    outputs = [first] if rebuild else []
    addresses = addresses_of([*sources, *gradients, *douts, *outputs])
    table = address_table([*addresses, *addresses_of(dlses)], p.device)
    count, queries = p.shape[-2:]
    source = sources[0]
    vector = vectorised(source, addresses)
    options = (count * queries, len(dlses), fresh, vector, rebuild, False)
    whole = whole if rebuild else p
    for run in _backward(*rows_of(source), len(sources), queries, *options):
        run(table, p, dz, whole, source, gradients[0], douts[0])


def launch_mix_given_backward(sources, weights, douts, gradients, dweights, *, fresh: bool) -> None:
    """Run the backward of `launch_mix_given`.

    It adds to `gradients` (fresh: writes them), and writes the tokens' `dweights` (..., S, N).
    """
    addresses = addresses_of([*sources, *gradients, *douts])
    table = address_table(addresses, weights.device)
    source = sources[0]
    vector = vectorised(source, addresses)
    options = (_step(weights), 0, fresh, vector, False, True)
    for run in _backward(*rows_of(source), len(sources), len(douts), *options):
        run(table, weights, dweights, weights, source, gradients[0], douts[0])


def _gradients(sources, p, douts, dlses, exact, whole):
    dtype = torch.float32 if exact else sources[0].dtype
    first = None if whole is None else torch.empty_like(sources[0], dtype=dtype)
    others = [torch.empty_like(source, dtype=dtype) for source in sources]
    return torch.empty_like(p), first, others


@writer(_gradients, writes=("dz", "first", "gradients"))
def mix_backward(
    sources: Sequence[Tensor],
    p: Tensor,
    douts: Sequence[Tensor],
    dlses: Sequence[Tensor],
    exact: bool,
    whole: Tensor | None,
    dz: Tensor,
    first: Tensor | None,
    gradients: Sequence[Tensor],
) -> None:
    """Write dz, and the gradients of the sources. exact: these in fp32.

    Arguments:
        dlses: (...) each, of the last so many queries.
        whole: for one query, <dout, out> of each token (...): then the first of the sources that
            were mixed is not among `sources`, and its gradient is `first`.
    """
    launch_mix_backward(sources, p, douts, dlses, gradients, whole, dz, first, fresh=True)


def _gradients_besides(sources, p, douts, dlses, gradients, whole):
    return torch.empty_like(p), None if whole is None else torch.empty_like(gradients[0])


@writer(_gradients_besides, writes=("dz", "first"), adds_to=("gradients",))
def mix_backward_(
    sources: Sequence[Tensor],
    p: Tensor,
    douts: Sequence[Tensor],
    dlses: Sequence[Tensor],
    gradients: Sequence[Tensor],
    whole: Tensor | None,
    dz: Tensor,
    first: Tensor | None,
) -> None:
    """Do as `mix_backward` does, adding into `gradients` in place."""
    launch_mix_backward(sources, p, douts, dlses, gradients, whole, dz, first, fresh=False)
