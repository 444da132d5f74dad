"""The kernels on a GPU over the full grid. Skipped without CUDA: there the interpreter runs tests/test_kernels.py."""

import pytest
import torch
from kernel_cases import draw, read, run, two_phases, worst

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SOURCES = [1, 2, 3, 8, 9, 17, 33, 64, 129]
WIDTHS = [64, 123, 1000, 2048, 7168]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 15])
@pytest.mark.parametrize("function", [read, two_phases])
def test_error_is_at_most_twice_plain_pytorchs(function, tokens, dim, dtype):
    for count in SOURCES[function is two_phases :]:
        assert worst(function, count, dim, tokens, dtype, "cuda") <= 1, count


@pytest.mark.parametrize("dim", [123, 2048])
@pytest.mark.parametrize("function", [read, two_phases])
def test_many_tokens(function, dim):
    for count in (3, 9, 33):
        assert worst(function, count, dim, 4096, torch.bfloat16, "cuda") <= 1, count


def test_repeats_are_bit_equal():
    sources, *parameters = draw(9, 1000, 333, torch.bfloat16, "cuda")
    first, seeds = run(two_phases, [*sources, *parameters], "triton", torch.bfloat16)
    for _ in range(250):
        again, _ = run(two_phases, [*sources, *parameters], "triton", torch.bfloat16, seeds)
        assert all(torch.equal(a, b) for a, b in zip(first, again))
