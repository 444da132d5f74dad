"""The choice of a backend: explicit conditions, and errors that name what does not hold."""

import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor

from headwater._torch import transformed
from headwater.errors import BackendError

Backend = Literal["auto", "reference", "triton"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 32768  # a token's row must fit in the registers of one program
INSTALLED = (
    importlib.util.find_spec("triton") is not None
)  # looked up once: torch.compile does not trace the search


def interpreting() -> bool:
    """Triton's interpreter runs kernels on CPU tensors; the variable is read when triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def obstacle(source: Tensor, *others: Tensor, heads: int = 1) -> str | None:
    """Why the Triton kernels cannot take these tensors, or None."""
    if not INSTALLED:
        return "triton is not installed"
    if transformed():
        return "a transform of torch.func is active, such as grad or vmap, which kernels do not take part in"
    if not source.is_cuda and not interpreting():
        return f"tensors are on {source.device.type}, the kernels need cuda"
    if source.dtype not in DTYPES:
        return f"dtype {source.dtype} is none of bfloat16, float16, float32"
    if not 1 <= source.shape[-1] <= MAX_WIDTH:
        return f"width {source.shape[-1]} is not between 1 and {MAX_WIDTH}"
    if source.numel() == 0:
        return f"shape {tuple(source.shape)} is empty"
    if heads != 1:
        return f"{heads} heads: the kernels of this read have one"
    for other in others:
        if other.device != source.device or other.dtype != source.dtype:
            return f"tensors differ: {source.dtype} on {source.device} and {other.dtype} on {other.device}"
    return None


def use_triton(backend: Backend, source: Tensor, *others: Tensor, heads: int = 1) -> bool:
    """`others` are the tensors that must agree with `source` in dtype and device."""
    if backend == "reference":
        return False
    if backend not in ("auto", "triton"):
        raise ValueError(f"backend must be 'auto', 'reference' or 'triton', got '{backend}'")
    if backend == "auto" and not source.is_cuda:
        return False
    reason = obstacle(source, *others, heads=heads)
    if reason is not None and backend == "triton":
        raise BackendError(
            f"backend='triton' cannot take shape {tuple(source.shape)}, {source.dtype}: {reason}"
        )
    return reason is None
