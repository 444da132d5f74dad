# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""One read in one launch, for inference: N sources, one query, the reader's RMSNorm, and before it a pending sum.

    v_N += y (if pending);   z_n = <f, v_n> / rms(v_n);   h = sum_n softmax_n(z) v_n;   x = h / rms(h) * g

N reads and one write of a (tokens x D) tensor (pending: one more of each). A program owns a token and keeps a running
softmax; the next source is loaded before the present one is used.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import address_table, addresses_of, launch, launches
from headwater.ops.triton.registration import writer
from headwater.ops.triton.tiles import (
    INTERPRETED,
    add2,
    power_of_2,
    processors,
    row_pointer,
    rows_of,
    vectorised,
)


@triton.jit
def _absorb(v, f, top, total, acc, D, eps, TOGETHER: tl.constexpr):
    if TOGETHER:
        square, along = tl.reduce((v * v, v * f), 0, add2)
    else:
        square, along = tl.sum(v * v, 0), tl.sum(v * f, 0)
    z = along / tl.sqrt(square / D + eps)
    new = tl.maximum(top, z)
    keep = tl.exp(top - new)
    w = tl.exp(z - new)
    return z, new, total * keep + w, acc * keep + w * v


@triton.jit(do_not_specialize=["M", "N"])
def _read(
    table, y, query, key, g, x, summed, weights, M, N, D, eps, norm_eps,
    PENDING: tl.constexpr, KEY: tl.constexpr, NORM: tl.constexpr, WEIGHTS: tl.constexpr,
    BD: tl.constexpr, VECTOR: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m = o_d < D
    f = tl.load(query + o_d, mask=m, other=0.0).to(tl.float32)
    if KEY:
        f *= tl.load(key + o_d, mask=m, other=0.0).to(tl.float32)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BD], tl.float32)
    count = N - 1 if PENDING else N
    ahead = tl.load(row_pointer(table, 0, t, D, x, VECTOR) + o_d, mask=m, other=0.0)
    p_next = row_pointer(table, tl.minimum(1, N - 1), t, D, x, VECTOR)
    for n in range(count):
        v = ahead.to(tl.float32)
        ahead = tl.load(p_next + o_d, mask=m & (n + 1 < N), other=0.0)
        p_next = row_pointer(table, tl.minimum(n + 2, N - 1), t, D, x, VECTOR)
        z, top, total, acc = _absorb(v, f, top, total, acc, D, eps, TOGETHER)
        if WEIGHTS:
            tl.store(weights + n * M + t, z)
    if PENDING:
        v = ahead.to(tl.float32) + tl.load(y + t * D + o_d, mask=m, other=0.0).to(tl.float32)
        low = v.to(x.dtype.element_ty)
        tl.store(summed + t * D + o_d, low, mask=m)
        z, top, total, acc = _absorb(low.to(tl.float32), f, top, total, acc, D, eps, TOGETHER)
        if WEIGHTS:
            tl.store(weights + (N - 1) * M + t, z)
    acc = acc / total
    if WEIGHTS:
        tl.debug_barrier()
        for n in range(N):
            z = tl.load(weights + n * M + t)
            tl.debug_barrier()
            tl.store(weights + n * M + t, tl.exp(z - top) / total)
    if NORM:
        r = 1.0 / tl.sqrt(tl.sum(acc * acc, 0) / D + norm_eps)
        acc = acc * r * tl.load(g + o_d, mask=m, other=0.0).to(tl.float32)
    tl.store(x + t * D + o_d, acc.to(x.dtype.element_ty), mask=m)


def _outputs(sources, y, query, key_weight, norm_weight, eps, norm_eps, with_weights):
    x = torch.empty_like(sources[0])
    shape = (len(sources), *x.shape[:-1])
    weights = torch.empty(shape, dtype=torch.float32, device=x.device) if with_weights else None
    return x, None if y is None else torch.empty_like(x), weights


@writer(_outputs)
def read(
    sources: Sequence[Tensor],
    y: Tensor | None,
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float,
    with_weights: bool,
    x: Tensor,
    summed: Tensor | None,
    weights: Tensor | None,
) -> None:
    """The read (..., D); the last source with `y` added, if there is one; the weights (N, ...), if asked for."""
    launches["read"] += 1
    rows, width = rows_of(sources[0])
    block, addresses = power_of_2(width), addresses_of(sources)
    args = (
        address_table(addresses, x.device), x if y is None else y, query, query if key_weight is None else key_weight,
        query if norm_weight is None else norm_weight, x, x if summed is None else summed,
        query if weights is None else weights,
    )  # fmt: skip
    numbers = (rows, len(sources), width, eps, norm_eps)
    constants = {
        "PENDING": y is not None, "KEY": key_weight is not None, "NORM": norm_weight is not None,
        "WEIGHTS": with_weights, "BD": block, "VECTOR": vectorised(x, addresses), "TOGETHER": not INTERPRETED,
    }  # fmt: skip
    few = rows < 4 * processors(
        x.device
    )  # too few programs to fill the device: spread each over more warps
    launch(
        _read,
        (rows,),
        args,
        numbers,
        constants,
        num_warps=max(1, min(16, block // (512 if few else 2048))),
    )
