"""Rotary positions of queries and keys that one product has made, with the values.

    y = [l cos - r sin, r cos + l sin],   x = [l, r] a head's two halves                   joined (B, T, (H + 2 KV) d)
    dx: the same turn by the negative angle;   djoined = [dq, dk, dv]

Su et al., arXiv 2104.09864. One launch each way: forward writes queries and keys side by side and leaves the values
where they are, backward turns the gradients of both back and puts them, and the values', where the product's backward
takes them. Nothing is kept but the tables. fp32, one downcast.
"""

from typing import Any

import torch
from torch import Tensor

from headwater.ops.routing import Backend, use_triton
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
    """Queries and keys turned by their positions, and values, from one projection of all three.

    Arguments:
        joined: (B, T, (heads + 2 kv_heads) d): the channels of the queries' heads, of the keys', of the values'.
        rotary: cosines and sines, (T, d / 2) each, for pairs of channels (c, c + d / 2).
        heads, kv_heads: of queries; of keys and values.
        backend: as in `depth_attention`.

    Returns queries (B, heads, T, d), keys and values (B, kv_heads, T, d): views of tensors with heads behind tokens, as
    attention likes them. Values lie in `joined`. Raises ValueError for shapes that do not fit.

        q, k, v = rotate_joined(x @ torch.cat((wq, wk, wv)).T, model.rotary(0, x.shape[1]), 8, 4)
    """
    cos, sin = rotary
    width, rest = divmod(joined.shape[-1], heads + 2 * kv_heads)
    if rest or width % 2 or not cos.shape == sin.shape == (joined.shape[-2], width // 2):
        raise ValueError(
            f"rotate_joined with {heads} and {kv_heads} heads takes (B, T, {heads + 2 * kv_heads} d) and tables "
            f"(T, d / 2); got {tuple(joined.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if use_triton(backend, joined[..., :1]):  # rows may be wider than those of other operators
        return _RotateJoined.apply(joined, cos, sin, heads, kv_heads)
    return reference.rotate_joined(joined, rotary, heads, kv_heads)


def _fake(joined: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    return joined.new_empty(*joined.shape[:2], heads, 2 * cos.shape[-1])


@operator(_fake)
def rotary_forward(joined: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """The first heads of (B, T, C), turned: (B, T, heads, d)."""
    from . import kernel

    return kernel.forward(joined.contiguous(), cos.contiguous(), sin.contiguous(), heads)


def _fake_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, heads, tokens, width = dq.shape
    return dq.new_empty(batch, tokens, (heads + 2 * dk.shape[1]) * width)


@operator(_fake_backward)
def rotary_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, heads, T, d) each, to (B, T, C)."""
    from . import kernel

    dq, dk, dv = (
        gradient.transpose(1, 2).contiguous() for gradient in (dq, dk, dv)
    )  # attention's are so already
    return kernel.backward(dq, dk, dv, cos.contiguous(), sin.contiguous())


class _RotateJoined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        turned = rotary_forward(joined, cos, sin, heads + kv_heads).transpose(1, 2)  # (B, H, T, d)
        values = joined.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)[
            :, heads + kv_heads :
        ]
        return turned[:, :heads], turned[:, heads:], values

    @staticmethod
    def backward(
        ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        if (
            torch.is_grad_enabled()
        ):  # create_graph: what follows would count as a constant, without a word
            raise RuntimeError(
                "the kernel has no second derivative: pass backend='reference' for create_graph=True"
            )
        return rotary_backward(dq, dk, dv, *ctx.saved_tensors), None, None, None, None
