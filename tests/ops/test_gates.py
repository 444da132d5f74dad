"""mHC's coefficients: the kernel against fp64 and plain PyTorch, in values and in every gradient."""

import pytest
import torch
from kernel_cases import poisoned

from headwater.ops.streams import gate_streams

GPU = torch.cuda.is_available()
HERE = "cuda" if GPU else "cpu"
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(GPU, reason="the interpreter is off where there is a GPU")
    ),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
    ),
]
CASES = [
    (1, 3, 2),  # one stream: a matrix that is one
    (2, 33, 20),  # a program of one token; rows of eight numbers
    (3, 70, 20),  # rows that begin anywhere
    (4, 1, 1),  # one token, no iteration before the last
    (4, 70, 2),
    (4, 45, 20),
]


def draw(n, tokens, device, lead=0.0):
    """Products, bias, scale, and gradients of what is made of them. `lead`: of the diagonal of res, -8 below it at
    mHC's start."""
    generator = torch.Generator().manual_seed(n)
    count = 2 * n + n * n
    z, bias, scale = (
        torch.randn(*shape, generator=generator) for shape in ((tokens, count), (count,), (3,))
    )
    bias[2 * n :] += lead * torch.eye(n).flatten()
    seeds = [torch.randn(tokens, *shape, generator=generator) for shape in ((n,), (n,), (n, n))]
    return [t.to(device) for t in (z, bias, scale)], [t.to(device) for t in seeds]


def run(inputs, seeds, iterations, backend, dtype=torch.float32):
    leaves = [t.to(dtype).requires_grad_() for t in inputs]
    outputs = gate_streams(*leaves, iterations, backend=backend)
    return [*outputs, *torch.autograd.grad(outputs, leaves, [seed.to(dtype) for seed in seeds])]


def error(found, truth):
    return ((found.double() - truth).norm() / truth.norm().clamp_min(1e-6)).item()


def assert_as_exact(inputs, seeds, iterations):
    from headwater.ops.triton.launch import launches

    before = launches.copy()
    with poisoned():
        values = run(inputs, seeds, iterations, "triton")
    assert launches - before == {"gate_streams": 1, "gate_streams_backward": 1}
    plain = run(inputs, seeds, iterations, "reference")
    truth = run(inputs, seeds, iterations, "reference", torch.float64)
    for value, other, exact in zip(values, plain, truth, strict=True):
        assert value.dtype == other.dtype == torch.float32
        assert value.shape == other.shape
        assert error(value, exact) <= 2 * error(other, exact) + 1e-6
    return values


@pytest.mark.parametrize(("n", "tokens", "iterations"), CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_is_as_exact_as_plain_pytorch(device, n, tokens, iterations):
    pytest.importorskip("triton", reason="the kernel needs triton")
    assert_as_exact(*draw(n, tokens, device), iterations)


@pytest.mark.parametrize("lead", [8.0, 30.0])
@pytest.mark.parametrize("device", DEVICES)
def test_near_the_identity_where_mhc_starts(device, lead):
    pytest.importorskip("triton", reason="the kernel needs triton")
    assert_as_exact(*draw(4, 40, device, lead), 20)


def test_sums_over_more_programs_than_a_tile_has(monkeypatch):
    pytest.importorskip("triton", reason="the kernel needs triton")
    from headwater.ops.streams import gates

    monkeypatch.setattr(gates, "SUMMED", 2)
    gates._launches.cache_clear()
    assert_as_exact(*draw(2, 2 * 64 + 1, HERE), 3)
    gates._launches.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("n", [2, 3, 4])
def test_many_tokens_are_as_exact_and_repeat_bit_by_bit(n):
    inputs, seeds = draw(n, 40001, "cuda")
    values = assert_as_exact(inputs, seeds, 20)
    for _ in range(20):
        assert all(
            torch.equal(a, b) for a, b in zip(values, run(inputs, seeds, 20, "triton"), strict=True)
        )


def test_what_is_left_unused_has_no_part_in_the_gradient():
    pytest.importorskip("triton", reason="the kernel needs triton")
    inputs, seeds = draw(3, 5, HERE)
    for used in range(3):
        actual = []
        for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
            leaves = [t.to(dtype).requires_grad_() for t in inputs]
            outputs = gate_streams(*leaves, 4, backend=backend)[used]
            actual.append(torch.autograd.grad(outputs, leaves, seeds[used].to(dtype)))
        assert all(error(value, exact) < 1e-5 for value, exact in zip(*actual, strict=True))


def test_parameters_in_bf16_have_gradients_in_bf16():
    """A model that is cast whole has such parameters; z is in fp32 then too."""
    pytest.importorskip("triton", reason="the kernel needs triton")
    (z, *parameters), seeds = draw(2, 40, HERE)
    leaves = [
        z.view(8, 5, -1).requires_grad_(),
        *(p.bfloat16().requires_grad_() for p in parameters),
    ]
    actual = []
    for backend in ("triton", "reference"):
        outputs = gate_streams(*leaves, 4, backend=backend)
        assert [t.shape for t in outputs] == [(8, 5, 2), (8, 5, 2), (8, 5, 2, 2)]
        actual.append(
            [
                *outputs,
                *torch.autograd.grad(
                    outputs, leaves, [s.view(t.shape) for s, t in zip(seeds, outputs)]
                ),
            ]
        )
    for value, other in zip(*actual, strict=True):
        assert value.dtype == other.dtype
        torch.testing.assert_close(value, other)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_coefficients_are_in_fp32_of_products_that_are_not(backend):
    pytest.importorskip("triton", reason="the kernel needs triton")
    (z, *parameters), _ = draw(2, 5, HERE)
    outputs = gate_streams(z.bfloat16(), *parameters, 4, backend=backend)
    assert [t.dtype for t in outputs] == [torch.float32] * 3


def test_without_gradients_the_same_kernel_runs():
    pytest.importorskip("triton", reason="the kernel needs triton")
    inputs, _ = draw(4, 3, HERE)
    outputs = gate_streams(inputs[0].requires_grad_(), *inputs[1:], 20, backend="triton")
    with torch.no_grad():
        again = gate_streams(*inputs, 20, backend="triton")
    assert all(torch.equal(value, other) for value, other in zip(outputs, again, strict=True))


def test_nothing_but_what_is_given_is_kept_for_the_backward():
    pytest.importorskip("triton", reason="the kernel needs triton")
    saved, (inputs, _) = [], draw(2, 5, HERE)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.data_ptr()) or t, lambda t: t
    ):
        gate_streams(*(t.requires_grad_() for t in inputs), 20, backend="triton")
    assert saved == [t.data_ptr() for t in inputs]


def test_second_derivatives_are_refused():
    pytest.importorskip("triton", reason="the kernel needs triton")
    inputs, _ = draw(2, 3, HERE)
    pre, _, _ = gate_streams(inputs[0].requires_grad_(), *inputs[1:], 2, backend="triton")
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(pre.sum(), inputs[0], create_graph=True)


def test_more_streams_than_a_thread_has_are_pytorchs():
    pytest.importorskip("triton", reason="the kernel needs triton")
    from headwater.ops.triton.launch import launches

    (inputs, seeds), before = draw(5, 3, HERE), launches.copy()
    values = run(inputs, seeds, 4, "triton")
    assert launches == before
    for value, exact in zip(values, run(inputs, seeds, 4, "reference", torch.float64), strict=True):
        assert error(value, exact) < 1e-5


def test_what_the_kernel_cannot_take_goes_to_the_reference_or_is_refused():
    inputs, _ = draw(2, 3, "cpu")
    double = [t.double() for t in inputs]
    assert all(t.dtype == torch.float64 for t in gate_streams(*double, 4))
    with pytest.raises(ValueError, match=r"dtype torch.float64|triton is not installed"):
        gate_streams(*double, 4, backend="triton")
    with pytest.raises(ValueError, match=r"n\^2 \+ 2 n numbers, got 7"):
        gate_streams(torch.zeros(3, 7), torch.zeros(7), torch.ones(3), 4)
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        gate_streams(*inputs, 0)
