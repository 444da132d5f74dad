# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Parts that kernels share inside and around a program: rows by address, exact products, sizes."""

import functools
import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def row_pointer(table, n, row, D, like, VECTOR: tl.constexpr):
    """Point to row `row` of source n, whose address is in the table.

    `like` carries the element type. VECTOR: rows start at 16-byte boundaries.
    """
    p = tl.load(table + n).to(tl.pointer_type(like.dtype.element_ty))
    if VECTOR:
        p = tl.multiple_of(p, 16)
    return p + row.to(tl.int64) * D


@triton.jit
def program_tokens(M, T: tl.constexpr):
    """Return this program's T of M tokens, and a mask of those that there are."""
    o_t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    return o_t, o_t < M


@triton.jit
def load_wide(p, m):
    """Load numbers in fp32; zeros stand where the mask is off."""
    return tl.load(p, mask=m, other=0.0).to(tl.float32)


@triton.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


INTERPRETED = isinstance(add2, InterpretedFunction)


@triton.jit
def shares(z):
    """Return weights of two sources whose logits are 0 and z.

    Neither is 1 - b: if one source has nearly all of the weight and is by far the smaller, its
    share would be rounded as coarsely as the other source.
    """
    return tl.sigmoid(-z), tl.sigmoid(z)


@triton.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def split(x, dtype: tl.constexpr):
    """Split x into high + low in a 16-bit type.

    Two products on the matrix units then keep about 16 bits of x.
    """
    high = x.to(dtype)
    low = (x - high.to(tl.float32)).to(dtype)
    return high, low


def half(tensor: Tensor) -> bool:
    """Return whether matrix products use split bf16 operands.

    fp16 has no range for the low part of a small gradient, and the interpreter gets bf16 products
    wrong: both use fp32.
    """
    return tensor.dtype == torch.bfloat16 and not INTERPRETED


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def power_of_2(value: int) -> int:
    """Return the next power of two.

    Triton's own helpers cost tens of microseconds per call outside a kernel.
    """
    return 1 << (value - 1).bit_length()


def warps_for(numbers: int, per_warp: int) -> int:
    """Return the warps of a program that holds so many numbers, a power of two: from 1 to 16."""
    return max(1, min(16, numbers // per_warp))


def rows_of(tensor: Tensor) -> tuple[int, int]:
    """Return the number of rows, and their width."""
    width = tensor.shape[-1]
    return tensor.numel() // width, width


def vectorised(like: Tensor, addresses: Iterable[int]) -> bool:
    """Return whether loads can be 16 bytes wide.

    For that, rows of `like` and of tensors at these addresses, of its type or a wider one, must
    start at 16-byte boundaries.
    """
    row = like.shape[-1] * like.element_size()
    return row % 16 == 0 and math.gcd(16, *addresses) == 16


@functools.cache  # CUDA's own function has no cache, and takes 5 us a call
def processors(device: torch.device) -> int:
    """Count a GPU's multiprocessors; a CPU stands for a small GPU."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
