"""Attention over depth, for callers: arguments are checked here, and a kernel or its reference runs.

`reference` has the mathematics; `autograd` and `alone` the kernels by the same names; `routing` decides between them.
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
        from . import alone

        return alone.depth_attention(sources, query, key_weight, norm_weight, eps, return_weights)
    mixed, weights = reference.depth_attention(sources, query, key_weight, norm_weight, eps, heads)
    return (mixed, weights) if return_weights else mixed


def weigh_sources(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    heads: int = 1,
    softmax: bool = True,
    key_norm: bool = True,
    thread: bool = True,
    backend: Backend = "auto",
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One read with the options of Attention Residuals, for which `depth_attention` has no kernels; `weigh` has the
    mathematics.

    Arguments:
        sources: N tensors (..., D), all of one shape, dtype and device.
        query: (K,), or one per token, (..., K); keys are the last K channels of a source.
        key_weight: (K,), a gain on the keys; None is ones.
        eps: of the keys' norm.
        heads: groups of channels, each with weights of its own; must divide D and K.
        softmax: False takes the sigmoid of each logit.
        key_norm: whether keys are RMS-normed.
        thread: False where no later read takes the sources: compiled, their gradients would be zeros that are written.
        backend: as in `depth_attention`; the kernels have several heads of whole keys alone, K = D.

    Returns the read, (..., D) in the sources' dtype; and the sources again, which are to be read in their place.
    Raises ValueError for shapes that do not fit, and for backend="triton" where the kernels cannot take the tensors.
    """
    check_shapes(sources)
    (*tokens, width), keys = sources[0].shape, query.shape[-1]
    check_sources([sources[0][..., -keys:]], query, heads, key_weight=key_weight)
    if query.dim() > 1 and query.shape[:-1] != sources[0].shape[:-1]:
        raise ValueError(
            f"queries must be ({keys},) or {(*tokens, keys)}, got {tuple(query.shape)}"
        )
    if use_triton(backend, *sources, heads=1 if keys == width else heads):
        from . import alone

        return alone.weigh_sources(
            sources, query, key_weight, eps, heads, softmax, key_norm, thread
        )
    mixed = reference.weigh_sources(sources, query, key_weight, eps, heads, softmax, key_norm)
    return mixed, tuple(sources)


def attend_blocks(
    sources: Sequence[Tensor],
    queries: Tensor,
    key_weights: Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Phase 1 of Block Attention Residuals: all queries of a block read the finished blocks at once.

    Arguments:
        sources: N tensors (..., D).
        queries, key_weights: (S, D), one row for each sublayer of the block.
        eps, backend: as in `depth_attention`.

    Returns S outputs, (S, ..., D) in the sources' dtype, and their log-sum-exps, (S, ...) in fp32.
    """
    check_sources(sources, queries, heads=1)
    if use_triton(backend, *sources):
        from . import alone

        return alone.attend_blocks(sources, queries, key_weights, eps)
    return reference.attend_blocks(sources, queries, key_weights, eps)


def merge_partial(
    partial: Tensor,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    key_weight: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> Tensor:
    """Phase 2: a sublayer merges the block's running sum into what its query found in phase 1.

    Arguments:
        partial: (..., D), the sum of the block's outputs so far.
        query, key_weight: (D,), of this sublayer.
        out, lse: (..., D) and (...), this query's row of what `attend_blocks` returned.
        norm_weight: (D,), folds the reader's RMSNorm in.
        eps, backend: as in `depth_attention`.

    Returns the read, (..., D): equal to `depth_attention` over the finished blocks and `partial`.
    """
    check_sources((partial, out), query, heads=1, key_weight=key_weight, norm_weight=norm_weight)
    if use_triton(backend, partial, out):
        from . import autograd

        weights = (query, key_weight, norm_weight)
        return autograd.merge(partial, None, out, lse, *weights, eps=eps, norm_eps=eps, keep=True)[
            0
        ]
    return reference.merge_partial(partial, query, out, lse, key_weight, norm_weight, eps)


def decode_read(
    sources: Sequence[Tensor],
    y: Tensor,
    query: Tensor,
    key_weight: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The read of a decoding step: what a sublayer produced joins the last source, all sources mix, the norm applies.

        v_N += y;   h = sum_n softmax_n(<query, key(v_n)>) v_n;   x = h / rms(h) * norm_weight        v_n, y, x (..., D)

    For inference: the kernel is one launch, N + 1 reads and two writes of a (tokens x D) tensor, and has no backward.
    Arguments as in `depth_attention` (sources, query, key_weight, norm_weight, eps, backend), and `y` (..., D).
    Returns the read, and the last source with `y` added, which takes its place. Nothing is written in place.
    """
    check_sources((*sources, y), query, heads=1, key_weight=key_weight, norm_weight=norm_weight)
    if use_triton(backend, *sources, y):
        from . import alone

        return alone.decode_read(sources, y, query, key_weight, norm_weight, eps=eps, norm_eps=eps)
    last = sources[-1] + y
    return reference.depth_attention((*sources[:-1], last), query, key_weight, norm_weight, eps)[
        0
    ], last


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
