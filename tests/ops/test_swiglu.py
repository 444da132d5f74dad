"""SwiGLU's gate of a joined projection: kernel against reference (under the interpreter here, on a GPU there)."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import compiled_nodes, excess, poisoned, results

from headwater.ops.swiglu import swiglu

pytest.importorskip("triton", reason="the kernel needs triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape, dtype=torch.float32):
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).to(DEVICE, dtype)


def gated(joined, backend):
    return (swiglu(joined, backend=backend),)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "width"),
    [
        (1, 64),
        (17, 5),  # one row more than a tile
        (3, 123),  # rows at odd addresses
        (33, 344),  # no power of two, the last tile with 88 of 128 channels
        (16, 256),  # tiles that fit
    ],
)
def test_the_kernel_errs_at_most_twice_as_much_as_plain_pytorch(tokens, width, dtype):
    from headwater.ops.triton.launch import launches

    before = launches["swiglu"], launches["swiglu_backward"]
    assert excess(gated, draw(tokens, 2 * width, dtype=dtype)) <= 1
    assert (launches["swiglu"], launches["swiglu_backward"]) == (before[0] + 1, before[1] + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="the interpreter would take minutes")
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
    for actual in (swiglu(joined, backend="reference"), swiglu(gate, up)):
        assert torch.equal(actual, F.silu(gate) * up)


def test_gradients_that_are_not_contiguous():
    """A sum's gradient is one number, expanded; a transposed reader's has another order."""
    joined = draw(2, 6, 10).requires_grad_()
    for reader in (lambda y: y.sum(), lambda y: (y.transpose(0, 1) * draw(6, 2, 5)).sum()):
        actual, desired = (
            torch.autograd.grad(reader(swiglu(joined, backend=backend)), joined)[0]
            for backend in ("triton", "reference")
        )
        torch.testing.assert_close(actual, desired, atol=1e-6, rtol=1e-5)


def test_far_gates_stay_finite():
    """The sigmoid is 0 or 1 there, and exp overflows."""
    joined = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]], device=DEVICE)
    with poisoned():
        y, gradient = results(lambda x: gated(x, "triton"), joined, torch.float32)
    desired = results(lambda x: gated(x, "reference"), joined, torch.float32)
    torch.testing.assert_close([y, gradient], desired, atol=1e-6, rtol=1e-5)


def test_it_compiles_to_one_graph_with_one_node_each_way():
    """No concatenation behind the backward's."""
    joined = draw(4, 12)
    actual, forward, backward = compiled_nodes(lambda x: gated(x, "triton"), joined)
    torch.testing.assert_close(
        actual, results(lambda x: gated(x, "triton"), joined, torch.float32), atol=0, rtol=0
    )
    assert forward == ["headwater.swiglu_forward.default"]
    assert backward == ["headwater.swiglu_backward.default"]


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"side by side, \(..., 2 W\), got \(3, 5\)"):
        swiglu(draw(3, 5))
    with pytest.raises(ValueError, match="in one tensor, got two"):
        swiglu(draw(3, 5), draw(3, 5), backend="triton")
    with pytest.raises(ValueError, match="float64"):
        swiglu(draw(3, 4, dtype=torch.float64), backend="triton")
    joined = draw(3, 4).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(swiglu(joined, backend="triton").sum(), joined, create_graph=True)
