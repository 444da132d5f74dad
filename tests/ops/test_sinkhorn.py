"""Sinkhorn's operator: what it promises, its hand-written backward, and its kernel."""

import pytest
import torch

from headwater.ops import sinkhorn

GPU = torch.cuda.is_available()
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(GPU, reason="the interpreter is off where there is a GPU")
    ),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
    ),
]
FORMS = [("reference", 4), ("reference", 5), ("triton", 4)]


def draw(n, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n)
    return (2 * torch.randn(5, 7, n, n, generator=generator, dtype=torch.float64)).to(dtype)


def by_division(logits, iterations):
    """The paper's loop under autograd."""
    matrix = logits.exp()
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


def value_and_gradient(function, logits):
    leaf = logits.clone().requires_grad_()
    value = function(leaf, 20)
    along = torch.randn(
        value.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    ).to(value)
    return value.detach(), torch.autograd.grad(value, leaf, along)[0]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_value_and_gradient_are_those_of_the_divisions(n):
    for value, plain in zip(
        value_and_gradient(sinkhorn, draw(n)), value_and_gradient(by_division, draw(n))
    ):
        torch.testing.assert_close(value, plain, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_the_number_of_iterations_is_exact(iterations):
    torch.testing.assert_close(
        sinkhorn(draw(4), iterations), by_division(draw(4), iterations), atol=1e-14, rtol=0
    )
    assert (sinkhorn(draw(4), iterations) - by_division(draw(4), iterations + 1)).abs().max() > 1e-9


@pytest.mark.parametrize("lead", [0.0, 8.0, 16.0])
def test_transforms_of_torch_func_find_the_same(lead):
    logits = (draw(4) / 2 + lead * torch.eye(4).roll(1, 0)).float()
    along = torch.randn(4, 4, generator=torch.Generator().manual_seed(9))
    leaf = logits.clone().requires_grad_()
    value = sinkhorn(leaf, 20)
    (gradient,) = torch.autograd.grad((value * along).sum(), leaf)
    one = torch.func.grad_and_value(lambda x: (sinkhorn(x, 20) * along).sum())
    gradients, values = torch.vmap(torch.vmap(one))(logits)
    torch.testing.assert_close(values, (value * along).sum((-2, -1)), atol=1e-5, rtol=1e-5)
    assert ((gradients - gradient).norm(dim=(-2, -1)) < 6e-5 * gradient.norm(dim=(-2, -1))).all()


@pytest.mark.parametrize(("backend", "n"), FORMS)
@pytest.mark.parametrize("lead", [8.0, 16.0, 30.0])
@pytest.mark.parametrize("device", DEVICES)
def test_near_a_permutation_the_gradient_is_not_what_rounding_leaves_of_a_difference(
    device, lead, backend, n
):
    """exp(-8) beside 1 is where mHC starts."""
    pytest.importorskip("triton", reason="the kernel needs triton")
    logits = (draw(n) / 2 + lead * torch.eye(n).roll(1, 0)).float()
    truth = value_and_gradient(by_division, logits.double())
    actual = value_and_gradient(lambda x, i: sinkhorn(x, i, backend=backend), logits.to(device))
    for value, exact in zip(actual, truth, strict=True):
        assert ((value.cpu() - exact).norm(dim=(-2, -1)) < 3e-5 * exact.norm(dim=(-2, -1))).all()


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_is_as_good_as_the_reference(n, device):
    pytest.importorskip("triton", reason="the kernel needs triton")
    from headwater.ops.triton.launch import launches

    truth = value_and_gradient(by_division, draw(n))
    results = {}
    for backend in ("triton", "reference"):
        before = launches["sinkhorn"], launches["sinkhorn_backward"]
        low = draw(n, torch.float32).to(device)
        results[backend] = value_and_gradient(
            lambda x, i, b=backend: sinkhorn(x, i, backend=b), low
        )
        ran = (launches["sinkhorn"] - before[0], launches["sinkhorn_backward"] - before[1])
        assert ran == ((1, 1) if backend == "triton" else (0, 0))
    for kernel, reference, exact in zip(results["triton"], results["reference"], truth):
        error, plain = (
            (x.double().cpu() - exact).norm() / exact.norm() for x in (kernel, reference)
        )
        assert error <= 2 * plain + 1e-6


def test_only_the_logits_are_kept_for_the_backward():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        sinkhorn(draw(4).requires_grad_(), 20)
    assert saved == [5 * 7 * 16]


def test_rows_and_columns_sum_to_one():
    matrix = sinkhorn(draw(4), 200)
    ones = torch.ones(5, 7, 4, dtype=torch.float64)
    torch.testing.assert_close(matrix.sum(-1), ones, atol=1e-14, rtol=0)
    torch.testing.assert_close(matrix.sum(-2), ones, atol=1e-6, rtol=0)


def test_it_survives_logits_that_exp_cannot():
    logits = torch.tensor([[500.0, -500.0], [0.0, 900.0]], requires_grad=True)
    matrix = sinkhorn(logits, 20)
    torch.testing.assert_close(matrix, torch.eye(2))
    matrix[0, 0].backward()
    assert logits.grad.isfinite().all()


def test_it_survives_a_row_far_below_the_others():
    matrix = sinkhorn(torch.tensor([[0.0, 0.0], [-300.0, -300.0]]), 20)
    torch.testing.assert_close(matrix, torch.full((2, 2), 0.5))


@pytest.mark.parametrize(("backend", "n"), FORMS)
@pytest.mark.parametrize("device", DEVICES)
def test_logits_below_the_floor_have_no_gradient(backend, n, device):
    """A whole row of them, which the next division lifts again: there a gradient of its own would show."""
    pytest.importorskip("triton", reason="the kernel needs triton")
    logits = draw(n)[0, 0]
    logits[1] -= 300

    def floored(x, iterations):
        largest = x.detach().amax(-2, keepdim=True)
        return by_division((x - largest).exp().clamp_min(1e-18).log(), iterations)

    truth = value_and_gradient(floored, logits)
    low = logits.to(device, torch.float32)
    value, gradient = value_and_gradient(lambda x, i: sinkhorn(x, i, backend=backend), low)
    assert torch.equal(gradient[1].cpu(), torch.zeros(n))
    torch.testing.assert_close(value.double().cpu(), truth[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient.double().cpu(), truth[1], atol=1e-5, rtol=1e-5)


def test_second_derivatives_are_refused():
    """Also where the gradient that arrives is a constant."""
    logits = draw(3).requires_grad_()
    with pytest.raises(RuntimeError, match="sinkhorn has no second derivatives"):
        torch.autograd.grad(sinkhorn(logits, 2)[..., 0].sum(), logits, create_graph=True)


def test_it_compiles_to_one_graph_with_its_gradient():
    """Dynamo traces the backward too, its refusal included."""
    compiled = torch.compile(sinkhorn, backend="aot_eager", fullgraph=True)
    for one, other in zip(
        value_and_gradient(compiled, draw(3)), value_and_gradient(sinkhorn, draw(3))
    ):
        torch.testing.assert_close(one, other)
    torch._dynamo.reset()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        sinkhorn(torch.zeros(2, 2), 0)
    with pytest.raises(ValueError, match=r"square matrices \(..., n, n\), got \(2, 3\)"):
        sinkhorn(torch.zeros(2, 3), 1)
    with pytest.raises(ValueError, match="up to 4 rows"):
        sinkhorn(torch.zeros(5, 5), 1, backend="triton")
