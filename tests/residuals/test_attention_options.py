"""Options of Attention Residuals: their kernels against the reference, through all reads of a network."""

import pytest
import torch
from kernel_cases import replay, ways
from test_residuals_banks import additions_of, draw, launches_with_weights_held, with_backend

from headwater.residuals import build

DIM, READS = 16, 3
SPECS = {  # kernels that run forward, and backward too
    "attnres-full:heads=4": {"weigh": READS},
    "attnres-full:weights=sigmoid,scale=root": {"weigh": READS},
    "attnres-full:key_norm=false": {"weigh": READS},
    "attnres-full:key_dim=5": {"weigh": READS},
    "attnres-full:query=projected": {"weigh": READS, "score": READS},
    "attnres-block:block=2,key_dim=8,query=projected,key_weight=false": {
        "weigh": READS,
        "score": READS,
    },
    "attnres-full:window=1,heads=2,weights=sigmoid,query=projected": {
        "weigh": READS,
        "score": READS,
    },
    "attnres-full:weights=static": {"mix_bank": READS},
}
COMPILED = (
    "attnres-full:heads=4",
    "attnres-full:query=projected",
    "attnres-full:weights=static",
)  # each kernel once

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is off where there is a GPU"
)


@pytest.mark.parametrize(("spec", "compiled"), ways(SPECS, COMPILED))
def test_kernels_give_the_same(spec, compiled):
    pytest.importorskip("triton", reason="the kernels need triton")
    from headwater.ops.triton.launch import launches

    torch.compiler.reset()
    before, tensors = launches.copy(), draw(READS)
    found = replay(with_backend(spec, "triton"), tensors, compiled=compiled)
    both = {
        f"{name}{way}": count for name, count in SPECS[spec].items() for way in ("", "_backward")
    }
    assert launches - before == both
    for mine, exact in zip(found, replay(spec, tensors, torch.float64), strict=True):
        torch.testing.assert_close(mine.double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_no_gradient_is_added_outside_of_the_kernels(spec):
    """Of one more read, as many are as of the one before: none for each source. Nor is one copied."""
    pytest.importorskip("triton", reason="the kernels need triton")
    counts, copies = additions_of(spec)
    assert len(set(copies)) == 1
    assert counts[2] - counts[1] == counts[1] - counts[0] <= 2


@pytest.mark.parametrize("spec", SPECS)
def test_a_mixing_matrix_is_read_off_the_reference(spec):
    pytest.importorskip("triton", reason="the kernels need triton")
    assert launches_with_weights_held(spec) == 0


@pytest.mark.parametrize("spec", ["attnres-full", *SPECS])
def test_what_reads_over_kernels_gains_little_when_compiled(spec):
    """A long run compiles its layers then, and not the whole model. Those of options are asked for by name."""
    assert build(spec, DIM, 4).fused == (spec == "attnres-full")
    assert build(with_backend(spec, "triton"), DIM, 4).fused
    assert not build(with_backend(spec, "reference"), DIM, 4).fused
    assert not build("attnres-full:heads=4,weights=static", DIM, 4).fused
