"""Sinkhorn's operator: what it promises, its hand-written backward, and its kernel."""

import pytest
import torch
from kernel_cases import (
    DEVICES,
    assert_all_close,
    assert_as_exact,
    assert_first_order,
    leaves_of,
    saved_for_backward,
)
from torch.testing import assert_close

from headwater.ops import sinkhorn

pytest.importorskip("triton", reason="the kernel needs triton")

from headwater.ops.triton.launch import launches

FORMS = [("reference", 4), ("reference", 5), ("triton", 4)]


def draw(n, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n)
    logits = torch.randn(5, 7, n, n, generator=generator, dtype=torch.float64)
    return (2 * logits).to(dtype)


def near_a_permutation(n, lead):
    return (draw(n) / 2 + lead * torch.eye(n).roll(1, 0)).float()


def by_division(logits, iterations):
    """The paper's loop under autograd."""
    matrix = logits.exp()
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


def value_and_gradient(function, logits, **options):
    (leaf,) = leaves_of([logits])
    value = function(leaf, 20, **options)
    generator = torch.Generator().manual_seed(9)
    along = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    along = along.to(value)
    return value.detach(), torch.autograd.grad(value, leaf, along)[0]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_value_and_gradient_are_those_of_the_divisions(n):
    expected = value_and_gradient(by_division, draw(n))
    assert_all_close(value_and_gradient(sinkhorn, draw(n)), expected, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_the_number_of_iterations_is_exact(iterations):
    matrix = sinkhorn(draw(4), iterations)
    expected = by_division(draw(4), iterations)
    further = by_division(draw(4), iterations + 1)
    assert_close(matrix, expected, atol=1e-14, rtol=0)
    assert (matrix - further).abs().max() > 1e-9


def assert_each_matrix_close(values, expected, limit):
    distances, sizes = (x.norm(dim=(-2, -1)) for x in (values - expected, expected))
    assert (distances < limit * sizes).all()


@pytest.mark.parametrize("lead", [0.0, 8.0, 16.0])
def test_transforms_of_torch_func_find_the_same(lead):
    logits = near_a_permutation(4, lead)
    along = torch.randn(4, 4, generator=torch.Generator().manual_seed(9))

    def sums(x):
        return (sinkhorn(x, 20) * along).sum((-2, -1))

    (leaf,) = leaves_of([logits])
    expected = sums(leaf)
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    of_one = torch.func.grad_and_value(sums)
    gradients, values = torch.vmap(torch.vmap(of_one))(logits)
    assert_close(values, expected, atol=1e-5, rtol=1e-5)
    assert_each_matrix_close(gradients, gradient, 6e-5)


@pytest.mark.parametrize(("backend", "n"), FORMS)
@pytest.mark.parametrize("lead", [8.0, 16.0, 30.0])
@pytest.mark.parametrize("device", DEVICES)
def test_near_a_permutation_the_gradient_is_not_what_rounding_leaves_of_a_difference(
    device, lead, backend, n
):
    """exp(-8) beside 1 is where mHC starts."""
    logits = near_a_permutation(n, lead)
    truth = value_and_gradient(by_division, logits.double())
    values = value_and_gradient(sinkhorn, logits.to(device), backend=backend)
    for value, exact in zip(values, truth, strict=True):
        assert_each_matrix_close(value.cpu(), exact, 3e-5)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_is_as_good_as_the_reference(n, device):
    truth = value_and_gradient(by_division, draw(n))
    low, before = draw(n, torch.float32).to(device), launches.copy()
    plain = value_and_gradient(sinkhorn, low, backend="reference")
    assert launches == before
    values = value_and_gradient(sinkhorn, low, backend="triton")
    assert launches - before == {"sinkhorn": 1, "sinkhorn_backward": 1}
    results = ([t.cpu() for t in several] for several in (values, plain))
    assert_as_exact(*results, truth, spare=1e-6)


def test_only_the_logits_are_kept_for_the_backward():
    leaves = leaves_of([draw(4)])
    saved = saved_for_backward(lambda: sinkhorn(*leaves, 20))
    assert [t.data_ptr() for t in saved] == [leaves[0].data_ptr()]


def test_rows_and_columns_sum_to_one():
    matrix = sinkhorn(draw(4), 200)
    ones = torch.ones(5, 7, 4, dtype=torch.float64)
    assert_close(matrix.sum(-1), ones, atol=1e-14, rtol=0)
    assert_close(matrix.sum(-2), ones, atol=1e-6, rtol=0)


def test_it_survives_logits_that_exp_cannot():
    logits = torch.tensor([[500.0, -500.0], [0.0, 900.0]], requires_grad=True)
    matrix = sinkhorn(logits, 20)
    assert_close(matrix, torch.eye(2))
    matrix[0, 0].backward()
    assert logits.grad.isfinite().all()
    # A row far below the others.
    matrix = sinkhorn(torch.tensor([[0.0], [-300.0]]).expand(2, 2), 20)
    assert_close(matrix, torch.full((2, 2), 0.5))


@pytest.mark.parametrize(("backend", "n"), FORMS)
@pytest.mark.parametrize("device", DEVICES)
def test_logits_below_the_floor_have_no_gradient(backend, n, device):
    """A whole row of them, which the next division lifts again: there a gradient would show."""
    logits = draw(n)[0, 0]
    logits[1] -= 300

    def floored(x, iterations):
        largest = x.detach().amax(-2, keepdim=True)
        return by_division((x - largest).exp().clamp_min(1e-18).log(), iterations)

    truth = value_and_gradient(floored, logits)
    low = logits.to(device, torch.float32)
    values = value_and_gradient(sinkhorn, low, backend=backend)
    assert torch.equal(values[1][1].cpu(), torch.zeros(n))
    assert_all_close([t.double().cpu() for t in values], truth)


def test_second_derivatives_are_refused():
    """Also where the gradient that arrives is a constant."""
    logits = draw(3).requires_grad_()
    assert_first_order(sinkhorn(logits, 2)[..., 0], logits)


def test_it_compiles_to_one_graph_with_its_gradient():
    """Dynamo traces the backward too, its refusal included."""
    compiled = torch.compile(sinkhorn, backend="aot_eager", fullgraph=True)
    values = value_and_gradient(compiled, draw(3))
    assert_close(values, value_and_gradient(sinkhorn, draw(3)))
    torch._dynamo.reset()


def test_what_does_not_fit_is_refused():
    for columns, iterations in ((2, 0), (3, 1)):
        with pytest.raises(ValueError, match="square matrices"):
            sinkhorn(torch.zeros(2, columns), iterations)
    with pytest.raises(ValueError, match="up to 4 rows"):
        sinkhorn(torch.zeros(5, 5), 1, backend="triton")
