# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Rotary positions of queries and keys, forward and backward.

    y = [l cos - r sin, r cos + l sin],   x = [l, r] a head's two halves
    dx: the same turn by the negative angle

Numbers moved: each of the queries and keys is read and written once, forward and backward; backward copies the
gradient of the values besides. A program has all heads of a few tokens, one after the other, so that it reads their
angles once.
"""

import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import launch, launches
from headwater.ops.triton.tiles import ceil_div, power_of_2

TOKENS = (
    16  # of a program: as few as still fill a warp's loads of 16 bytes, for heads of 64 channels
)
WARPS = 2


@triton.jit
def _angles(cos, sin, M, T, P: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr):
    """Tokens (BT, 1) and pairs (1, BP) of this program, their mask, and the tables' rows."""
    o_r = (tl.program_id(0) * BT + tl.arange(0, BT))[:, None]
    o_p = tl.arange(0, BP)[None, :]
    m = (o_r < M) & (o_p < P)
    o_t = o_r % T * P + o_p
    b_cos = tl.load(cos + o_t, mask=m, other=0.0).to(tl.float32)
    b_sin = tl.load(sin + o_t, mask=m, other=0.0).to(tl.float32)
    return o_r.to(tl.int64), o_p, m, b_cos, b_sin


@triton.jit
def _turn(
    source, target, m, b_cos, b_sin, COUNT: tl.constexpr, P: tl.constexpr, TURNS: tl.constexpr
):
    """So many heads from a pointer to another's places; each to the first head's left half."""
    for h in range(COUNT):
        b_l = tl.load(source + h * 2 * P, mask=m, other=0.0)
        b_r = tl.load(source + h * 2 * P + P, mask=m, other=0.0)
        if TURNS:
            first_half, second_half = b_l.to(tl.float32), b_r.to(tl.float32)
            b_l = (first_half * b_cos - second_half * b_sin).to(target.dtype.element_ty)
            b_r = (second_half * b_cos + first_half * b_sin).to(target.dtype.element_ty)
        tl.store(target + h * 2 * P, b_l, mask=m)
        tl.store(target + h * 2 * P + P, b_r, mask=m)


@triton.jit(do_not_specialize=["M", "T"])
def _rotary(
    joined, cos, sin, out, M, T, ALL: tl.constexpr, H: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    o_r, o_p, m, b_cos, b_sin = _angles(cos, sin, M, T, P, BP, BT)
    _turn(
        joined + o_r * (ALL * 2 * P) + o_p,
        out + o_r * (H * 2 * P) + o_p,
        m,
        b_cos,
        b_sin,
        H,
        P,
        True,
    )


@triton.jit(do_not_specialize=["M", "T"])
def _rotary_backward(
    dq, dk, dv, cos, sin, out, M, T,
    H: tl.constexpr, KV: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    o_r, o_p, m, b_cos, b_sin = _angles(cos, sin, M, T, P, BP, BT)
    o_q, o_k = o_r * (H * 2 * P) + o_p, o_r * (KV * 2 * P) + o_p
    p_out = out + o_r * ((H + 2 * KV) * 2 * P) + o_p
    _turn(dq + o_q, p_out, m, b_cos, -b_sin, H, P, True)
    _turn(dk + o_k, p_out + H * 2 * P, m, b_cos, -b_sin, KV, P, True)
    _turn(dv + o_k, p_out + (H + KV) * 2 * P, m, b_cos, b_sin, KV, P, False)


def forward(joined: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Run the operator's forward; all tensors are contiguous."""
    launches["rotary"] += 1
    batch, tokens, channels = joined.shape
    pairs = cos.shape[-1]
    out = joined.new_empty(batch, tokens, heads, 2 * pairs)
    constants = {"ALL": channels // (2 * pairs), "H": heads, **_tile(pairs)}
    grid = (ceil_div(batch * tokens, TOKENS),)
    launch(
        _rotary, grid, (joined, cos, sin, out), (batch * tokens, tokens), constants, num_warps=WARPS
    )
    return out


def backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Run the operator's backward of gradients (B, T, heads, d), all contiguous."""
    launches["rotary_backward"] += 1
    (batch, tokens, heads, width), kv_heads = dq.shape, dk.shape[2]
    out = dq.new_empty(batch, tokens, (heads + 2 * kv_heads) * width)
    constants = {"H": heads, "KV": kv_heads, **_tile(width // 2)}
    grid = (ceil_div(batch * tokens, TOKENS),)
    tensors = (dq, dk, dv, cos, sin, out)
    launch(_rotary_backward, grid, tensors, (batch * tokens, tokens), constants, num_warps=WARPS)
    return out


def _tile(pairs: int) -> dict[str, int]:
    return {"P": pairs, "BP": power_of_2(pairs), "BT": TOKENS}
