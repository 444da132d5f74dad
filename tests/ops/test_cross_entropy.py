"""Head and loss in chunks: reference and kernel."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import GPU, HERE, assert_as_exact, assert_first_order

from headwater.ops import linear_cross_entropy
from headwater.ops.cross_entropy import operators, token_losses

both = pytest.mark.parametrize("backend", ["reference", "triton"])


def case(rows, vocabulary, dim=16, dtype=torch.float32, scale=1.0):
    torch.manual_seed(0)
    x = (scale * torch.randn(rows, dim, device=HERE)).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, dim, device=HERE, requires_grad=True)
    return x, weight, torch.randint(0, vocabulary, (rows,), device=HERE)


def exact(x, weight, targets):
    """The same in fp64, from the rounded inputs."""
    leaves = [t.detach().to(x.dtype).double().requires_grad_() for t in (x, weight)]
    losses = F.cross_entropy(leaves[0] @ leaves[1].T, targets, reduction="none")
    return losses.detach(), losses.mean().detach(), *torch.autograd.grad(losses.mean(), leaves)


@pytest.mark.gpu
@both
@pytest.mark.parametrize(
    ("rows", "vocabulary", "chunk"), [(7, 33, None), (9, 64, 4), (1, 5, 1), (5, 4100, 2)]
)
def test_it_is_the_cross_entropy_of_the_logits(rows, vocabulary, chunk, backend):
    """4100: a row of two tiles, the second with a few numbers. Some chunks leave a rest."""
    x, weight, targets = case(rows, vocabulary)
    losses, mean, dx, dw = exact(x, weight, targets)
    values = linear_cross_entropy(x, weight, targets, chunk=chunk, backend=backend)
    # tf32 products
    tolerance = {"atol": 2e-5, "rtol": 1e-5} if not GPU else {"atol": 2e-3, "rtol": 1e-2}
    torch.testing.assert_close(values.double(), mean, **tolerance)
    # A factor behind the mean reaches the gradients
    gradients = [g.double() for g in torch.autograd.grad(3 * values, (x, weight))]
    torch.testing.assert_close(gradients, [3 * dx, 3 * dw], **tolerance)
    x, targets = x.view(1, rows, -1), targets.view(1, rows)
    single = token_losses(x, weight, targets, chunk=chunk, backend=backend)
    torch.testing.assert_close(single.double().flatten(), losses, **tolerance)


@pytest.mark.gpu
@both
def test_in_bf16_it_errs_at_most_twice_as_much_as_plain_pytorch(backend):
    x, weight, targets = case(96, 70, dim=32, dtype=torch.bfloat16)
    _, mean, dx, dw = exact(x, weight, targets)
    plain = F.cross_entropy((x @ weight.to(x.dtype).T).float(), targets)
    values = linear_cross_entropy(x, weight, targets, chunk=40, backend=backend)
    results = [[y, *torch.autograd.grad(y, (x, weight))] for y in (values, plain)]
    assert_as_exact(*results, [mean, dx, dw], spare=1e-6)


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
    x, weight = x.detach().double(), weight.detach().double()
    plain = linear_cross_entropy(x, weight, targets, backend="reference")
    with torch.autocast(HERE, torch.bfloat16):
        assert torch.equal(plain, linear_cross_entropy(x, weight, targets, backend="reference"))
        assert linear_cross_entropy(x.to("meta"), weight.to("meta"), targets.to("meta")).shape == ()


@both
def test_extreme_logits_stay_finite(backend):
    x, weight, targets = case(4, 9, scale=1e4)
    values = linear_cross_entropy(x, weight, targets, backend=backend)
    assert all(g.isfinite().all() for g in (values, *torch.autograd.grad(values, (x, weight))))
    torch.testing.assert_close(values.double(), exact(x, weight, targets)[1], rtol=1e-5, atol=0)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("lead", [8.0, 16.0, 30.0])
def test_a_token_that_is_all_but_certain_keeps_its_digits(lead, backend):
    """Its loss, and softmax - 1, are not what rounding leaves of a difference."""
    torch.manual_seed(0)
    targets, one = torch.tensor([0, 3, 39, 5], device=HERE), torch.eye(40, device=HERE)
    # Which tf32 leaves as it is
    x = (torch.randn(4, 40, device=HERE) + lead * one[targets]).bfloat16().float()
    x.requires_grad_()
    others = x.detach().double().softmax(-1) * (1 - one[targets])
    rest = others.sum(-1)
    losses = token_losses(x, one, targets, backend=backend)
    (actual,) = torch.autograd.grad(4 * linear_cross_entropy(x, one, targets, backend=backend), x)
    torch.testing.assert_close(losses.double(), -torch.log1p(-rest), rtol=1e-5, atol=0)
    tolerance = 1e-5 if not GPU else 2e-3  # tf32 products
    torch.testing.assert_close(
        actual.double(), others - rest[:, None] * one[targets], rtol=tolerance, atol=0
    )


@both
def test_a_logit_that_overflowed_is_no_certainty(backend):
    x, one = torch.zeros(2, 5, device=HERE), torch.eye(5, device=HERE, dtype=torch.float16)
    x[0, 3], x[1, 3] = 60000.0, 1.0
    losses = token_losses(x.half(), 2 * one, torch.tensor([3, 3], device=HERE), backend=backend)
    assert losses.isnan().tolist() == [True, False]


def test_logits_of_all_tokens_are_never_there_at_once(monkeypatch):
    monkeypatch.setattr(operators, "CHUNK_BYTES", 4 * 50 * 128)
    sizes, losses = [], operators._losses

    def noted(logits, *rest):
        sizes.append(len(logits))
        return losses(logits, *rest)

    monkeypatch.setattr(operators, "_losses", noted)
    linear_cross_entropy(*case(1000, 50))
    assert sizes == [128] * 7 + [104]


def test_what_does_not_fit_is_named():
    x, weight, targets = case(4, 9)
    with pytest.raises(ValueError, match=r"got \(4, 16\), \(9, 15\) and \(4,\)"):
        linear_cross_entropy(x, weight[:, :-1], targets)
    assert_first_order(linear_cross_entropy(x, weight, targets), x)
