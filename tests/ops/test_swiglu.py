"""SwiGLU's gate of a joined projection: the kernel against its reference."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import (
    DTYPES,
    HERE,
    assert_first_order,
    compiled_nodes,
    excess,
    needs_gpu,
    poisoned,
    results,
)
from torch.testing import assert_close

from headwater.ops.swiglu import swiglu

pytest.importorskip("triton", reason="the kernel needs triton")

from headwater.ops.triton.launch import launches

TILES = [
    (1, 64),
    (17, 5),  # one row more than a tile
    (3, 123),  # rows at odd addresses
    (33, 344),  # no power of two, the last tile with 88 of 128 channels
    (16, 256),  # tiles that fit
]


def draw(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randn(*shape, generator=generator)).to(HERE, dtype)


def gated(joined, backend="triton"):
    return (swiglu(joined, backend=backend),)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), TILES)
def test_the_kernel_errs_at_most_twice_as_much_as_plain_pytorch(tokens, width, dtype):
    before = launches.copy()
    assert excess(gated, draw(tokens, 2 * width, dtype=dtype)) <= 1
    assert launches - before == {"swiglu": 1, "swiglu_backward": 1}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("tokens", "width"),
    [*((2049, width) for width in (344, 352, 512, 704, 1024, 1408)), (65, 28672)],
)
def test_many_tokens(tokens, width):
    """28672: joined rows are wider than other kernels take."""
    assert excess(gated, draw(2, tokens, 2 * width, dtype=torch.bfloat16)) <= 1


def test_the_reference_is_the_formula_of_its_halves():
    joined = draw(2, 3, 14)
    gate, up = joined.split(7, -1)
    for value in (swiglu(joined, backend="reference"), swiglu(gate, up)):
        assert torch.equal(value, F.silu(gate) * up)


@pytest.mark.parametrize("reader", ["sum", "transposed"])
def test_gradients_that_are_not_contiguous(reader):
    """A sum's gradient is one number, expanded; a transposed reader's has another order."""
    joined = draw(2, 6, 10).requires_grad_()
    gradients = []
    for backend in ("triton", "reference"):
        y = swiglu(joined, backend=backend)
        total = y.sum()
        if reader == "transposed":
            total = (y.transpose(0, 1) * draw(6, 2, 5)).sum()
        gradients += torch.autograd.grad(total, joined)
    assert_close(*gradients, atol=1e-6, rtol=1e-5)


def test_far_gates_stay_finite():
    """The sigmoid is 0 or 1 there, and exp overflows."""
    gates = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 0.0]], device=HERE)
    joined = torch.cat((gates, torch.arange(1.0, 6, device=HERE)[None]), 1)
    with poisoned():
        values = results(gated, joined, torch.float32)
    expected = results(lambda x: gated(x, "reference"), joined, torch.float32)
    assert_close(values, expected, atol=1e-6, rtol=1e-5)


def test_it_compiles_to_one_graph_with_one_node_each_way():
    """No concatenation follows the backward's node."""
    joined = draw(4, 12)
    values, forward, backward = compiled_nodes(gated, joined)
    assert_close(values, results(gated, joined, torch.float32), atol=0, rtol=0)
    assert forward == ["headwater.swiglu_forward.default"]
    assert backward == ["headwater.swiglu_backward.default"]


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"got \(3, 5\)"):
        swiglu(draw(3, 5))
    with pytest.raises(ValueError, match="in one tensor, got two"):
        swiglu(draw(3, 5), draw(3, 5), backend="triton")
    joined = draw(3, 4).requires_grad_()
    assert_first_order(swiglu(joined, backend="triton"), joined)
