# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Rotary positions of queries and keys, forward and backward.

    y = [l cos - r sin, r cos + l sin],   x = [l, r] a head's two halves
    dx: the same turn by the negative angle

Numbers moved: each of the queries and keys is read and written once, forward and backward; backward
copies the gradient of the values besides. A program has all heads of a few tokens, one after the
other, so that it reads their angles once.
"""

import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import launch, launches
from headwater.ops.triton.tiles import ceil_div, load_wide, power_of_2

# Tokens of a program: as few as still fill a warp's loads of 16 bytes, for heads of 64 channels.
TOKENS = 16
WARPS = 2


@triton.jit
def _angles(
    cos,
    sin,
    M,
    T,
    P: tl.constexpr,
    BP: tl.constexpr,
    BT: tl.constexpr,
):
    """Return tokens (BT, 1) and pairs (1, BP) of this program, their mask, and the tables' rows."""
    o_r = tl.program_id(0) * BT + tl.arange(0, BT)
    o_r = o_r[:, None]
    o_p = tl.arange(0, BP)[None, :]
    m = (o_r < M) & (o_p < P)
    # A token's position is its place in its own sequence of T tokens.
    o_t = o_r % T * P + o_p
    b_cos = load_wide(cos + o_t, m)
    b_sin = load_wide(sin + o_t, m)
    return o_r.to(tl.int64), o_p, m, b_cos, b_sin


@triton.jit
def _turn(
    source,
    target,
    m,
    b_cos,
    b_sin,
    COUNT: tl.constexpr,
    P: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Turn COUNT heads, or copy them, from one pointer to another.

    Both point to the left half of the first head.
    """
    for h in range(COUNT):
        o_l = h * 2 * P
        o_r = h * 2 * P + P
        b_l = tl.load(source + o_l, mask=m, other=0.0)
        b_r = tl.load(source + o_r, mask=m, other=0.0)
        if TURNS:
            l_wide = b_l.to(tl.float32)
            r_wide = b_r.to(tl.float32)
            b_l = (l_wide * b_cos - r_wide * b_sin).to(target.dtype.element_ty)
            b_r = (r_wide * b_cos + l_wide * b_sin).to(target.dtype.element_ty)
        tl.store(target + o_l, b_l, mask=m)
        tl.store(target + o_r, b_r, mask=m)


@triton.jit(do_not_specialize=["M", "T"])
def _rotary(
    joined,  # (M, ALL, 2 P)
    cos,  # (T, P)
    sin,
    out,  # (M, H, 2 P)
    M,  # tokens in all
    T,  # tokens of a sequence
    ALL: tl.constexpr,  # heads of queries, keys and values
    H: tl.constexpr,  # heads of queries and keys
    P: tl.constexpr,  # pairs of a head
    BP: tl.constexpr,  # P as a power of two
    BT: tl.constexpr,  # tokens of a program
):
    o_r, o_p, m, b_cos, b_sin = _angles(cos, sin, M, T, P, BP, BT)
    p_in = joined + o_r * (ALL * 2 * P) + o_p
    p_out = out + o_r * (H * 2 * P) + o_p
    _turn(p_in, p_out, m, b_cos, b_sin, H, P, True)


@triton.jit(do_not_specialize=["M", "T"])
def _rotary_backward(
    dq,  # (M, H, 2 P)
    dk,  # (M, KV, 2 P)
    dv,  # (M, KV, 2 P)
    cos,  # (T, P)
    sin,
    out,  # (M, H + 2 KV, 2 P)
    M,
    T,
    H: tl.constexpr,
    KV: tl.constexpr,
    P: tl.constexpr,
    BP: tl.constexpr,
    BT: tl.constexpr,
):
    o_r, o_p, m, b_cos, b_sin = _angles(cos, sin, M, T, P, BP, BT)
    # A row of `out` has the gradients of queries, keys and values side by side.
    o_q = o_r * (H * 2 * P) + o_p
    o_k = o_r * (KV * 2 * P) + o_p
    p_q = out + o_r * ((H + 2 * KV) * 2 * P) + o_p
    p_k = p_q + H * 2 * P
    p_v = p_q + (H + KV) * 2 * P
    _turn(dq + o_q, p_q, m, b_cos, -b_sin, H, P, True)
    _turn(dk + o_k, p_k, m, b_cos, -b_sin, KV, P, True)
    _turn(dv + o_k, p_v, m, b_cos, b_sin, KV, P, False)


def forward(joined: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Run the operator's forward; all tensors are contiguous."""
    launches["rotary"] += 1
    batch, tokens, channels = joined.shape
    pairs = cos.shape[-1]
    out = joined.new_empty(batch, tokens, heads, 2 * pairs)
    constants = {"ALL": channels // (2 * pairs), "H": heads}
    _launch(_rotary, (joined, cos, sin, out), batch * tokens, tokens, constants, pairs)
    return out


def backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Run the operator's backward of gradients (B, T, heads, d), all contiguous."""
    launches["rotary_backward"] += 1
    batch, tokens, heads, width = dq.shape
    kv_heads = dk.shape[2]
    out = dq.new_empty(batch, tokens, (heads + 2 * kv_heads) * width)
    tensors = (dq, dk, dv, cos, sin, out)
    constants = {"H": heads, "KV": kv_heads}
    _launch(_rotary_backward, tensors, batch * tokens, tokens, constants, width // 2)
    return out


def _launch(kernel, tensors, rows: int, tokens: int, constants, pairs: int) -> None:
    constants |= {"P": pairs, "BP": power_of_2(pairs), "BT": TOKENS}
    grid = (ceil_div(rows, TOKENS),)
    launch(kernel, grid, tensors, (rows, tokens), constants, num_warps=WARPS)
