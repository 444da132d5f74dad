"""Choose between a kernel and its reference, and say why a kernel that was asked for cannot run."""

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
# The search runs once, at import: torch.compile cannot trace it.
INSTALLED = importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Return whether Triton's interpreter runs kernels on CPU tensors.

    Triton reads the variable when it is imported.
    """
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def obstacle(source: Tensor, *others: Tensor, heads: int = 1) -> str | None:
    """Say why the Triton kernels cannot take these tensors; None if they can."""
    if not INSTALLED:
        return "triton is not installed"
    if transformed():
        return "a transform of torch.func is active, such as grad or vmap: kernels have none"
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
    # Kernels read every tensor with the first one's element type.
    for other in others:
        if other.device != source.device or other.dtype != source.dtype:
            here = f"{source.dtype} on {source.device}"
            there = f"{other.dtype} on {other.device}"
            return f"tensors differ: {here} and {there}"
    return None


def use_triton(
    backend: Backend,
    source: Tensor,
    *others: Tensor,
    heads: int = 1,
) -> bool:
    """Return whether kernels run. `others` must agree with `source` in dtype and device.

    Raises BackendError if backend="triton" asks for kernels that cannot take the tensors.
    """
    if backend == "reference":
        return False
    if backend not in ("auto", "triton"):
        raise ValueError(f"backend must be 'auto', 'reference' or 'triton', got '{backend}'")
    if backend == "auto" and not source.is_cuda:
        return False
    reason = obstacle(source, *others, heads=heads)
    if reason is not None and backend == "triton":
        tensor = f"shape {tuple(source.shape)}, {source.dtype}"
        raise BackendError(f"backend='triton' cannot take {tensor}: {reason}")
    return reason is None


def refuse_second_derivative(operator: str) -> None:
    """Raise inside a backward pass that is itself to be differentiated (create_graph=True).

    Autograd would take everything behind a kernel for a constant, in silence.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{operator} has no second derivative: do without create_graph=True, "
            "or choose backend='reference' if that is plain PyTorch"
        )
