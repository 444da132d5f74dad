# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""One read in one launch, for inference: N sources, one query, and the reader's RMSNorm.

    z_n = <f, v_n> / rms(v_n);   h = sum_n softmax_n(z) v_n;   x = h / rms(h) * g
    f = query * key_weight;   v_n, h, x (tokens, D)

Passes over (tokens x D): N reads and one write. A program owns a token and keeps a running softmax;
the next source is loaded before the present one is used.
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
    load_wide,
    power_of_2,
    processors,
    row_pointer,
    rows_of,
    vectorised,
    warps_for,
)


@triton.jit
def _absorb(v, f, top, total, acc, D, eps, TOGETHER: tl.constexpr):
    """Add a source to the running softmax; return its logit, and the new maximum and sums."""
    if TOGETHER:
        square, along = tl.reduce((v * v, v * f), 0, add2)
    else:
        square = tl.sum(v * v, 0)
        along = tl.sum(v * f, 0)
    z = along / tl.sqrt(square / D + eps)
    new = tl.maximum(top, z)
    keep = tl.exp(top - new)
    w = tl.exp(z - new)
    return z, new, total * keep + w, acc * keep + w * v


@triton.jit(do_not_specialize=["M", "N"])
def _read(
    table,  # addresses of N sources
    query,  # (D,)
    key,  # (D,)
    g,  # (D,), the norm's weight
    x,  # (M, D), the read
    weights,  # (N, M)
    M,
    N,
    D,
    eps,
    norm_eps,
    KEY: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BD: tl.constexpr,  # D as a power of two
    VECTOR: tl.constexpr,  # rows start at 16-byte boundaries
    TOGETHER: tl.constexpr,  # sums in one exchange
):
    t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m = o_d < D
    f = load_wide(query + o_d, m)
    if KEY:
        f *= load_wide(key + o_d, m)

    # Source after source; logits wait in the place of the weights.
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BD], tl.float32)
    p_first = row_pointer(table, 0, t, D, x, VECTOR)
    ahead = tl.load(p_first + o_d, mask=m, other=0.0)
    p_next = row_pointer(table, tl.minimum(1, N - 1), t, D, x, VECTOR)
    for n in range(N):
        v = ahead.to(tl.float32)
        ahead = tl.load(p_next + o_d, mask=m & (n + 1 < N), other=0.0)
        p_next = row_pointer(table, tl.minimum(n + 2, N - 1), t, D, x, VECTOR)
        z, top, total, acc = _absorb(v, f, top, total, acc, D, eps, TOGETHER)
        if WEIGHTS:
            tl.store(weights + n * M + t, z)
    acc = acc / total

    # Now that the softmax is known, logits become weights.
    if WEIGHTS:
        tl.debug_barrier()
        for n in range(N):
            z = tl.load(weights + n * M + t)
            tl.debug_barrier()
            tl.store(weights + n * M + t, tl.exp(z - top) / total)
    if NORM:
        r = 1.0 / tl.sqrt(tl.sum(acc * acc, 0) / D + norm_eps)
        acc = acc * r * load_wide(g + o_d, m)
    tl.store(x + t * D + o_d, acc, mask=m)


def _outputs(sources, query, key_weight, norm_weight, eps, with_weights):
    x = torch.empty_like(sources[0])
    if not with_weights:
        return x, None
    shape = (len(sources), *x.shape[:-1])
    return x, torch.empty(shape, dtype=torch.float32, device=x.device)


@writer(_outputs, writes=("x", "weights"))
def read(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    with_weights: bool,
    x: Tensor,
    weights: Tensor | None,
) -> None:
    """Write the read `x` (..., D), and its weights (N, ...) if asked; `eps` is of both norms."""
    launches["read"] += 1
    rows, width = rows_of(sources[0])
    block = power_of_2(width)
    addresses = addresses_of(sources)
    # A kernel takes a pointer for every argument; the query stands in for absent tensors.
    tensors = (
        address_table(addresses, x.device),
        query,
        query if key_weight is None else key_weight,
        query if norm_weight is None else norm_weight,
        x,
        query if weights is None else weights,
    )
    constants = {
        "KEY": key_weight is not None,
        "NORM": norm_weight is not None,
        "WEIGHTS": with_weights,
        "BD": block,
        "VECTOR": vectorised(x, addresses),
        "TOGETHER": not INTERPRETED,
    }
    # Too few programs to fill the device are each spread over more warps.
    few = rows < 4 * processors(x.device)
    warps = warps_for(block, 512 if few else 2048)
    numbers = (rows, len(sources), width, eps, eps)
    launch(_read, (rows,), tensors, numbers, constants, num_warps=warps)
