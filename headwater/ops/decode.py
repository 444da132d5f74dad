"""The read of a decoding step: what a sublayer produced joins the last source, all sources mix, and the norm applies.

    v_N += y;   h = sum_n softmax_n(<query, key(v_n)>) v_n;   x = h / rms(h) * norm_weight        v_n, y, x (..., D)

For inference: the kernel is one launch, N + 1 reads and two writes of a (tokens x D) tensor, and has no backward.
"""

from collections.abc import Sequence

from torch import Tensor

from .depth_attention import check_sources, depth_attention
from .routing import Backend, use_triton


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
    """The read, and the last source with `y` added, which takes its place. Nothing is written in place."""
    check_sources((*sources, y), query, heads=1, key_weight=key_weight, norm_weight=norm_weight)
    if use_triton(backend, *sources, y):
        from . import fused

        return fused.decode_read(sources, y, query, key_weight, norm_weight, eps=eps, norm_eps=eps)
    last = sources[-1] + y
    read = depth_attention(
        (*sources[:-1], last), query, key_weight, norm_weight=norm_weight, eps=eps, backend="reference"
    )
    return read, last
