"""Attention over depth, for callers: arguments are checked here, and a kernel or its reference runs.

`reference` has the mathematics, `single_read` the same under kernels; `routing` decides between them.
"""

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from headwater.ops.routing import Backend, use_triton

from . import reference


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
    """One read: each token attends over N sources, its own states at N depths.

    Arguments:
        sources: N tensors (..., D), all of one shape, dtype and device.
        query: (D,), or one per token, (..., D); the kernels take (D,) alone.
        key_weight: (D,), the weight of the RMSNorm that makes keys of sources; None is ones.
        norm_weight: (D,), folds the reader's RMSNorm (with the same `eps`) into the call.
        eps: of both norms.
        heads: groups of channels, each with a softmax of its own; must divide D. The kernels have one.
        backend: "auto" takes the Triton kernels where they can run, "triton" runs them or raises, "reference" is plain
            PyTorch. Without gradients the kernel reads in one launch.
        return_weights: also return the fp32 weights, (N, ..., H), which sum to one over N.

    Returns the read, (..., D) in the sources' dtype; computed in fp32 and rounded once.
    Raises ValueError for shapes that do not fit, and for backend="triton" where the kernels cannot take the tensors.

        read = depth_attention([embedding, block_1, block_2], query)
    """
    check_sources(sources, query, heads, key_weight=key_weight, norm_weight=norm_weight)
    if use_triton(backend, *sources, heads=heads) and (query.dim() == 1 or backend == "triton"):
        from . import single_read

        return single_read.depth_attention(
            sources, query, key_weight, norm_weight, eps, return_weights
        )
    mixed, weights = reference.depth_attention(sources, query, key_weight, norm_weight, eps, heads)
    return (mixed, weights) if return_weights else mixed


def check_sources(
    sources: Sequence[Tensor], query: Tensor, heads: int, **weights: Tensor | None
) -> None:
    """Raise ValueError unless sources, query and weights agree in shape and device; the message names what differs."""
    if len(sources) == 0:
        raise ValueError("depth_attention needs at least one source, and got none")
    check_shapes(sources)
    shape = sources[0].shape
    if query.shape[-1] != shape[-1]:
        raise ValueError(
            f"the query's last axis must be the sources' width {shape[-1]}, got {tuple(query.shape)}"
        )
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


def check_shapes(sources: Sequence[Tensor]) -> None:
    """Raise ValueError unless all are of one shape."""
    shape = sources[0].shape
    for index, source in enumerate(sources):
        if source.shape != shape:
            raise ValueError(
                f"all sources must share one shape: source 0 is {tuple(shape)}, source {index} is {tuple(source.shape)}"
            )
