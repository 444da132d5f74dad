# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""SwiGLU's gate, forward and backward.

    y = g s u,   s = sigmoid(g);   [g, u] = joined                                      joined (..., 2 W), y (..., W)
    du = dy g s;   dg = dy u s (1 + g (1 - s));   djoined = [dg, du]

Numbers moved per token: 3 W forward and 5 W backward. A program has a tile of tokens by channels, of both halves.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import launch, launches
from headwater.ops.triton.tiles import ceil_div, power_of_2, rows_of

COLUMNS = 128  # channels of a tile: whole lines of memory, and little of 344 or 1408 channels is left over
ROWS = 16  # tokens of a tile: two loads of 16 bytes a thread from each tensor
WARPS = 4


@triton.jit
def _tile(M, W: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Tokens (BR, 1) and channels (1, BC) of this program, neighbours along the channels first, and their mask."""
    place = tl.program_id(0)
    across: tl.constexpr = (W + BC - 1) // BC
    o_r = (place // across * BR + tl.arange(0, BR))[:, None]
    o_c = (place % across * BC + tl.arange(0, BC))[None, :]
    return o_r.to(tl.int64), o_c, (o_r < M) & (o_c < W)


# W is a constant so that a width as 344, no multiple of 16, still is known for one of 8: for loads of 16 bytes.
@triton.jit(do_not_specialize=["M"])
def _swiglu(joined, out, M, W: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    o_r, o_c, m = _tile(M, W, BR, BC)
    p_g = joined + o_r * (2 * W) + o_c
    b_g = tl.load(p_g, mask=m, other=0.0).to(tl.float32)
    b_u = tl.load(p_g + W, mask=m, other=0.0).to(tl.float32)
    b_y = b_g * tl.sigmoid(b_g) * b_u
    tl.store(out + o_r * W + o_c, b_y.to(out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["M"])
def _swiglu_backward(joined, gradient, out, M, W: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    o_r, o_c, m = _tile(M, W, BR, BC)
    p_g = joined + o_r * (2 * W) + o_c
    b_g = tl.load(p_g, mask=m, other=0.0).to(tl.float32)
    b_u = tl.load(p_g + W, mask=m, other=0.0).to(tl.float32)
    b_dy = tl.load(gradient + o_r * W + o_c, mask=m, other=0.0).to(tl.float32)
    b_s = tl.sigmoid(b_g)
    b_dys = b_dy * b_s
    p_d = out + o_r * (2 * W) + o_c
    tl.store(p_d, (b_dys * b_u * (1.0 + b_g * (1.0 - b_s))).to(out.dtype.element_ty), mask=m)
    tl.store(p_d + W, (b_dys * b_g).to(out.dtype.element_ty), mask=m)


def forward(joined: Tensor) -> Tensor:
    """(..., 2 W), contiguous, to (..., W)."""
    launches["swiglu"] += 1
    out = joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)
    grid, rows, constants = _tiling(joined)
    launch(_swiglu, grid, (joined, out), (rows,), constants, num_warps=WARPS)
    return out


def backward(joined: Tensor, gradient: Tensor) -> Tensor:
    """(..., 2 W) and (..., W), contiguous, to (..., 2 W)."""
    launches["swiglu_backward"] += 1
    out = torch.empty_like(joined)
    grid, rows, constants = _tiling(joined)
    launch(_swiglu_backward, grid, (joined, gradient, out), (rows,), constants, num_warps=WARPS)
    return out


def _tiling(joined: Tensor) -> tuple[tuple[int], int, dict[str, int]]:
    """Programs, tokens, and the kernels' constants."""
    rows, width = rows_of(joined)
    width //= 2
    columns = min(COLUMNS, power_of_2(width))
    programs = ceil_div(rows, ROWS) * ceil_div(width, columns)
    return (programs,), rows, {"W": width, "BR": ROWS, "BC": columns}
