"""Rotation of a joined projection: the kernel against its reference."""

import pytest
import torch
from kernel_cases import (
    DTYPES,
    HERE,
    assert_first_order,
    compiled_nodes,
    excess,
    needs_gpu,
    results,
)
from torch.testing import assert_close

from headwater.models.attention import Rotary
from headwater.ops.rotary import rotate_joined

pytest.importorskip("triton", reason="the kernel needs triton")

from headwater.ops.triton.launch import launches

SHAPES = [  # batch, tokens, heads of queries, of keys, their width
    (1, 1, 3, 2, 32),
    (2, 5, 3, 1, 6),  # grouped queries; three pairs; 10 tokens leave a tile unfilled
    (3, 11, 2, 2, 10),  # a tile with the end of one window and the start of the next
    (1, 16, 2, 1, 64),
    (2, 9, 4, 2, 96),  # no power of two
]
MANY = [(3, 1023, 6, 6, 64), (2, 1024, 12, 4, 96), (2, 500, 16, 8, 128)]


def draw(batch, tokens, heads, kv_heads, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    channels = (heads + 2 * kv_heads) * width
    return torch.randn(batch, tokens, channels, generator=generator).to(HERE, dtype)


def tables(tokens, width, start=0):
    return tuple(table.to(HERE) for table in Rotary(width, start + tokens, 100.0)(start, tokens))


def turned(heads, kv_heads, rotary):
    def turn(joined, backend="triton"):
        return rotate_joined(joined, rotary, heads, kv_heads, backend=backend)

    return turn


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_errs_at_most_twice_as_much_as_plain_pytorch(shape, dtype):
    before = launches.copy()
    rotary = tables(shape[1], shape[-1], start=3)
    assert excess(turned(*shape[2:4], rotary), draw(*shape, dtype=dtype)) <= 1
    assert launches - before == {"rotary": 1, "rotary_backward": 1}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", MANY)
def test_many_tokens(shape):
    rotary = tables(shape[1], shape[-1])
    assert excess(turned(*shape[2:4], rotary), draw(*shape, dtype=torch.bfloat16)) <= 1


@pytest.mark.gpu
def test_values_and_their_gradients_are_copied_bit_by_bit():
    """Infinite ones too, which a turn by the angle zero would make NaN."""
    joined = draw(2, 5, 2, 1, 8).requires_grad_()
    with torch.no_grad():
        joined[0, 0, -1] = torch.inf
    _, _, v = turned(2, 1, tables(5, 8))(joined)
    assert torch.equal(v[:, 0], joined[..., -8:])
    seed = torch.randn_like(v)
    seed[0, 0, 0, 0] = torch.inf
    (gradient,) = torch.autograd.grad(v, joined, seed)
    assert torch.equal(gradient[..., -8:], seed[:, 0])
    assert not gradient[..., :-8].any()


@pytest.mark.gpu
def test_attention_gets_heads_behind_tokens():
    """And its gradients in any layout are right."""
    joined, turn = draw(2, 5, 4, 2, 8), turned(4, 2, tables(5, 8))
    for backend in ("triton", "reference"):
        for part, heads in zip(turn(joined, backend), (4, 2, 2)):
            assert part.shape == (2, heads, 5, 8)
            assert part.stride()[1] == 8
            assert part.stride()[-1] == 1

    def heads_first(joined, backend):
        parts = [part.contiguous() for part in turn(joined, backend)]
        return [part * part.sin() for part in parts]

    assert excess(heads_first, joined) <= 1


def test_it_compiles_to_one_graph_with_one_node_each_way():
    """Nothing is put together behind the backward's node."""
    joined, turn = draw(1, 5, 4, 2, 8), turned(4, 2, tables(5, 8))
    values, forward, backward = compiled_nodes(turn, joined)
    assert_close(values, results(turn, joined, torch.float32), atol=0, rtol=0)
    assert forward.count("headwater.rotary_forward.default") == 1
    assert backward == ["headwater.rotary_backward.default"]


def test_what_does_not_fit_is_named():
    joined = draw(1, 5, 4, 2, 8)
    for heads, tokens in ((3, 5), (4, 4)):
        with pytest.raises(ValueError, match="rotate_joined with"):
            rotate_joined(joined, tables(tokens, 8), heads, 2)
    q, _, _ = turned(4, 2, tables(5, 8))(joined.requires_grad_())
    assert_first_order(q, joined)
