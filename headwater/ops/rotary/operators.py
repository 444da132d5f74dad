"""Rotary positions of queries and keys that one product has made, with the values.

    y = [l cos - r sin, r cos + l sin],   x = [l, r] a head's two halves
    dx: the same turn by the negative angle;   djoined = [dq, dk, dv]    joined (B, T, (H + 2 KV) d)

Su et al., arXiv 2104.09864. One launch each way. Forward writes queries and keys side by side and
leaves the values where they are. Backward turns the gradients of both back and puts them, and the
values' gradient, where the product's backward takes them. Only the tables are kept in between.
fp32, one downcast.
"""

from typing import Any

import torch
from torch import Tensor

from headwater.ops.routing import Backend, refuse_second_derivative, use_triton
from headwater.ops.triton.registration import operator

from . import reference


def rotate_joined(
    joined: Tensor,
    rotary: tuple[Tensor, Tensor],
    heads: int,
    kv_heads: int,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn queries and keys by their positions; values pass. One projection has made all three.

    Arguments:
        joined: (B, T, (heads + 2 kv_heads) d): the channels of the queries' heads, of the keys', of
            the values'.
        rotary: cosines and sines, (T, d / 2) each, for pairs of channels (c, c + d / 2).
        heads, kv_heads: of queries; of keys and values.
        backend: as in `depth_attention`.

    Returns queries (B, heads, T, d), keys and values (B, kv_heads, T, d): views of tensors with
    heads behind tokens, as attention likes them. Values lie in `joined`. Raises ValueError for
    shapes that do not fit.

        joined = x @ torch.cat((wq, wk, wv)).T
        q, k, v = rotate_joined(joined, model.rotary(0, x.shape[1]), 8, 4)
    """
    cos, sin = rotary
    all_heads = heads + 2 * kv_heads
    width, rest = divmod(joined.shape[-1], all_heads)
    table = (joined.shape[-2], width // 2)
    # The kernel takes both by address, and would read past the end of a shorter table.
    if rest or width % 2 or not cos.shape == sin.shape == table:
        shapes = f"{tuple(joined.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}"
        raise ValueError(
            f"rotate_joined with {heads} and {kv_heads} heads takes (B, T, {all_heads} d) and "
            f"tables (T, d / 2); got {shapes}"
        )
    # One channel is shown, since rows may be wider than those of other operators.
    if use_triton(backend, joined[..., :1]):
        return _RotateJoined.apply(joined, cos, sin, heads, kv_heads)
    return reference.rotate_joined(joined, rotary, heads, kv_heads)


def _fake(joined: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    return joined.new_empty(*joined.shape[:2], heads, 2 * cos.shape[-1])


@operator(_fake)
def rotary_forward(joined: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Turn the first heads of (B, T, C), to (B, T, heads, d)."""
    from . import kernel

    return kernel.forward(joined.contiguous(), cos.contiguous(), sin.contiguous(), heads)


def _fake_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    batch, heads, tokens, width = dq.shape
    return dq.new_empty(batch, tokens, (heads + 2 * dk.shape[1]) * width)


@operator(_fake_backward)
def rotary_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Turn gradients (B, heads, T, d) back, to (B, T, C)."""
    from . import kernel

    # Attention's gradients have tokens before heads in memory already: nothing is copied.
    dq, dk, dv = (gradient.transpose(1, 2).contiguous() for gradient in (dq, dk, dv))
    return kernel.backward(dq, dk, dv, cos.contiguous(), sin.contiguous())


class _RotateJoined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        turned_heads = heads + kv_heads
        turned = rotary_forward(joined, cos, sin, turned_heads).transpose(1, 2)  # (B, H, T, d)
        all_heads = heads + 2 * kv_heads
        by_head = joined.unflatten(-1, (all_heads, -1)).transpose(1, 2)
        return turned[:, :heads], turned[:, heads:], by_head[:, turned_heads:]

    @staticmethod
    def backward(
        ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        refuse_second_derivative("rotate_joined")
        return rotary_backward(dq, dk, dv, *ctx.saved_tensors), None, None, None, None
