# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""SwiGLU's gate, forward and backward.

    y = g s u,   s = sigmoid(g);   [g, u] = joined                    joined (..., 2 W), y (..., W)
    du = dy g s;   dg = dy u s (1 + g (1 - s));   djoined = [dg, du]

Numbers moved per token: 3 W forward and 5 W backward. A program has a tile of tokens by channels,
of both halves.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import launch, launches
from headwater.ops.triton.tiles import ceil_div, load_wide, power_of_2, rows_of

# Channels of a tile: whole lines of memory, and little of 344 or 1408 channels is left over.
COLUMNS = 128
ROWS = 16  # tokens of a tile: two loads of 16 bytes a thread from each tensor
WARPS = 4


@triton.jit
def _tile(M, W: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Return tokens (BR, 1) and channels (1, BC) of this program, and their mask.

    Programs run along the channels first.
    """
    place = tl.program_id(0)
    across: tl.constexpr = (W + BC - 1) // BC
    o_r = (place // across * BR + tl.arange(0, BR))[:, None]
    o_c = (place % across * BC + tl.arange(0, BC))[None, :]
    return o_r.to(tl.int64), o_c, (o_r < M) & (o_c < W)


# W is a constant, so that the compiler knows that a width such as 344, no multiple of 16, is one of
# 8: then loads have 16 bytes.
@triton.jit(do_not_specialize=["M"])
def _swiglu(
    joined,  # (M, 2 W)
    out,  # (M, W)
    M,
    W: tl.constexpr,
    BR: tl.constexpr,  # tokens of a tile
    BC: tl.constexpr,  # channels of a tile
):
    o_r, o_c, m = _tile(M, W, BR, BC)
    p_g = joined + o_r * (2 * W) + o_c
    b_g = load_wide(p_g, m)
    b_u = load_wide(p_g + W, m)
    b_y = b_g * tl.sigmoid(b_g) * b_u
    tl.store(out + o_r * W + o_c, b_y, mask=m)


@triton.jit(do_not_specialize=["M"])
def _swiglu_backward(
    joined,  # (M, 2 W)
    gradient,  # (M, W)
    out,  # (M, 2 W)
    M,
    W: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    o_r, o_c, m = _tile(M, W, BR, BC)
    p_g = joined + o_r * (2 * W) + o_c
    b_g = load_wide(p_g, m)
    b_u = load_wide(p_g + W, m)
    b_dy = load_wide(gradient + o_r * W + o_c, m)
    # The sigmoid is computed again, rather than kept from the forward pass.
    b_s = tl.sigmoid(b_g)
    b_dys = b_dy * b_s
    b_dg = b_dys * b_u * (1.0 + b_g * (1.0 - b_s))
    b_du = b_dys * b_g
    p_d = out + o_r * (2 * W) + o_c
    tl.store(p_d, b_dg, mask=m)
    tl.store(p_d + W, b_du, mask=m)


def forward(joined: Tensor) -> Tensor:
    """Gate (..., 2 W), contiguous, to (..., W)."""
    launches["swiglu"] += 1
    *tokens, both = joined.shape
    out = joined.new_empty(*tokens, both // 2)
    _launch(_swiglu, (joined, out))
    return out


def backward(joined: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient (..., 2 W) from (..., 2 W) and (..., W), all contiguous."""
    launches["swiglu_backward"] += 1
    out = torch.empty_like(joined)
    _launch(_swiglu_backward, (joined, gradient, out))
    return out


def _launch(kernel, tensors: tuple[Tensor, ...]) -> None:
    rows, both = rows_of(tensors[0])
    width = both // 2
    columns = min(COLUMNS, power_of_2(width))
    programs = ceil_div(rows, ROWS) * ceil_div(width, columns)
    constants = {"W": width, "BR": ROWS, "BC": columns}
    launch(kernel, (programs,), tensors, (rows,), constants, num_warps=WARPS)
