"""Run KDA by the reference of this folder, or by fla's kernels on a GPU where they are installed.

On a GPU, and where something traces it, the reference is one node: between forward and backward it
keeps only its inputs, and the backward runs the forward again. On a CPU, where time is shorter than
memory, autograd sees its parts: that takes three quarters of the time.
"""

import importlib.util
import warnings
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from headwater._torch import traced
from headwater.ops.numerics import accumulation_dtype, full_precision
from headwater.ops.routing import refuse_second_derivative
from headwater.ops.triton.registration import operator

from . import reference

CHUNK = 64
SHORT = 16  # tokens up to which the recurrence is the faster form
FLA_CHUNKS = (32, 64)
FLA_MAX_WIDTH = 256
INSTALLED = importlib.util.find_spec("fla") is not None
KDABackend = Literal["auto", "reference", "fla"]


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    chunk: int = CHUNK,
    backend: KDABackend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute Kimi Delta Attention over tokens that continue a state.

    Arguments:
        q, k: queries and keys, (B, T, H, K); they are brought to unit norm here, and q is divided
            by sqrt(K).
        v: values, (B, T, H, V).
        g: log decay of each channel, (B, T, H, K), none above zero (`kda_gate`).
        beta: how far each token corrects the state, (B, T, H), from 0 to 1.
        state: after the tokens before these, (B, H, K, V); None before the first.
        chunk: tokens at a time, 8, 16, 32 and so on. More than 16 tokens run chunkwise, fewer one
            by one.
        backend: "reference"; "fla", which runs its kernels or raises; "auto", fla on a GPU where it
            is installed.

    Returns: outputs (B, T, H, V) in the dtype of v, and the state after the last token, fp32.

    Raises: ValueError for shapes, chunk or backend that do not fit.

        o, state = kda(q, k, v, g, beta)
        o, state = kda(*next_token, state)
    """
    check(q, k, v, g, beta, state, chunk)
    if uses_fla(backend, q, v, chunk):
        return run_fla(q, k, v, g, beta, state)
    dtype = accumulation_dtype(v.dtype)
    if state is None:
        batch, _, heads, values = v.shape
        shape = (batch, heads, k.shape[-1], values)
        state = torch.zeros(shape, dtype=dtype, device=v.device)
    with full_precision(v):
        if v.device.type == "cpu" and not traced():
            return compute(q, k, v, g, beta, state, chunk)
        g, beta, state = (x.to(dtype) for x in (g, beta, state))
        return _KDA.apply(q, k, v, g, beta, state, chunk)


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Run the reference in the form that suits the length."""
    prepared = reference.prepare(q, k, v, g, beta, state)
    if q.shape[1] <= SHORT:
        o, last = reference.recurrent(*prepared)
    else:
        o, last = reference.chunkwise(*prepared, chunk)
    return o.transpose(1, 2).contiguous().to(v.dtype), last.contiguous()


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_forward(q, k, v, g, beta, state, chunk):  # type: ignore[no-untyped-def]
    return _empty(v), torch.empty_like(state)


@operator(_fake_forward)
def kda_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    o, last = compute(q, k, v, g, beta, state, chunk)
    # An operator may not return one of its arguments.
    return o, last.clone() if last is state else last


def _fake_backward(q, k, v, g, beta, state, d_o, d_last, chunk):  # type: ignore[no-untyped-def]
    return [_empty(x) for x in (q, k, v, g, beta, state)]


@operator(_fake_backward)
def kda_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    d_o: Tensor,
    d_last: Tensor,
    chunk: int,
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta, state)]
    with torch.enable_grad():
        q, k, v, g, beta, state = leaves
        outputs = compute(q, k, v, g, beta, state, chunk)
    gradients = torch.autograd.grad(outputs, leaves, (d_o, d_last))
    return [x.contiguous() for x in gradients]


class _KDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.chunk = inputs
        ctx.save_for_backward(*tensors)
        return kda_forward(*tensors, ctx.chunk)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative("kda")
        return *kda_backward(*ctx.saved_tensors, *gradients, ctx.chunk), None


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    chunk: int,
) -> None:
    """Raise ValueError unless shapes and chunk fit together.

    Without the check some wrong shapes would be broadcast in silence.
    """
    batch, length, heads, width = q.shape
    by_token = (batch, length, heads)
    expected = {
        "k": (k, (*by_token, width)),
        "g": (g, (*by_token, width)),
        "beta": (beta, by_token),
        "v": (v, (*by_token, v.shape[-1])),
    }
    if state is not None:
        expected["state"] = (state, (batch, heads, width, v.shape[-1]))
    for name, (tensor, shape) in expected.items():
        if length < 1 or tensor.shape != shape:
            actual = tuple(tensor.shape)
            raise ValueError(
                f"kda takes at least one token, and with q {tuple(q.shape)} {name} must be "
                f"{shape}; got {actual}"
            )
    if chunk < reference.ROW or chunk & (chunk - 1):
        raise ValueError(
            f"kda's chunk must be a power of two from {reference.ROW} tokens on, got {chunk}"
        )


def uses_fla(backend: KDABackend, q: Tensor, v: Tensor, chunk: int) -> bool:
    """Return whether fla's kernels run. Raises ValueError if they are asked for and cannot."""
    if backend not in ("auto", "reference", "fla"):
        raise ValueError(f"backend must be 'auto', 'reference' or 'fla', got '{backend}'")
    if backend == "reference" or (backend == "auto" and not q.is_cuda):
        return False
    # Fake tensors have no data, which the kernels need.
    if traced() and not torch.compiler.is_compiling():
        return False
    reason = obstacle(q, v, chunk)
    if reason is None:
        return True
    if backend == "fla":
        shapes = f"q {tuple(q.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"backend='fla' cannot take {shapes}: {reason}")
    say_once(f"kda runs in plain PyTorch, many times slower than fla's kernels: {reason}")
    return False


def obstacle(q: Tensor, v: Tensor, chunk: int) -> str | None:
    """Say why fla's kernels cannot take these tensors; None if they can."""
    if not INSTALLED:
        return "flash-linear-attention is not installed (pip install 'headwater[kda]')"
    if not q.is_cuda:
        return f"tensors are on {q.device.type}, the kernels need cuda"
    if v.dtype == torch.float64:
        return "the kernels have no float64"
    if max(q.shape[-1], v.shape[-1]) > FLA_MAX_WIDTH:
        return f"heads are up to {FLA_MAX_WIDTH} wide there"
    if chunk not in FLA_CHUNKS:
        return f"its chunk is {' or '.join(map(str, FLA_CHUNKS))} tokens"
    return None


@lru_cache
def say_once(message: str) -> None:
    """Warn, but not again with the same message."""
    warnings.warn(message, stacklevel=4)


def run_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run fla's kernels: by chunks, which have a backward, or few tokens one by one."""
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    short = q.shape[1] <= CHUNK and not torch.is_grad_enabled()
    run = fused_recurrent_kda if short else chunk_kda
    inputs = [x.contiguous() for x in (q, k, v, g, beta)]
    return run(*inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
