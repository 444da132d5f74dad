# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Phase 1: S queries mix N finished sources, given their scores; softmax over sources in fp32, one downcast.

    p_ns = softmax_n(z_ns);  out_s = sum_n p_ns v_n;  lse_s = log sum_n exp(z_ns)      v_n (tokens, D), z (tokens, N, S)
    u_ns = <dout_s, v_n>;   dz_ns = p_ns (u_ns - sum_m p_ms u_ms + dlse_s);   dv_n = sum_s p_ns dout_s
The first query's output may leave through the RMSNorm of the sublayer that opens the block. Weights may be given
instead of scores (see `ops.banks`): u_ns is then the gradient of p_ns.

Passes over (tokens x D): forward N reads, S writes; backward S + N reads and, into the gradient that later reads of the
same source have begun, N reads and N writes. Forward: a program holds S sums for one token, looping over sources.
Backward: one or two warps own a token and take four sources at once, so that the S rows of dout are fetched N / 4
times, from cache; the S * N dot products are summed per thread first, and exchanged once per source.
"""

import functools
from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import Launch, address_table, addresses_of, launches
from headwater.ops.triton.registration import writer
from headwater.ops.triton.tiles import ceil_div, power_of_2, row_pointer, rows_of, vectorised

GROUP = 4  # sources that a program of the backward takes at once (at most)
MAX_QUERIES, MAX_QUERIES_BACKWARD = (
    16,
    8,
)  # per launch, since a token's sums stay in registers; more read again


@triton.jit
def _scores(table, n, o_t, o_s, m, N, like):
    """Load scores of source n for tokens o_t and queries o_s.

    After N sources the table has the addresses of their first token's scores, and then of their second token's: the
    difference is the distance between tokens.
    """
    start = tl.load(table + N + n)
    address = start + o_t * (tl.load(table + 2 * N + n) - start)
    return tl.load(
        address.to(tl.pointer_type(like.dtype.element_ty))[:, None] + o_s[None, :],
        mask=m,
        other=0.0,
    )


@triton.jit(do_not_specialize=["M", "N", "S"])
def _softmax(table, p, lse, M, N, S, T: tl.constexpr, SP: tl.constexpr):
    o_t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    o_s = tl.arange(0, SP)
    m = (o_t < M)[:, None] & (o_s < S)[None, :]
    o = o_t[:, None] * N * S + o_s[None, :]
    top = tl.full([T, SP], float("-inf"), tl.float32)
    for n in range(N):
        top = tl.maximum(top, _scores(table, n, o_t, o_s, m, N, p))
    total = tl.zeros([T, SP], tl.float32)
    for n in range(N):
        total += tl.exp(_scores(table, n, o_t, o_s, m, N, p) - top)
    log = top + tl.log(total)
    tl.store(lse + o_s[None, :] * M + o_t[:, None], log, mask=m)
    for n in range(N):
        tl.store(p + o + n * S, tl.exp(_scores(table, n, o_t, o_s, m, N, p) - log), mask=m)


@triton.jit
def _place(n, s, N, PS, GIVEN: tl.constexpr):
    """Offset of the weight of source n for query s in a token's: (N, PS), or (PS, N) where weights are given."""
    return s * N + n if GIVEN else n * PS + s


@triton.jit
def _sums(
    table,
    p,
    t,
    o_d,
    m_d,
    N,
    PS,
    D,
    like,
    S: tl.constexpr,
    VECTOR: tl.constexpr,
    GIVEN: tl.constexpr,
):
    """S sums over the sources of token t, for channels o_d. The next source is under way while one is used."""
    sums = ()
    for _ in tl.static_range(S):
        sums = sums + (tl.zeros_like(o_d).to(tl.float32),)
    ahead = tl.load(row_pointer(table, 0, t, D, like, VECTOR) + o_d, mask=m_d, other=0.0)
    p_next = row_pointer(table, tl.minimum(1, N - 1), t, D, like, VECTOR)
    for n in range(N):
        v = ahead.to(tl.float32)
        ahead = tl.load(p_next + o_d, mask=m_d & (n + 1 < N), other=0.0)
        p_next = row_pointer(table, tl.minimum(n + 2, N - 1), t, D, like, VECTOR)
        grown = ()
        for s in tl.static_range(S):
            grown = grown + (sums[s] + tl.load(p + _place(n, s, N, PS, GIVEN)) * v,)
        sums = grown
    return sums


@triton.jit(do_not_specialize=["M", "N", "PS", "PT"])
def _mix(
    table, p, like, out, x, rstd, g, M, N, PS, PT, D, eps,
    S: tl.constexpr, NORM: tl.constexpr, BD: tl.constexpr, ONE: tl.constexpr, VECTOR: tl.constexpr,
    GIVEN: tl.constexpr,
):  # fmt: skip
    # like carries the element type of the sources. out (S, M, D); with NORM the first query goes to x (M, D) instead,
    # and out holds the other S - 1. ONE: BD >= D. Tokens go backwards, as in merge.py; their weights are `PT` apart.
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
            tl.store(
                out + ((s - NORM) * M + t) * D + o_d, sums[s].to(out.dtype.element_ty), mask=m_d
            )
    if NORM:
        r = 1.0 / tl.sqrt(tl.sum(squares, 0) / D + eps)
        tl.store(rstd + t, r)
        for c in range(0, BD if ONE else D, BD):
            o_d = c + tl.arange(0, BD)
            m_d = o_d < D
            if not ONE:  # the row does not fit: sum it again from sources that are still in cache
                first = _sums(table, p, t, o_d, m_d, N, PS, D, like, 1, VECTOR, GIVEN)[0]
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
def _sum_together(parts, COUNT: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr):
    """COUNT vectors to the vector of their sums, in one exchange between threads; COUNT is 2 ** LEVELS."""
    for level in tl.static_range(LEVELS):
        joined = ()
        for e in tl.static_range(COUNT >> (level + 1)):
            joined = joined + (tl.join(parts[e], parts[e + (COUNT >> (level + 1))]),)
        parts = joined
    return tl.sum(tl.reshape(parts[0], (WIDTH, COUNT)), 0)


@triton.jit(do_not_specialize=["M", "N", "PS", "PT", "s0", "unasked"])
def _mix_backward(
    table, p, dz, whole, like, grad, dout, M, N, PS, PT, D, s0, unasked,
    S: tl.constexpr, SP: tl.constexpr, LEVELS: tl.constexpr, FRESH: tl.constexpr, HAS_LSE: tl.constexpr,
    BD: tl.constexpr, GROUP: tl.constexpr, VECTOR: tl.constexpr, REBUILD: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    # table: the addresses of N sources, N gradients to add to (FRESH: to write), all PS douts, and the dlses of all
    # queries but the first `unasked`.
    # like, grad and dout carry the element types of the sources, of their gradients and of the douts.
    # dz (M, N, PS) receives u, and is finished once all N are known. This launch serves queries s0 to s0 + S.
    # GIVEN: dz (M, PS, N) is u, and p is like it, or one (PS, N) for all tokens, `PT` 0 apart.
    # REBUILD: one query, and before the N sources another that was not kept; `whole` (M,) is <dout, out>, from which
    # its share follows. The address of its gradient follows the dout's; p and dz have N + 1 rows.
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
        douts = douts + (row_pointer(table, 2 * N + s0 + s, t, D, dout, VECTOR),)
    delta = tl.zeros([SP], tl.float32)
    for n0 in range(0, N, GROUP):
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
                weights = weights + (tl.load(p + _place(n, s, N, PS, GIVEN)),)
        for c in range(0, D, BD):
            o_d = c + tl.arange(0, BD)
            v = ()
            g = ()
            for k in tl.static_range(GROUP):
                m = (o_d < D) & (n0 + k < N)
                v = v + (tl.load(p_v[k] + o_d, mask=m, other=0.0),)
                if FRESH:
                    g = g + (tl.zeros([BD], tl.float32),)
                else:
                    g = g + (tl.load(p_g[k] + o_d, mask=m, other=0.0).to(tl.float32),)
            grown = ()
            for s in tl.static_range(S):
                d = tl.load(douts[s] + o_d, mask=o_d < D, other=0.0).to(tl.float32)
                if REBUILD:
                    first = row_pointer(table, 2 * N + 1, t, D, grad, VECTOR)
                    tl.store(
                        first + o_d, (w_0 * d).to(grad.dtype.element_ty), mask=(o_d < D) & (n0 == 0)
                    )
                shared = ()
                for k in tl.static_range(GROUP):
                    product = tl.reshape(
                        d * v[k].to(tl.float32), (BD // 8, 8)
                    )  # eight neighbours lie in one thread
                    grown = grown + (dots[s * GROUP + k] + tl.sum(product, 1),)
                    shared = shared + (g[k] + weights[k * S + s] * d,)
                g = shared
            dots = grown
            for k in tl.static_range(GROUP):
                m = (o_d < D) & (n0 + k < N)
                tl.store(p_g[k] + o_d, g[k].to(grad.dtype.element_ty), mask=m)
        for k in tl.static_range(GROUP):
            parts = ()
            for s in tl.static_range(SP):
                parts = parts + (dots[s * GROUP + k] if s < S else tl.zeros([BD // 8], tl.float32),)
            u = _sum_together(parts, SP, LEVELS, BD // 8)
            m = (o_s < S) & (n0 + k < N)
            if not GIVEN:
                delta += tl.load(p + (n0 + k) * PS + o_s, mask=m, other=0.0) * u
            tl.store(dz + _place(n0 + k, o_s, N, PS, GIVEN), u, mask=m)
    if REBUILD:
        b_whole = tl.load(whole + t + o_s)
        tl.store(dz - 1 + o_s, b_whole * (1.0 - w_0) - delta)
        delta = b_whole
    if HAS_LSE:
        m = (o_s < S) & (s0 + o_s >= unasked)
        dlse = tl.load(table + 2 * N + PS + s0 + o_s - unasked, mask=m, other=0).to(
            tl.pointer_type(tl.float32)
        )
        delta -= tl.load(dlse + t, mask=m, other=0.0)
    if not GIVEN:
        tl.debug_barrier()
        for n in range(N):
            w = tl.load(p + n * PS + o_s, mask=o_s < S, other=0.0)
            u = tl.load(dz + n * PS + o_s, mask=o_s < S, other=0.0)
            tl.store(dz + n * PS + o_s, w * (u - delta), mask=o_s < S)


def _chunks(count: int, most: int) -> list[tuple[int, int]]:
    return [(s, min(most, count - s)) for s in range(0, count, most)]


def _floor_power(value: int) -> int:
    return 1 << (value.bit_length() - 1)


@functools.lru_cache(1024)
def _normalise(rows: int, count: int, queries: int) -> Launch:
    constants = {"T": 32, "SP": power_of_2(queries)}
    return Launch(_softmax, (ceil_div(rows, 32),), (rows, count, queries), constants, num_warps=4)


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
    """The sums, with the first of the queries that each launch of them serves."""
    numbers, sums = (rows, count, queries, step, width, eps), []
    for s, now in _chunks(queries, MAX_QUERIES):
        block = min(power_of_2(width), max(128, _floor_power(16384 // now)))
        warps = min(8, power_of_2(max(ceil_div(now * block, 1536), ceil_div(block, 1024))))
        sizes = {"S": now, "NORM": norm and s == 0, "BD": block, "ONE": block >= width}
        constants = sizes | {"VECTOR": vector, "GIVEN": given}
        sums.append((s, Launch(_mix, (rows,), numbers, constants, num_warps=warps)))
    return sums


def launch_mix_given(sources, weights, out) -> None:
    """Sums of the sources by weights (..., S, N), or (S, N) for all tokens, to `out` (S, ..., D)."""
    queries, count = weights.shape[-2:]
    addresses = addresses_of(sources)
    table = address_table(addresses, weights.device)
    options = (_step(weights), 0.0, False, vectorised(sources[0], addresses), True)
    for s, mixed in _forward(*rows_of(sources[0]), count, queries, *options):
        share = (weights.view(-1)[s * count :], out[s:]) if s else (weights, out)
        mixed(table, share[0], sources[0], share[1], out, weights, weights)


def _step(weights: Tensor) -> int:
    """Numbers from the weights of a token to those of the next: none, where all have the same."""
    return weights.shape[-2] * weights.shape[-1] if weights.dim() > 2 else 0


def _outputs(sources, scores, norm_weight, eps, exact):
    source, score, normed = sources[0], scores[0], norm_weight is not None
    tokens, queries = source.shape[:-1], score.shape[-1]
    x = torch.empty_like(source) if normed else None
    rstd = score.new_empty(tokens) if normed else None
    out = (score if exact else source).new_empty(queries - normed, *source.shape)
    return (
        x,
        rstd,
        out,
        score.new_empty(queries, *tokens),
        score.new_empty(*tokens, len(sources), queries),
    )


@writer(_outputs)
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
    """N sources (..., D) and their scores, (..., N, S) in fp32 in parts (..., n, S), to: the first output normed, its
    1/rms, the outputs (S, ..., D), their log-sum-exp (S, ...) and the weights (..., N, S). With `norm_weight` the
    outputs lack the first; without, there is no normed one and no 1/rms. exact: the outputs in fp32."""
    launches["mix"] += 1
    count, queries = p.shape[-2:]
    norm, addresses = norm_weight is not None, addresses_of(sources)
    placed = [*map(_at_even_distances, scores)]
    table = address_table([*addresses, *_first_tokens(placed)], sources[0].device)
    vector = vectorised(sources[0], addresses)
    rows, width = rows_of(sources[0])
    _normalise(rows, count, queries)(table, p, lse)
    first = p if x is None else x
    for s, mixed in _forward(
        rows, width, count, queries, count * queries, eps, norm, vector, False
    ):
        shift = s - (norm and s > 0)
        mixed(
            table,
            p.view(-1)[s:] if s else p,
            sources[0],
            (out[shift:] if shift else out) if out.numel() else first,
            first,
            p if rstd is None else rstd,
            norm_weight if norm_weight is not None and s == 0 else p,
        )


def _at_even_distances(scores: Tensor) -> tuple[Tensor, int]:
    """Scores (..., n, S), copied unless their queries lie side by side and tokens at one distance, over the ends of
    rows too; and that distance. To join what is used where it lies by torch.cat would take as long as two passes."""
    *lengths, _, _ = scores.shape
    *strides, _, one = scores.stride()
    axes = [axis for axis in zip(lengths, strides) if axis[0] > 1]
    if one == 1 and all(far == near * length for (_, far), (length, near) in pairwise(axes)):
        return scores, axes[-1][1] if axes else 0
    return scores.contiguous(), scores.shape[-2] * scores.shape[-1]


def _first_tokens(scores: Sequence[tuple[Tensor, int]]) -> list[int]:
    """The addresses of each source's scores for the first token, and then for the second."""
    first, second = [], []
    for piece, distance in scores:
        start, step = piece.data_ptr(), 4 * piece.stride(-2)
        first += [start + step * n for n in range(piece.shape[-2])]
        second += [start + step * n + 4 * distance for n in range(piece.shape[-2])]
    return first + second


@functools.lru_cache(1024)
def _backward(
    rows: int, width: int, count: int, queries: int, step: int,
    dlses: int, fresh: bool, vector: bool, rebuild: bool, given: bool,
):  # fmt: skip
    """A launch for every so many queries."""
    warps, chunks = 1 if width <= 512 else 2, []  # narrow: a fifth faster on an H200
    for s, now in _chunks(queries, MAX_QUERIES_BACKWARD):
        constants = {
            "S": now, "SP": power_of_2(now), "LEVELS": (now - 1).bit_length(), "FRESH": fresh and s == 0,
            "HAS_LSE": dlses > 0, "BD": 256 * warps, "GROUP": min(GROUP, count), "VECTOR": vector, "REBUILD": rebuild,
            "GIVEN": given,
        }  # fmt: skip
        numbers = (rows, count, queries, step, width, s, queries - dlses)
        chunks.append(Launch(_mix_backward, (rows,), numbers, constants, num_warps=warps))
    return chunks


def launch_mix_backward(
    sources, p, douts, dlses, gradients, whole, dz, first, *, fresh: bool
) -> None:
    """Adds dv to `gradients` (fresh: writes it there), and writes dz (..., N, S) and, with `whole`, the gradient
    `first` of the source that was not kept."""
    assert whole is None or (
        not dlses and p.shape[-1] == 1
    )  # what is rebuilt has one query and no log-sum-exp
    launches["mix_backward"] += 1
    outputs = [] if whole is None else [first]
    addresses = addresses_of([*sources, *gradients, *douts, *outputs])
    table = address_table([*addresses, *addresses_of(dlses)], p.device)
    options = (
        p.shape[-2] * p.shape[-1],
        len(dlses),
        fresh,
        vectorised(sources[0], addresses),
        whole is not None,
        False,
    )
    for gather in _backward(*rows_of(sources[0]), len(sources), p.shape[-1], *options):
        gather(table, p, dz, p if whole is None else whole, sources[0], gradients[0], douts[0])


def launch_mix_given_backward(sources, weights, douts, gradients, dweights, *, fresh: bool) -> None:
    """Run the backward of `launch_mix_given`.

    It adds to `gradients` (fresh: writes them), and writes the tokens' `dweights` (..., S, N).
    """
    addresses = addresses_of([*sources, *gradients, *douts])
    table = address_table(addresses, weights.device)
    options = (_step(weights), 0, fresh, vectorised(sources[0], addresses), False, True)
    for gather in _backward(*rows_of(sources[0]), len(sources), len(douts), *options):
        gather(table, weights, dweights, weights, sources[0], gradients[0], douts[0])


def _gradients(sources, p, douts, dlses, exact, whole):
    dtype = torch.float32 if exact else sources[0].dtype
    first = None if whole is None else torch.empty_like(sources[0], dtype=dtype)
    return torch.empty_like(p), first, [torch.empty_like(source, dtype=dtype) for source in sources]


@writer(_gradients)
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
    """dz, and the gradients of the sources. exact: these in fp32. `dlses`: (...) each, of the last so many queries.

    `whole`: for one query, <dout, out> of each token (...): then the first of the sources that were mixed is not among
    `sources`, and its gradient is `first`.
    """
    launch_mix_backward(sources, p, douts, dlses, gradients, whole, dz, first, fresh=True)


def _gradients_besides(sources, p, douts, dlses, gradients, whole):
    return torch.empty_like(p), None if whole is None else torch.empty_like(gradients[0])


@writer(_gradients_besides, adds_to=("gradients",))
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
