"""Attention over depth: one query, N sources, a softmax over the sources of each token.

    key_n   = source_n / sqrt(mean(source_n ** 2) + eps) * key_weight        (..., D)
    weight  = softmax over n of  <query, key_n>  per head                    (N, ..., H)
    output  = sum_n weight_n * source_n   (raw values), then an RMSNorm if `norm_weight` is given

Attention Residuals, arXiv 2603.15031, eqs. 1 to 4. fp32 throughout (fp64 stays fp64), one downcast at return.
The query and the key weight fold into one vector, and the key's norm is one scalar, so normed keys are never formed.
A single pass moves N reads and one write of a (tokens x D) tensor.
"""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from .routing import Backend, use_triton


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def full_precision(x: Tensor) -> torch.autocast:
    """Operations inside keep the dtype of their operands: under autocast products would round logits to bf16, and
    norms would return fp32."""
    kind = x.device.type  # asking torch whether a device has autocast breaks the graph before torch 2.13
    return torch.autocast("cpu" if kind == "meta" else kind, enabled=False)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last axis, in the dtype of `x`."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.to(x.dtype)


def depth_logits(
    stack: Tensor, query: Tensor, key_weight: Tensor | None, *, eps: float, heads: int = 1, key_norm: bool = True
) -> Tensor:
    """<query, key_n> per head, (N, ..., H). `stack` is (N, ..., D); `query` is (D,), or one per token, (..., D)."""
    folded = query.to(stack.dtype) if key_weight is None else query.to(stack.dtype) * key_weight.to(stack.dtype)
    if heads == 1 and folded.dim() == 1:
        with full_precision(stack):
            logits = (stack @ folded).unsqueeze(-1)  # (N, ..., 1)
    else:
        logits = (stack * folded).unflatten(-1, (heads, -1)).sum(-1)  # (N, ..., H)
    if key_norm:
        logits = logits * torch.rsqrt(stack.square().mean(-1, keepdim=True) + eps)
    return logits


def mix_sources(stack: Tensor, weights: Tensor) -> Tensor:
    """sum_n weights_n * stack_n with weights (N, ..., H) spread over H equal channel groups: (..., D)."""
    heads = weights.shape[-1]
    if heads == 1:
        return (stack * weights).sum(0)
    return (stack.unflatten(-1, (heads, -1)) * weights.unsqueeze(-1)).sum(0).flatten(-2)


@overload
def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None = ...,
    *,
    norm_weight: Tensor | None = ...,
    eps: float = ...,
    heads: int = ...,
    backend: Backend = ...,
    return_weights: Literal[False] = ...,
) -> Tensor: ...
@overload
def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None = ...,
    *,
    norm_weight: Tensor | None = ...,
    eps: float = ...,
    heads: int = ...,
    backend: Backend = ...,
    return_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    heads: int = 1,
    backend: Backend = "auto",
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """One read over `sources`, N tensors of shape (..., D). With `return_weights`, also the fp32 weights, (N, ..., H).

    `norm_weight` folds the reader's RMSNorm (same eps) into the call. `backend`: see `routing`; the kernel reads in one
    launch where no gradient is asked.
    """
    check_sources(sources, query, heads, key_weight=key_weight, norm_weight=norm_weight)
    if use_triton(backend, *sources, heads=heads) and (query.dim() == 1 or backend == "triton"):
        from . import fused

        return fused.depth_attention(sources, query, key_weight, norm_weight, eps, return_weights)
    stack = torch.stack([source.to(accumulation_dtype(source.dtype)) for source in sources])  # (N, ..., D)
    weights = depth_logits(stack, query, key_weight, eps=eps, heads=heads).softmax(0)  # (N, ..., H)
    mixed = mix_sources(stack, weights)
    if norm_weight is not None:
        mixed = rms_norm(mixed, norm_weight, eps)
    mixed = mixed.to(sources[0].dtype)
    return (mixed, weights) if return_weights else mixed


def check_sources(sources: Sequence[Tensor], query: Tensor, heads: int, **weights: Tensor | None) -> None:
    if len(sources) == 0:
        raise ValueError("depth_attention needs at least one source, and got none")
    shape = sources[0].shape
    for index, source in enumerate(sources):
        if source.shape != shape:
            raise ValueError(
                f"all sources must share one shape: source 0 is {tuple(shape)}, source {index} is {tuple(source.shape)}"
            )
    if query.shape[-1] != shape[-1]:
        raise ValueError(f"the query's last axis must be the sources' width {shape[-1]}, got {tuple(query.shape)}")
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    if shape[-1] % heads:
        raise ValueError(f"heads must divide the width: {heads} heads do not divide {shape[-1]}")
    for name, weight in weights.items():
        if weight is not None and weight.shape != shape[-1:]:
            raise ValueError(f"{name} must be {tuple(shape[-1:])}, got {tuple(weight.shape)}")
    for name, value in (("the query", query), *weights.items()):
        if value is not None and value.device != sources[0].device:
            raise ValueError(f"{name} is on {value.device}, the sources are on {sources[0].device}")
