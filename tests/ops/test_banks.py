"""Sums of a bank of layer outputs: the kernels against fp64 and plain PyTorch, in values and in every gradient."""

import pytest
import torch
from kernel_cases import INDUCTOR, UNFUSED, poisoned

from headwater.ops.banks import mix_bank, project_source

GPU = torch.cuda.is_available()
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(GPU, reason="the interpreter is off where there is a GPU")
    ),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
    ),
]
SHAPES = [  # tensors before the first read, ways, width, tokens, weights
    (1, 1, 64, (1,), "each"),  # one tensor, one token
    (2, 4, 123, (5,), "each"),  # rows that begin anywhere
    (5, 3, 40, (1, 3), "each"),  # no power of two, more tensors than a program takes at once
    (2, 4, 300, (3,), "shared"),  # two tiles of channels
    (5, 1, 16, (7,), "shared"),
    (1, 9, 24, (2,), "each"),  # more ways than a launch of the backward serves
]
READS = 3


def draw(count, ways, dim, tokens, form, dtype, device):
    generator = torch.Generator().manual_seed(count)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    bank = [normal(*tokens, dim, dtype=dtype) for _ in range(count)]
    sizes = [(ways, count + k) for k in range(READS)]
    weights = [normal(*(tokens if form == "each" else ()), *size) for size in sizes]
    downs = [normal(w * n, dim) / dim**0.5 for w, n in sizes]
    seeds = [normal(*tokens, dim, dtype=dtype) for _ in range(READS * ways)]
    return [*bank, *weights, *downs], seeds


def run(inputs, seeds, form, backend, dtype=None):
    """Values and all gradients of three reads of one bank, which grows by what they found; weights of a token depend on
    the newest."""
    leaves = [(t if dtype is None else t.to(dtype)).detach().requires_grad_() for t in inputs]
    bank, weights, downs = leaves[: -2 * READS], leaves[-2 * READS : -READS], leaves[-READS:]
    outputs = []
    for k, (arguments, down) in enumerate(zip(weights, downs)):
        if form == "each":
            z, newest = project_source(bank[-1], down, backend=backend)
            arguments, bank = (
                arguments + 0.3 * z.tanh().unflatten(-1, arguments.shape[-2:]),
                [*bank[:-1], newest],
            )
        actual, bank = mix_bank(bank, arguments, thread=k < READS - 1, backend=backend)
        outputs += actual
        bank = [*bank, 0.5 * actual[0] - 0.2 * actual[-1]]
    along = [seed.to(output.dtype) for seed, output in zip(seeds, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, leaves, along, allow_unused=True)
    return [*outputs, *(g for g in gradients if g is not None)]


def error(found, truth):
    return ((found.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "ways", "dim", "tokens", "form"), SHAPES)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_are_as_exact_as_plain_pytorch(device, count, ways, dim, tokens, form, dtype):
    pytest.importorskip("triton", reason="the kernels need triton")
    from headwater.ops.triton.launch import launches

    inputs, seeds = draw(count, ways, dim, tokens, form, dtype, device)
    before = launches.copy()
    with poisoned():
        values = run(inputs, seeds, form, "triton")
    ran = launches - before
    assert ran["mix_bank"] == ran["mix_bank_backward"] == READS
    assert ran["score"] == ran["score_backward"] == (READS if form == "each" else 0)
    plain = run(inputs, seeds, form, "reference")
    truth = run([t.double() for t in inputs], seeds, form, "reference", torch.float64)
    assert len(values) == len(plain) == len(truth) == READS * (ways + 1 + (form == "each")) + count
    times = (
        8 if dtype == torch.bfloat16 and device == "cpu" else 2
    )  # the interpreter truncates where a GPU rounds
    for value, other, exact in zip(values, plain, truth):
        assert value.dtype == other.dtype
        assert error(value, exact) <= times * error(other, exact) + 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights", [torch.eye(4)[-1:], torch.eye(4)[-1:].expand(3, 1, 4)])
def test_a_weight_of_one_gives_its_tensor_exactly(device, weights):
    pytest.importorskip("triton", reason="the kernels need triton")
    bank = [torch.randn(3, 20, dtype=torch.bfloat16, device=device) for _ in range(4)]
    (actual,), again = mix_bank(bank, weights.to(device), backend="triton")
    assert torch.equal(actual, bank[-1])
    assert all(torch.equal(a, b) for a, b in zip(again, bank, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_left_unused_has_no_part_in_the_gradient(device):
    """One way of several, the bank alone, one tensor of the bank beside a way."""
    pytest.importorskip("triton", reason="the kernels need triton")
    (*bank, weights, _, _), seeds = draw(3, 2, 20, (3,), "each", torch.float32, device)[0][:6], None
    seeds = [torch.randn(3, 20, device=device) for _ in range(3)]

    def results(backend, used, dtype):
        leaves = [t.to(dtype).detach().requires_grad_() for t in (*bank, weights)]
        outs, again = mix_bank(leaves[:-1], leaves[-1], backend=backend)
        outputs = (*outs, again[1])
        arguments = [seeds[k].to(dtype) for k in used]
        return torch.autograd.grad([outputs[k] for k in used], leaves, arguments, allow_unused=True)

    for used in ((1,), (2,), (0, 2)):
        for value, exact in zip(
            results("triton", used, torch.float32), results("reference", used, torch.float64)
        ):
            assert (value is None and exact is None) or error(value, exact) < 1e-5


@pytest.mark.parametrize("compiled", [False, True])
def test_two_tensors_may_share_one_gradient(compiled):
    """A later read made that gradient, and neither tensor may add to it."""
    pytest.importorskip("triton", reason="the kernels need triton")
    if GPU:
        pytest.skip("the interpreter is off where there is a GPU")
    torch.manual_seed(0)
    leaves = [torch.randn(2, 16, requires_grad=True) for _ in range(2)]
    first, second = torch.randn(1, 2), torch.randn(2, 1, 2)

    def loss(backend):
        (x,), (a, b) = mix_bank([leaf * 1.0 for leaf in leaves], first, backend=backend)
        (y,), (c, *_) = mix_bank([a + b, x], second, backend=backend)
        return (y.square() + x.square() + c * y).sum()

    values = (
        torch.compile(lambda: loss("triton"), options=INDUCTOR | UNFUSED)()
        if compiled
        else loss("triton")
    )
    for value, its in zip(
        torch.autograd.grad(values, leaves), torch.autograd.grad(loss("reference"), leaves)
    ):
        torch.testing.assert_close(value, its, atol=1e-5, rtol=1e-5)


def test_a_gradient_that_somebody_else_has_stays_as_it_is():
    """Another term of a sum, a read of another bank, who asks for it by autograd.grad and goes on from there."""
    pytest.importorskip("triton", reason="the kernels need triton")
    torch.manual_seed(0)
    leaves = [
        torch.randn(2, 16, device="cuda" if GPU else "cpu", requires_grad=True) for _ in range(3)
    ]
    weights = torch.tensor([[0.7]], device=leaves[0].device)

    def read(x, backend):
        (y,), (again,) = mix_bank([x], weights, backend=backend)
        return y, again.view_as(
            x
        ) if backend == "reference" else again  # where it is the same tensor

    def gradients(backend):
        x, a = read(leaves[0], backend)
        y, b = read(leaves[1], backend)
        z, _ = read(a + b + leaves[2], backend)
        middle, *ends = torch.autograd.grad((x + y * y + z * z).sum(), [a, *leaves])
        x, a = read(leaves[0], backend)
        half = a.detach().requires_grad_()
        (arguments,) = torch.autograd.grad(read(half, backend)[0].square().sum(), half)
        return [
            middle,
            *ends,
            *torch.autograd.grad(a, leaves[0], arguments, retain_graph=True),
            arguments,
        ]

    for value, its in zip(gradients("triton"), gradients("reference"), strict=True):
        torch.testing.assert_close(value, its, atol=1e-5, rtol=1e-5)


def test_without_gradients_the_same_kernels_run():
    pytest.importorskip("triton", reason="the kernels need triton")
    inputs, _ = draw(3, 2, 24, (2,), "each", torch.float32, "cuda" if GPU else "cpu")
    bank, weights = [t.requires_grad_() for t in inputs[:3]], inputs[3]
    outs, _ = mix_bank(bank, weights, backend="triton")
    with torch.no_grad():
        actual, again = mix_bank(bank, weights, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip((*actual, *again), (*outs, *bank), strict=True))


def test_second_derivatives_are_refused():
    pytest.importorskip("triton", reason="the kernels need triton")
    x = torch.randn(2, 16, device="cuda" if GPU else "cpu", requires_grad=True)
    (h,), _ = mix_bank([x], torch.ones(1, 1, device=x.device), backend="triton")
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(h.sum(), x, create_graph=True)


def test_what_the_kernels_cannot_take_goes_to_the_reference_or_is_refused():
    bank = [torch.randn(2, 8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    weights = torch.randn(2, 3, 2)
    outs, again = mix_bank(bank, weights)
    torch.testing.assert_close(
        torch.stack(outs, 1), weights @ torch.stack([x.float() for x in bank], 1)
    )
    assert all(a is b for a, b in zip(again, bank, strict=True))
    with pytest.raises(ValueError, match=r"tensors differ|triton is not installed"):
        mix_bank(bank, weights, backend="triton")
    for wrong in (weights[0, 0], weights[..., :1], weights[:1], weights.unsqueeze(0)):
        with pytest.raises(ValueError, match="weights of 2 tensors"):
            mix_bank(bank, wrong)
    with pytest.raises(ValueError, match=r"the weights are on meta, the bank is on"):
        mix_bank(bank, torch.ones(1, 2, device="meta"))


@pytest.mark.parametrize("device", DEVICES)
def test_a_bank_that_nobody_reads_again_has_no_part_in_the_backward(device):
    pytest.importorskip("triton", reason="the kernels need triton")
    bank, weights = (
        [torch.randn(2, 8, device=device, requires_grad=True) for _ in "abc"],
        torch.ones(1, 3, device=device),
    )
    last, threaded = (
        mix_bank(bank, weights, thread=thread, backend="triton")[1] for thread in (False, True)
    )
    assert all(value is arguments for value, arguments in zip(last, bank, strict=True))
    assert all(value.grad_fn is not None for value in threaded)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("shape", [(1, 8), (2, 1), (2, 4)])
def test_a_tensor_of_another_shape_is_refused(backend, shape):
    """A kernel would read what lies behind it."""
    with pytest.raises(ValueError, match=r"source 0 is \(2, 8\), source 1 is"):
        mix_bank([torch.zeros(2, 8), torch.zeros(shape)], torch.ones(1, 2), backend=backend)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
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
    inputs, seeds = draw(count, ways, dim, (2, 750), form, dtype, "cuda")
    with poisoned():
        values = run(inputs, seeds, form, "triton")
    plain = run(inputs, seeds, form, "reference")
    truth = run([t.double() for t in inputs], seeds, form, "reference", torch.float64)
    for value, other, exact in zip(values, plain, truth, strict=True):
        assert error(value, exact) <= 2 * error(other, exact) + 1e-5
    for _ in range(10):
        assert all(
            torch.equal(a, b)
            for a, b in zip(values, run(inputs, seeds, form, "triton"), strict=True)
        )
