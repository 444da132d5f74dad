"""Attention over depth: arguments are checked here, and a kernel or its reference runs.

`reference` has the mathematics, `single_read` the same under kernels; `routing` decides between
them.
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
    """Read once: each token attends over N sources, its own states at N depths.

    Arguments:
        sources: N tensors (..., D), all of one shape, dtype and device.
        query: (D,), or one per token, (..., D); the kernels take only (D,).
        key_weight: (D,), the weight of the RMSNorm that makes keys of sources; None is ones.
        norm_weight: (D,), folds the reader's RMSNorm (with the same `eps`) into the call.
        eps: of both norms.
        heads: groups of channels, each with a softmax of its own; must divide D. The kernels have
            one.
        backend: "auto" takes the Triton kernels where they can run, "triton" runs them or raises,
            "reference" is plain PyTorch. Without gradients the kernel reads in one launch.
        return_weights: also return the fp32 weights, (N, ..., H), which sum to one over N.

    Returns the read, (..., D) in the sources' dtype; computed in fp32 and rounded once. Raises
    ValueError for shapes that do not fit, and for backend="triton" if the kernels cannot take the
    tensors.

        read = depth_attention([embedding, block_1, block_2], query)
    """
    check_shapes(sources)
    check_vectors(sources[0], heads, query=query, key_weight=key_weight, norm_weight=norm_weight)
    # Asked for by name, the kernels refuse a query per token; "auto" takes the reference.
    kernels = use_triton(backend, *sources, heads=heads)
    if kernels and (query.dim() == 1 or backend == "triton"):
        from . import single_read

        return single_read.depth_attention(
            sources, query, key_weight, norm_weight, eps, return_weights
        )
    mixed, weights = reference.depth_attention(sources, query, key_weight, norm_weight, eps, heads)
    return (mixed, weights) if return_weights else mixed


# Both checks are needed: kernels read tensors by address, and PyTorch would broadcast.
def check_shapes(sources: Sequence[Tensor]) -> None:
    """Raise ValueError unless all sources have one shape."""
    shapes = [tuple(source.shape) for source in sources]
    # Not by a set: a dimension that is dynamic in torch.export has no hash.
    if not shapes or any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"there must be sources, all of one shape; got {shapes}")


def check_vectors(source: Tensor, heads: int, **vectors: Tensor | None) -> None:
    """Raise ValueError unless query and weights are as wide as the source, on its device.

    Weights are one vector for all tokens.
    """
    width, device = source.shape[-1], source.device
    if heads < 1 or width % heads:
        raise ValueError(f"heads must be at least 1 and divide the width {width}, got {heads}")
    for name, vector in vectors.items():
        if vector is None:
            continue
        one_vector = name == "query" or vector.dim() == 1
        fits = one_vector and vector.shape[-1:] == (width,)
        if not fits or vector.device != device:
            raise ValueError(
                f"{name} must be ({width},) on {device}, as the sources are; got "
                f"{tuple(vector.shape)} on {vector.device}"
            )
