"""Head and loss in chunks: reference and kernel."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import (
    GPU,
    HERE,
    assert_as_exact,
    assert_first_order,
    leaves_of,
    with_gradients,
)
from torch.testing import assert_close

from headwater.ops import linear_cross_entropy
from headwater.ops.cross_entropy import operators, token_losses

both = pytest.mark.parametrize("backend", ["reference", "triton"])
ONE = [torch.tensor(1.0)]  # the gradient of a loss


def case(rows, vocabulary, dim=16, dtype=torch.float32, scale=1.0):
    torch.manual_seed(0)
    x = scale * torch.randn(rows, dim, device=HERE)
    x = x.to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, dim, device=HERE, requires_grad=True)
    return x, weight, torch.randint(0, vocabulary, (rows,), device=HERE)


def exact(x, weight, targets):
    """The losses, their mean and its gradients in fp64, from the rounded inputs."""
    leaves = leaves_of([x, weight.to(x.dtype)], torch.float64)
    losses = F.cross_entropy(leaves[0] @ leaves[1].T, targets, reduction="none")
    return losses.detach(), with_gradients([losses.mean()], leaves, ONE)


@pytest.mark.gpu
@both
@pytest.mark.parametrize(
    ("rows", "vocabulary", "chunk"),
    [(7, 33, None), (9, 64, 4), (1, 5, 1), (5, 4100, 2)],
)
def test_it_is_the_cross_entropy_of_the_logits(rows, vocabulary, chunk, backend):
    """4100: a row of two tiles, the second with a few numbers. Some chunks leave a rest."""
    x, weight, targets = case(rows, vocabulary)
    losses, results = exact(x, weight, targets)
    # Products are in tf32 on a GPU.
    tolerance = {"atol": 2e-3, "rtol": 1e-2} if GPU else {"atol": 2e-5, "rtol": 1e-5}
    options = {"chunk": chunk, "backend": backend}
    # A factor behind the mean reaches the gradients.
    mean = 3 * linear_cross_entropy(x, weight, targets, **options)
    values = with_gradients([mean], (x, weight), ONE)
    values = [value.double() / 3 for value in values]
    assert_close(values, results, **tolerance)
    x, targets = x.view(1, rows, -1), targets.view(1, rows)
    single = token_losses(x, weight, targets, **options)
    assert_close(single.double().flatten(), losses, **tolerance)


@pytest.mark.gpu
@both
def test_in_bf16_it_errs_at_most_twice_as_much_as_plain_pytorch(backend):
    x, weight, targets = case(96, 70, dim=32, dtype=torch.bfloat16)
    logits = x @ weight.bfloat16().T
    plain = F.cross_entropy(logits.float(), targets)
    loss = linear_cross_entropy(x, weight, targets, chunk=40, backend=backend)
    results = [with_gradients([y], (x, weight), ONE) for y in (loss, plain)]
    _, truth = exact(x, weight, targets)
    assert_as_exact(*results, truth, spare=1e-6)


@pytest.mark.gpu
@both
def test_under_autocast_the_head_is_as_coarse_as_any_linear_layer(backend):
    """A final read in fp32 is not to make the largest product fp32."""
    x, weight, targets = case(96, 70, dim=32)
    with torch.autocast(HERE, torch.bfloat16):
        values = linear_cross_entropy(x, weight, targets, backend=backend)
        losses = token_losses(x, weight, targets, backend=backend)
    rounded = x.detach().bfloat16()
    assert torch.equal(values, linear_cross_entropy(rounded, weight, targets, backend=backend))
    assert torch.equal(losses, token_losses(rounded, weight, targets, backend=backend))
    assert torch.autograd.grad(values, x)[0].dtype == torch.float32


def test_autocast_leaves_fp64_and_shapes_without_numbers_as_they_are():
    x, weight, targets = case(5, 9)
    arguments = x.detach().double(), weight.detach().double(), targets
    plain = linear_cross_entropy(*arguments, backend="reference")
    with torch.autocast(HERE, torch.bfloat16):
        assert torch.equal(plain, linear_cross_entropy(*arguments, backend="reference"))
        on_meta = [t.to("meta") for t in arguments]
        assert linear_cross_entropy(*on_meta).shape == ()


@both
def test_extreme_logits_stay_finite(backend):
    x, weight, targets = case(4, 9, scale=1e4)
    loss = linear_cross_entropy(x, weight, targets, backend=backend)
    values = with_gradients([loss], (x, weight), ONE)
    assert all(value.isfinite().all() for value in values)
    expected = exact(x, weight, targets)[1][0]
    assert_close(loss.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("lead", [8.0, 16.0, 30.0])
def test_a_token_that_is_all_but_certain_keeps_its_digits(lead, backend):
    """Its loss, and softmax - 1, are not what rounding leaves of a difference."""
    torch.manual_seed(0)
    targets = torch.tensor([0, 3, 39, 5], device=HERE)
    one = torch.eye(40, device=HERE)
    hits = one[targets]
    logits = torch.randn(4, 40, device=HERE) + lead * hits
    (x,) = leaves_of([logits.bfloat16()], torch.float32)  # which tf32 leaves as it is
    others = x.detach().double().softmax(-1) * (1 - hits)
    rest = others.sum(-1)
    losses = token_losses(x, one, targets, backend=backend)
    assert_close(losses.double(), -torch.log1p(-rest), rtol=1e-5, atol=0)
    mean = linear_cross_entropy(x, one, targets, backend=backend)
    (gradient,) = torch.autograd.grad(4 * mean, x)
    expected = others - rest[:, None] * hits
    tolerance = 2e-3 if GPU else 1e-5  # tf32 products
    assert_close(gradient.double(), expected, rtol=tolerance, atol=0)


@both
def test_a_logit_that_overflowed_is_no_certainty(backend):
    x = torch.zeros(2, 5, device=HERE).half()
    x[:, 3] = torch.tensor([60000.0, 1.0])
    weight = 2 * torch.eye(5, device=HERE).half()
    targets = torch.tensor([3, 3], device=HERE)
    losses = token_losses(x, weight, targets, backend=backend)
    assert losses.isnan().tolist() == [True, False]


def test_logits_of_all_tokens_are_never_there_at_once(monkeypatch):
    monkeypatch.setattr(operators, "CHUNK_BYTES", 4 * 50 * 128)
    sizes, losses = [], operators._losses

    def counted(logits, *rest):
        sizes.append(len(logits))
        return losses(logits, *rest)

    monkeypatch.setattr(operators, "_losses", counted)
    linear_cross_entropy(*case(1000, 50))
    assert sizes == [128] * 7 + [104]


def test_what_does_not_fit_is_named():
    x, weight, targets = case(4, 9)
    with pytest.raises(ValueError, match=r"got \(4, 16\), \(9, 15\) and \(4,\)"):
        linear_cross_entropy(x, weight[:, :-1], targets)
    assert_first_order(linear_cross_entropy(x, weight, targets), x)
