"""Rotation of a joined projection: kernel against reference (under the interpreter here, on a GPU there)."""

import pytest
import torch
from kernel_cases import compiled_nodes, excess, results

from headwater.models.attention import Rotary
from headwater.ops.rotary import rotate_joined

pytest.importorskip("triton", reason="the kernel needs triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def draw(batch, tokens, heads, kv_heads, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, tokens, (heads + 2 * kv_heads) * width, generator=generator).to(
        DEVICE, dtype
    )


def tables(tokens, width, start=0):
    return tuple(table.to(DEVICE) for table in Rotary(width, start + tokens, 100.0)(start, tokens))


def turned(heads, kv_heads, rotary):
    return lambda joined, backend: rotate_joined(joined, rotary, heads, kv_heads, backend=backend)


SHAPES = [
    (1, 1, 3, 2, 32),
    (2, 5, 3, 1, 6),  # grouped queries; three pairs; 10 tokens leave a tile unfilled
    (3, 11, 2, 2, 10),  # a tile with the end of one window and the start of the next
    (1, 16, 2, 1, 64),
    (2, 9, 4, 2, 96),  # no power of two
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_errs_at_most_twice_as_much_as_plain_pytorch(shape, dtype):
    from headwater.ops.triton.launch import launches

    before = launches["rotary"], launches["rotary_backward"]
    rotary = tables(shape[1], shape[-1], start=3)
    assert excess(turned(*shape[2:4], rotary), draw(*shape, dtype=dtype)) <= 1
    assert (launches["rotary"], launches["rotary_backward"]) == (before[0] + 1, before[1] + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="the interpreter would take minutes")
@pytest.mark.parametrize("shape", [(3, 1023, 6, 6, 64), (2, 1024, 12, 4, 96), (2, 500, 16, 8, 128)])
def test_many_tokens(shape):
    rotary = tables(shape[1], shape[-1])
    assert excess(turned(*shape[2:4], rotary), draw(*shape, dtype=torch.bfloat16)) <= 1


@pytest.mark.gpu
def test_values_and_their_gradients_are_copied_bit_by_bit():
    """Infinite ones too, which a turn by the angle zero would make NaN."""
    joined = draw(2, 5, 2, 1, 8).requires_grad_()
    with torch.no_grad():
        joined[0, 0, -1] = torch.inf
    _, _, v = rotate_joined(joined, tables(5, 8), 2, 1, backend="triton")
    assert torch.equal(v[:, 0], joined[..., -8:])
    seed = torch.randn_like(v)
    seed[0, 0, 0, 0] = torch.inf
    (actual,) = torch.autograd.grad(v, joined, seed)
    assert torch.equal(actual[..., -8:], seed[:, 0])
    assert not actual[..., :-8].any()


@pytest.mark.gpu
def test_attention_gets_heads_behind_tokens():
    """And its gradients in any layout are right."""
    joined, rotary = draw(2, 5, 4, 2, 8), tables(5, 8)
    for backend in ("triton", "reference"):
        q, k, v = rotate_joined(joined, rotary, 4, 2, backend=backend)
        assert [tuple(part.shape) for part in (q, k, v)] == [
            (2, 4, 5, 8),
            (2, 2, 5, 8),
            (2, 2, 5, 8),
        ]
        assert all(part.stride()[1] == 8 and part.stride()[-1] == 1 for part in (q, k, v))

    def heads_first(joined, backend):
        return [
            part * part.sin()
            for part in map(torch.Tensor.contiguous, turned(4, 2, rotary)(joined, backend))
        ]

    assert excess(heads_first, joined) <= 1


def test_it_compiles_to_one_graph_with_one_node_each_way():
    """Nothing is put together behind the backward's."""
    joined, function = draw(1, 5, 4, 2, 8), turned(4, 2, tables(5, 8))
    actual, forward, backward = compiled_nodes(lambda x: function(x, "triton"), joined)
    desired = results(lambda x: function(x, "triton"), joined, torch.float32)
    torch.testing.assert_close(actual, desired, atol=0, rtol=0)
    assert forward.count("headwater.rotary_forward.default") == 1
    assert backward == ["headwater.rotary_backward.default"]


def test_what_does_not_fit_is_named():
    joined = draw(1, 5, 4, 2, 8)
    with pytest.raises(ValueError, match=r"3 and 2 heads takes \(B, T, 7 d\)"):
        rotate_joined(joined, tables(5, 8), 3, 2)
    with pytest.raises(ValueError, match=r"\(1, 5, 64\), \(4, 4\) and \(4, 4\)"):
        rotate_joined(joined, tables(4, 8), 4, 2)
    q, _, _ = rotate_joined(joined.requires_grad_(), tables(5, 8), 4, 2, backend="triton")
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(q.sum(), joined, create_graph=True)
