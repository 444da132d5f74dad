"""Sums of a bank: the kernels against fp64 and plain PyTorch, in values and every gradient."""

import pytest
import torch
from kernel_cases import (
    DEVICES,
    DTYPES,
    HERE,
    INDUCTOR,
    UNFUSED,
    assert_all_close,
    assert_all_equal,
    assert_first_order,
    check_against_fp64,
    error,
    interpreted,
    leaves_of,
    needs_gpu,
    with_gradients,
)
from torch.testing import assert_close

from headwater.ops.banks import mix_bank, project_source

pytest.importorskip("triton", reason="the kernels need triton")

from headwater.ops.triton.launch import launches

SHAPES = [  # tensors before the first read, ways, width, tokens, weights
    (1, 1, 64, (1,), "each"),  # one tensor, one token
    (2, 4, 123, (5,), "each"),  # rows that begin anywhere
    (5, 3, 40, (1, 3), "each"),  # no power of two, more tensors than a program takes at once
    (2, 4, 300, (3,), "shared"),  # two tiles of channels
    (5, 1, 16, (7,), "shared"),
    (1, 9, 24, (2,), "each"),  # more ways than a launch of the backward serves
]
READS = 3


def draw(count, ways, dim, tokens, form, dtype=torch.float32, device=HERE):
    generator = torch.Generator().manual_seed(count)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    bank = [normal(*tokens, dim, dtype=dtype) for _ in range(count)]
    lead = tokens if form == "each" else ()
    sizes = [(ways, count + k) for k in range(READS)]
    weights = [normal(*lead, *size) for size in sizes]
    downs = [normal(w * n, dim) / dim**0.5 for w, n in sizes]
    seeds = [normal(*tokens, dim, dtype=dtype) for _ in range(READS * ways)]
    return [*bank, *weights, *downs], seeds


def run(inputs, seeds, form, backend):
    """Values and gradients of three reads of one bank, which grows by the results.

    Weights of a token depend on the newest tensor.
    """
    leaves = leaves_of(inputs)
    bank, weights, downs = leaves[: -2 * READS], leaves[-2 * READS : -READS], leaves[-READS:]
    outputs = []
    for k, (way, down) in enumerate(zip(weights, downs)):
        if form == "each":
            z, newest = project_source(bank[-1], down, backend=backend)
            way = way + 0.3 * z.tanh().view_as(way)
            bank = [*bank[:-1], newest]
        sums, bank = mix_bank(bank, way, thread=k < READS - 1, backend=backend)
        outputs += sums
        bank = [*bank, 0.5 * sums[0] - 0.2 * sums[-1]]
    return with_gradients(outputs, leaves, seeds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "ways", "dim", "tokens", "form"), SHAPES)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_are_as_exact_as_plain_pytorch(device, count, ways, dim, tokens, form, dtype):
    before = launches.copy()
    inputs, seeds = draw(count, ways, dim, tokens, form, dtype, device)
    values = check_against_fp64(run, inputs, seeds, form)
    ran = launches - before
    assert ran["mix_bank"] == ran["mix_bank_backward"] == READS
    assert ran["score"] == ran["score_backward"] == (READS if form == "each" else 0)
    assert len(values) == READS * (ways + 1 + (form == "each")) + count


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "ways", "dim", "form"),
    [
        (47, 4, 384, "each"),
        (12, 4, 256, "each"),
        (9, 1, 2048, "each"),
        (24, 1, 640, "shared"),
        (5, 3, 123, "shared"),
    ],
)
def test_many_tokens_are_as_exact_and_repeat_bit_by_bit(count, ways, dim, form, dtype):
    inputs, seeds = draw(count, ways, dim, (2, 750), form, dtype)
    values = check_against_fp64(run, inputs, seeds, form)
    for _ in range(10):
        assert_all_equal(values, run(inputs, seeds, form, "triton"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_a_weight_of_one_gives_its_tensor_exactly(device, lead):
    bank = [*torch.randn(4, 3, 20, device=device).bfloat16()]
    weights = torch.eye(4, device=device)[-1:].expand(*lead, 1, 4)
    sums, again = mix_bank(bank, weights, backend="triton")
    assert_all_equal((*sums, *again), (bank[-1], *bank))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("used", [(1,), (2,), (0, 2)])
def test_what_is_left_unused_has_no_part_in_the_gradient(used, device):
    """One way of several, only the bank, one tensor of the bank beside a way."""
    inputs, seeds = draw(3, 2, 20, (3,), "each", device=device)

    def results(backend, dtype):
        *bank, weights = leaves = leaves_of(inputs[:4], dtype)
        sums, again = mix_bank(bank, weights, backend=backend)
        outputs = (*sums, again[1])
        outputs, along = zip(*((outputs[k], seeds[k]) for k in used))
        return with_gradients(outputs, leaves, along)

    values, truth = results("triton", torch.float32), results("reference", torch.float64)
    assert all(error(*pair) < 1e-5 for pair in zip(values, truth, strict=True))


@interpreted
@pytest.mark.parametrize("compiled", [False, True])
def test_two_tensors_may_share_one_gradient(compiled):
    """A later read made that gradient, and neither tensor may add to it."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, 16, requires_grad=True) for _ in range(2)]
    first, second = torch.randn(1, 2), torch.randn(2, 1, 2)

    def loss(backend="triton"):
        copies = [leaf * 1.0 for leaf in leaves]
        (x,), (a, b) = mix_bank(copies, first, backend=backend)
        (y,), again = mix_bank([a + b, x], second, backend=backend)
        squares = y.square() + x.square()
        return (squares + again[0] * y).sum()

    function = torch.compile(loss, options=INDUCTOR | UNFUSED) if compiled else loss
    values = torch.autograd.grad(function(), leaves)
    assert_all_close(values, torch.autograd.grad(loss("reference"), leaves))


def test_a_gradient_that_somebody_else_has_stays_as_it_is():
    """Another term of a sum, a read of another bank, a caller of autograd.grad who goes on."""
    torch.manual_seed(0)
    leaves = leaves_of(torch.randn(3, 2, 16, device=HERE))
    weights = torch.tensor([[0.7]], device=HERE)

    def read(x, backend):
        (y,), (again,) = mix_bank([x], weights, backend=backend)
        # The reference returns the same tensor, of which autograd.grad could not tell two.
        return y, again.view_as(x) if backend == "reference" else again

    def gradients(backend):
        x, a = read(leaves[0], backend)
        y, b = read(leaves[1], backend)
        z, _ = read(a + b + leaves[2], backend)
        squares = y * y + z * z
        of_sum = torch.autograd.grad((x + squares).sum(), [a, *leaves])
        # A pass in two halves, with autograd.grad between.
        _, a = read(leaves[0], backend)
        (half,) = leaves_of([a])
        squares = read(half, backend)[0].square()
        (along,) = torch.autograd.grad(squares.sum(), half)
        of_halves = torch.autograd.grad(a, leaves[0], along, retain_graph=True)
        return *of_sum, *of_halves, along

    assert_all_close(gradients("triton"), gradients("reference"))


def test_without_gradients_the_same_kernels_run():
    inputs, _ = draw(3, 2, 24, (2,), "each")
    bank, weights = [t.requires_grad_() for t in inputs[:3]], inputs[3]
    sums, _ = mix_bank(bank, weights, backend="triton")
    with torch.no_grad():
        sums_again, again = mix_bank(bank, weights, backend="triton")
    assert_all_equal((*sums_again, *again), (*sums, *bank))


def test_second_derivatives_are_refused():
    x = torch.randn(2, 16, device=HERE, requires_grad=True)
    one = torch.ones(1, 1, device=HERE)
    (h,), _ = mix_bank([x], one, backend="triton")
    assert_first_order(h, x)


def test_what_the_kernels_cannot_take_goes_to_the_reference_or_is_refused():
    bank = [torch.randn(2, 8), torch.randn(2, 8).bfloat16()]
    weights = torch.randn(2, 3, 2)
    sums, again = mix_bank(bank, weights)
    stack = torch.stack([x.float() for x in bank], 1)
    assert_close(torch.stack(sums, 1), weights @ stack)
    assert all(a is b for a, b in zip(again, bank, strict=True))
    with pytest.raises(ValueError, match="tensors differ"):
        mix_bank(bank, weights, backend="triton")
    wrong = [weights[0, 0], weights[..., :1], weights[:1]]
    wrong += [weights.unsqueeze(0), weights.to("meta")]
    for tensor in wrong:
        with pytest.raises(ValueError, match="weights of 2 tensors"):
            mix_bank(bank, tensor)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bank_that_nobody_reads_again_has_no_part_in_the_backward(device):
    bank = [torch.randn(2, 8, device=device, requires_grad=True) for _ in "abc"]
    weights = torch.ones(1, 3, device=device)
    _, last = mix_bank(bank, weights, thread=False, backend="triton")
    _, threaded = mix_bank(bank, weights, thread=True, backend="triton")
    assert all(a is b for a, b in zip(last, bank, strict=True))
    assert all(value.grad_fn is not None for value in threaded)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("shape", [(1, 8), (2, 1), (2, 4)])
def test_a_tensor_of_another_shape_is_refused(backend, shape):
    """A kernel would read what lies behind it."""
    bank = [torch.zeros(2, 8), torch.zeros(shape)]
    with pytest.raises(ValueError, match="all of one shape"):
        mix_bank(bank, torch.ones(1, 2), backend=backend)
