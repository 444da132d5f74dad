"""mHC's coefficients: the kernel against fp64 and plain PyTorch, in values and every gradient."""

import pytest
import torch
from kernel_cases import (
    DEVICES,
    HERE,
    assert_all_close,
    assert_all_equal,
    assert_first_order,
    check_against_fp64,
    error,
    leaves_of,
    needs_gpu,
    saved_for_backward,
    with_gradients,
)
from torch.testing import assert_close

from headwater.ops.streams import gate_streams

pytest.importorskip("triton", reason="the kernel needs triton")

from headwater.ops.streams import gates
from headwater.ops.triton.launch import launches

CASES = [
    (1, 3, 2),  # one stream: a matrix that is one
    (2, 33, 20),  # a program of one token; rows of eight numbers
    (3, 70, 20),  # rows that begin anywhere
    (4, 1, 1),  # one token, no iteration before the last
    (4, 70, 2),
    (4, 45, 20),
]


def draw(n, tokens, device=HERE, lead=0.0):
    """Products, bias, scale, and gradients of the coefficients.

    `lead`: of the diagonal of res; mHC starts with -8 beside it.
    """
    generator = torch.Generator().manual_seed(n)
    count = 2 * n + n * n
    shapes = [(tokens, count), (count,), (3,)]
    shapes += [(tokens, n), (tokens, n), (tokens, n, n)]
    tensors = [torch.randn(*shape, generator=generator) for shape in shapes]
    tensors[1][2 * n :] += lead * torch.eye(n).flatten()
    tensors = [tensor.to(device) for tensor in tensors]
    return tensors[:3], tensors[3:]


def run(inputs, seeds, iterations, backend):
    leaves = leaves_of(inputs)
    outputs = gate_streams(*leaves, iterations, backend=backend)
    return with_gradients(outputs, leaves, seeds)


def check(inputs, seeds, iterations):
    """The kernel's results, which are as exact as plain PyTorch's."""
    before = launches.copy()
    values = check_against_fp64(run, inputs, seeds, iterations, spare=1e-6)
    assert launches - before == {"gate_streams": 1, "gate_streams_backward": 1}
    return values


@pytest.mark.parametrize(("n", "tokens", "iterations"), CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_is_as_exact_as_plain_pytorch(device, n, tokens, iterations):
    check(*draw(n, tokens, device), iterations)


@pytest.mark.parametrize("lead", [8.0, 30.0])
@pytest.mark.parametrize("device", DEVICES)
def test_near_the_identity_where_mhc_starts(device, lead):
    check(*draw(4, 40, device, lead), 20)


def test_sums_over_more_programs_than_a_tile_has(monkeypatch):
    monkeypatch.setattr(gates, "SUMMED", 2)
    gates._launches.cache_clear()
    check(*draw(2, 2 * 64 + 1), 3)
    gates._launches.cache_clear()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("n", [2, 3, 4])
def test_many_tokens_are_as_exact_and_repeat_bit_by_bit(n):
    inputs, seeds = draw(n, 40001)
    values = check(inputs, seeds, 20)
    for _ in range(20):
        assert_all_equal(values, run(inputs, seeds, 20, "triton"))


@pytest.mark.parametrize("used", range(3))
def test_what_is_left_unused_has_no_part_in_the_gradient(used):
    inputs, seeds = draw(3, 5)
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = leaves_of(inputs, dtype)
        output = gate_streams(*leaves, 4, backend=backend)[used]
        results.append(with_gradients([output], leaves, seeds[used : used + 1]))
    assert all(error(*pair) < 1e-5 for pair in zip(*results, strict=True))


def test_parameters_in_bf16_have_gradients_in_bf16():
    """A model that is cast whole has such parameters; z is in fp32 then too."""
    (z, *parameters), seeds = draw(2, 40)
    leaves = leaves_of(parameters, torch.bfloat16)
    leaves = [*leaves_of([z.view(8, 5, -1)]), *leaves]
    seeds = [seed.unflatten(0, (8, 5)) for seed in seeds]
    results = []
    for backend in ("triton", "reference"):
        outputs = gate_streams(*leaves, 4, backend=backend)
        results.append(with_gradients(outputs, leaves, seeds))
    assert_close(*results)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_coefficients_are_in_fp32_of_products_that_are_not(backend):
    (z, *parameters), _ = draw(2, 5)
    outputs = gate_streams(z.bfloat16(), *parameters, 4, backend=backend)
    assert [t.dtype for t in outputs] == [torch.float32] * 3


def test_without_gradients_the_same_kernel_runs():
    (z, *parameters), _ = draw(4, 3)
    outputs = gate_streams(z.requires_grad_(), *parameters, 20, backend="triton")
    with torch.no_grad():
        assert_all_equal(outputs, gate_streams(z, *parameters, 20, backend="triton"))


def test_only_the_inputs_are_kept_for_the_backward():
    leaves = leaves_of(draw(2, 5)[0])
    saved = saved_for_backward(lambda: gate_streams(*leaves, 20, backend="triton"))
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in leaves]


def test_second_derivatives_are_refused():
    (z, *parameters), _ = draw(2, 3)
    pre, _, _ = gate_streams(z.requires_grad_(), *parameters, 2, backend="triton")
    assert_first_order(pre, z)


def test_more_streams_than_a_thread_has_are_pytorchs():
    (inputs, seeds), before = draw(5, 3), launches.copy()
    values = run(inputs, seeds, 4, "triton")
    assert launches == before
    truth = run([t.double() for t in inputs], seeds, 4, "reference")
    assert_all_close([v.double() for v in values], truth)


def test_what_the_kernel_cannot_take_goes_to_the_reference_or_is_refused():
    inputs, _ = draw(2, 3, "cpu")
    double = [t.double() for t in inputs]
    assert all(t.dtype == torch.float64 for t in gate_streams(*double, 4))
    with pytest.raises(ValueError, match="dtype"):
        gate_streams(*double, 4, backend="triton")
    seven = torch.zeros(3, 7), torch.zeros(7), torch.ones(3)
    for arguments in ((*seven, 4), (*inputs, 0)):
        with pytest.raises(ValueError, match="z and bias take"):
            gate_streams(*arguments)
