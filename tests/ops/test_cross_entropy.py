"""Head and loss in chunks, reference and kernel (under the interpreter here, on a GPU there)."""

import pytest
import torch
import torch.nn.functional as F

from headwater.ops import linear_cross_entropy
from headwater.ops.cross_entropy import token_losses

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def case(rows, vocabulary, dim=16, dtype=torch.float32, scale=1.0):
    torch.manual_seed(0)
    x = (scale * torch.randn(rows, dim, device=DEVICE)).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, dim, device=DEVICE, requires_grad=True)
    return x, weight, torch.randint(0, vocabulary, (rows,), device=DEVICE)


def exact(x, weight, targets):
    """The same in fp64, from the rounded inputs."""
    leaves = [x.detach().double().requires_grad_(), weight.detach().to(x.dtype).double().requires_grad_()]
    losses = F.cross_entropy(leaves[0] @ leaves[1].T, targets, reduction="none")
    return losses.detach(), losses.mean().detach(), *torch.autograd.grad(losses.mean(), leaves)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("rows", "vocabulary", "chunk"), [(7, 33, None), (9, 64, 4), (1, 5, 1), (5, 4100, 2)])
def test_it_is_the_cross_entropy_of_the_logits(rows, vocabulary, chunk, backend):
    """4100: a row of two tiles, the second with a few numbers. A chunk that does not divide the rows."""
    x, weight, targets = case(rows, vocabulary)
    losses, mean, dx, dw = exact(x, weight, targets)
    ours = linear_cross_entropy(x, weight, targets, chunk=chunk, backend=backend)
    tolerance = {"atol": 2e-5, "rtol": 1e-5} if not GPU else {"atol": 2e-3, "rtol": 1e-2}  # tf32 products
    torch.testing.assert_close(ours.double(), mean, **tolerance)
    found = torch.autograd.grad(3 * ours, (x, weight))  # a factor behind the mean reaches the gradients
    for mine, other in zip(found, (dx, dw), strict=True):
        torch.testing.assert_close(mine.double(), 3 * other, **tolerance)
    each = token_losses(x.view(1, rows, -1), weight, targets.view(1, rows), chunk=chunk, backend=backend)
    torch.testing.assert_close(each.double().flatten(), losses, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_in_bf16_it_errs_at_most_twice_as_much_as_plain_pytorch(backend):
    x, weight, targets = case(96, 70, dim=32, dtype=torch.bfloat16)
    _, mean, dx, dw = exact(x, weight, targets)
    plain = F.cross_entropy((x @ weight.to(x.dtype).T).float(), targets)
    ours = linear_cross_entropy(x, weight, targets, chunk=40, backend=backend)
    assert abs(ours.double() - mean) <= 2 * abs(plain.double() - mean) + 1e-5
    pairs = zip(torch.autograd.grad(ours, (x, weight)), torch.autograd.grad(plain, (x, weight)), (dx, dw), strict=True)
    for mine, theirs, truth in pairs:
        assert (mine.double() - truth).norm() <= 2 * (theirs.double() - truth).norm() + 1e-5


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_extreme_logits_stay_finite(backend):
    x, weight, targets = case(4, 9, scale=1e4)
    ours = linear_cross_entropy(x, weight, targets, backend=backend)
    assert all(g.isfinite().all() for g in (ours, *torch.autograd.grad(ours, (x, weight))))
    torch.testing.assert_close(ours.double(), exact(x, weight, targets)[1], rtol=1e-5, atol=0)


def test_logits_of_all_tokens_are_never_there_at_once(monkeypatch):
    from headwater.ops.cross_entropy import operators

    monkeypatch.setattr(operators, "CHUNK_BYTES", 4 * 50 * 128)
    sizes, real = [], operators._losses
    monkeypatch.setattr(operators, "_losses", lambda logits, *rest: (sizes.append(len(logits)), real(logits, *rest))[1])
    linear_cross_entropy(*case(1000, 50))
    assert sizes == [128] * 7 + [104]


def test_what_does_not_fit_is_named():
    x, weight, targets = case(4, 9)
    with pytest.raises(ValueError, match=r"got \(4, 16\), \(9, 15\) and \(4,\)"):
        linear_cross_entropy(x, weight[:, :-1], targets)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(linear_cross_entropy(x, weight, targets), x, create_graph=True)
