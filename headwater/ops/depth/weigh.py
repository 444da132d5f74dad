# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""One read with the options of Attention Residuals, in one launch forward and one backward.

    z_nh = r_n <f_h, k_nh>;   w_nh = softmax_n(z_nh), or sigmoid(z_nh);   x_h = sum_n w_nh v_nh      v_n, x (tokens, D)
    u_nh = <dx_h, v_nh>;   dz_nh = w_nh (u_nh - sum_m w_mh u_mh), or w_nh (1 - w_nh) u_nh
    dv_nh = w_nh dx_h + r_n dz_nh f_h - (r_n^2 / K) (sum_h dz_nh z_nh) k_nh;   df_h = sum_n r_n dz_nh k_nh

v_nh are H equal groups of a source's channels; keys k_n its last K channels (with several heads all), and r_n = 1 / rms
of them, or one; f = query * key_weight, of all tokens (K,) or of each (tokens, K), in fp32.

Passes over (tokens x D): forward N reads and one write; backward N + 1 reads and, into the gradients that later reads
have begun, N reads and N writes. With a softmax the backward reads a token's sources twice, the second time from cache;
logits are computed anew each time, so that nothing is kept but the largest. A program owns a token (backward: a range
of them, so that df needs no atomics) and takes so many sources at once that their rows are under way together.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import Launch, address_table, addresses_of, launches
from headwater.ops.triton.registration import writer
from headwater.ops.triton.tiles import (
    ceil_div,
    power_of_2,
    processors,
    row_pointer,
    rows_of,
    vectorised,
)

MAX_GROUP = 8  # sources that a program takes at once (at most)
WARPS = 64  # of all programs of the backward on a multiprocessor; more would leave more parts of df to sum


@triton.jit
def _channels(D: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, CP: tl.constexpr):
    """Heads (HP,), their channels (HP, CP), and which of these there are."""
    C: tl.constexpr = D // H
    o_h, o_c = tl.arange(0, HP), tl.arange(0, CP)
    return o_h, o_h[:, None] * C + o_c[None, :], (o_h < H)[:, None] & (o_c < C)[None, :]


@triton.jit
def _query(f, t, o_d, m_k, D: tl.constexpr, K: tl.constexpr, EACH: tl.constexpr):
    return tl.load((f + t * K if EACH else f) + o_d - (D - K), mask=m_k, other=0.0)


@triton.jit
def _rows(table, n0, N, t, o_d, m_d, D: tl.constexpr, like, G: tl.constexpr, VECTOR: tl.constexpr):
    """Sources from n0 on: which (G,), whether there are so many (G, 1), and their channels of token t (G, HP, CP)."""
    o_n = n0 + tl.arange(0, G)
    m_n = (o_n < N)[:, None]
    o_n = tl.minimum(o_n, N - 1)
    p_v = row_pointer(table, o_n, t, D, like, VECTOR)[:, None, None] + o_d[None]
    return o_n, m_n, tl.load(p_v, mask=m_n[:, :, None] & m_d[None], other=0.0).to(tl.float32)


@triton.jit
def _logits(v, b_f, m_k, eps, D: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr):
    """z (G, HP) and 1 / rms (G, 1) of the keys of sources v (G, HP, CP), and these keys."""
    keys = tl.where(m_k[None], v, 0.0) if K < D else v
    z = tl.sum(keys * b_f[None], 2)
    r = tl.full([v.shape[0], 1], 1.0, tl.float32)
    if NORM:
        r = 1.0 / tl.sqrt(tl.sum(tl.sum(keys * keys, 2), 1, keep_dims=True) / K + eps)
    return z * r, r, keys


@triton.jit(do_not_specialize=["N"])
def _weigh(
    table, f, x, largest, N, eps,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr, NORM: tl.constexpr, EACH: tl.constexpr,
    HP: tl.constexpr, CP: tl.constexpr, G: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    o_h, o_d, m_d = _channels(D, H, HP, CP)
    m_k = m_d & (o_d >= D - K)
    b_f = _query(f, t, o_d, m_k, D, K, EACH)
    top = tl.full([HP], float("-inf"), tl.float32)
    total = tl.zeros(
        [G, HP], tl.float32
    )  # of every G-th source: threads exchange theirs at the end
    acc = tl.zeros([G, HP, CP], tl.float32)
    for n0 in range(0, N, G):
        _, m_n, v = _rows(table, n0, N, t, o_d, m_d, D, x, G, VECTOR)
        z, _, _ = _logits(v, b_f, m_k, eps, D, K, NORM)
        if SOFTMAX:
            z = tl.where(m_n, z, float("-inf"))
            new = tl.maximum(top, tl.max(z, 0))
            keep = tl.exp(top - new)[None, :]
            w = tl.exp(z - new[None, :])
            top = new
            total = total * keep + w
            acc = acc * keep[:, :, None]
        else:
            w = tl.sigmoid(z)
        acc += w[:, :, None] * v
    b_x = tl.sum(acc, 0)
    if SOFTMAX:
        b_x = b_x / tl.sum(total, 0)[:, None]
        tl.store(largest + t * H + o_h, top, mask=o_h < H)
    tl.store(x + t * D + o_d, b_x.to(x.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["M", "N", "tokens"])
def _weigh_backward(
    table, f, largest, dx, like, df, M, N, eps, tokens,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr, NORM: tl.constexpr, EACH: tl.constexpr,
    HP: tl.constexpr, CP: tl.constexpr, G: tl.constexpr, VECTOR: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    # table: the addresses of N sources, and of N gradients to add to (FRESH: to write), both of like's type.
    # df: (tokens, K), or, of one query for all, a part (K,) of each program.
    start = tl.program_id(0).to(tl.int64) * tokens
    o_h, o_d, m_d = _channels(D, H, HP, CP)
    m_k = m_d & (o_d >= D - K)
    b_f = _query(f, 0, o_d, m_k, D, K, False)
    acc = tl.zeros([G, HP, CP], tl.float32)
    for i in range(tl.minimum(tokens, M - start)):
        t = start + i
        if EACH:
            b_f = _query(f, t, o_d, m_k, D, K, True)
            acc = tl.zeros([G, HP, CP], tl.float32)
        d = tl.load(dx + t * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        top = tl.zeros([1, HP], tl.float32)
        total = tl.zeros([G, HP], tl.float32)
        mean = tl.zeros([G, HP], tl.float32)
        if SOFTMAX:
            top = tl.load(largest + t * H + o_h, mask=o_h < H, other=0.0)[None, :]
            for n0 in range(0, N, G):
                _, m_n, v = _rows(table, n0, N, t, o_d, m_d, D, like, G, VECTOR)
                z, _, _ = _logits(v, b_f, m_k, eps, D, K, NORM)
                w = tl.where(m_n, tl.exp(z - top), 0.0)
                total += w
                mean += w * tl.sum(d[None] * v, 2)
            total = tl.sum(total, 0)[None, :]
            mean = tl.sum(mean, 0)[None, :] / total
        for n0 in range(0, N, G):
            o_n, m_n, v = _rows(table, n0, N, t, o_d, m_d, D, like, G, VECTOR)
            p_g = row_pointer(table, N + o_n, t, D, like, VECTOR)[:, None, None] + o_d[None]
            m = m_n[:, :, None] & m_d[None]
            z, r, keys = _logits(v, b_f, m_k, eps, D, K, NORM)
            u = tl.sum(d[None] * v, 2)
            if SOFTMAX:
                w = tl.where(m_n, tl.exp(z - top), 0.0) / total
                dz = w * (u - mean)
            else:
                w = tl.sigmoid(z)
                dz = w * (1.0 - w) * u
            slope = (dz * r)[:, :, None]
            g = w[:, :, None] * d[None] + slope * b_f[None]
            if NORM:
                pull = tl.sum(dz * z, 1, keep_dims=True) * r * r / K
                g -= pull[:, :, None] * keys
            if not FRESH:
                g += tl.load(p_g, mask=m, other=0.0).to(tl.float32)
            tl.store(p_g, g.to(like.dtype.element_ty), mask=m)
            acc += slope * keys
        if EACH:
            tl.store(df + t * K + o_d - (D - K), tl.sum(acc, 0), mask=m_k)
    if not EACH:
        tl.store(df + tl.program_id(0).to(tl.int64) * K + o_d - (D - K), tl.sum(acc, 0), mask=m_k)


def _constants(
    width: int, keys: int, heads: int, softmax: bool, norm: bool, each: bool, vector: bool
):
    """Of both kernels, and warps for them: a thread has at most 16 numbers of a source, of rows up to 8192."""
    tile = {"HP": power_of_2(heads), "CP": power_of_2(width // heads)}
    block = tile["HP"] * tile["CP"]
    warps = max(1, min(16, block // 256))
    kind = {"D": width, "H": heads, "K": keys, "SOFTMAX": softmax, "NORM": norm, "EACH": each}
    return {
        **kind,
        **tile,
        "G": max(1, min(MAX_GROUP, 512 * warps // block)),
        "VECTOR": vector,
    }, warps


@functools.lru_cache(1024)
def _forward(rows: int, width: int, count: int, eps: float, *kind) -> Launch:
    constants, warps = _constants(width, *kind)
    return Launch(_weigh, (rows,), (count, eps), constants, num_warps=warps)


@functools.lru_cache(1024)
def _backward(
    rows: int, width: int, count: int, eps: float, fresh: bool, device: torch.device, *kind
):
    """The ranges of tokens, and what is launched."""
    constants, warps = _constants(width, *kind)
    tokens = ceil_div(rows, processors(device) * max(1, WARPS // warps))
    ranges, numbers = ceil_div(rows, tokens), (rows, count, eps, tokens)
    return ranges, Launch(
        _weigh_backward, (ranges,), numbers, constants | {"FRESH": fresh}, num_warps=warps
    )


def _outputs(sources, folded, eps, heads, softmax, norm):
    return torch.empty_like(sources[0]), folded.new_empty(*sources[0].shape[:-1], heads)


@writer(_outputs)
def weigh(
    sources: Sequence[Tensor],
    folded: Tensor,
    eps: float,
    heads: int,
    softmax: bool,
    norm: bool,
    x: Tensor,
    largest: Tensor,
) -> None:
    """N sources (..., D) and `folded` (K,) or (..., K) in fp32 to the read (..., D) and, with a softmax, its
    largest logits (..., H). `norm`: whether keys are normed."""
    launches["weigh"] += 1
    addresses = addresses_of(sources)
    kind = (folded.shape[-1], heads, softmax, norm, folded.dim() > 1, vectorised(x, addresses))
    table = address_table(addresses, x.device)
    _forward(*rows_of(x), len(sources), eps, *kind)(table, folded, x, largest)


def _launch_backward(
    sources, folded, eps, heads, softmax, norm, largest, dx, gradients, df, *, fresh: bool
) -> None:
    launches["weigh_backward"] += 1
    addresses, each = addresses_of([*sources, *gradients]), folded.dim() > 1
    kind = (folded.shape[-1], heads, softmax, norm, each, vectorised(dx, addresses))
    ranges, launch = _backward(*rows_of(dx), len(sources), eps, fresh, dx.device, *kind)
    parts = df if each else df.new_empty(ranges, len(df))
    launch(address_table(addresses, dx.device), folded, largest, dx, sources[0], parts)
    if not each:
        torch.sum(parts, 0, out=df)


def _gradients(sources, folded, eps, heads, softmax, norm, largest, dx):
    return [torch.empty_like(source) for source in sources], torch.empty_like(folded)


@writer(_gradients)
def weigh_backward(
    sources: Sequence[Tensor], folded: Tensor, eps: float, heads: int, softmax: bool, norm: bool, largest: Tensor,
    dx: Tensor, gradients: Sequence[Tensor], df: Tensor,
) -> None:  # fmt: skip
    """The gradients of the sources and of `folded`."""
    _launch_backward(
        sources, folded, eps, heads, softmax, norm, largest, dx, gradients, df, fresh=True
    )


def _gradient_besides(sources, folded, eps, heads, softmax, norm, largest, dx, gradients):
    return (torch.empty_like(folded),)


@writer(_gradient_besides, adds_to=("gradients",))
def weigh_backward_(
    sources: Sequence[Tensor], folded: Tensor, eps: float, heads: int, softmax: bool, norm: bool, largest: Tensor,
    dx: Tensor, gradients: Sequence[Tensor], df: Tensor,
) -> None:  # fmt: skip
    """As `weigh_backward`, adding into `gradients` in place."""
    _launch_backward(
        sources, folded, eps, heads, softmax, norm, largest, dx, gradients, df, fresh=False
    )
