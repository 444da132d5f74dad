"""Residuals that mix layer outputs: kernels against the reference, through all reads of a network."""

import pytest
import torch
from kernel_cases import replay, ways, with_option
from tinymodels import advance, inputs_of
from torch.testing import assert_close

from headwater._torch import TorchDispatchMode
from headwater.residuals import build
from headwater.residuals.base import hold_weights

DIM = 16
SPECS = [
    "muddformer",
    "muddformer:norm=true",
    "denseformer",
    "denseformer:dilation=2",
    "denseformer:period=2",
    "elc-bert",
    "elc-bert:variant=weighted-output",
]
# Each kernel once, and what a long run compiles
COMPILED = ("muddformer", "denseformer", "muddformer:norm=true")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is off where there is a GPU"
)


def on_kernels(spec):
    pytest.importorskip("triton", reason="the kernels need triton")
    return with_option(spec, "backend=triton")


def draw(sublayers):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1 + sublayers, 1, 3, DIM, generator=generator).unbind(0)


@pytest.mark.parametrize(("spec", "compiled"), ways(SPECS, COMPILED))
def test_kernels_give_the_same(spec, compiled):
    spec_on_kernels = on_kernels(spec)
    from headwater.ops.triton.launch import launches

    torch.compiler.reset()
    before, tensors = launches.copy(), draw(6)
    actual = replay(spec_on_kernels, tensors, compiled=compiled)
    ran = launches - before
    sums = {"denseformer:period=2": 1, "elc-bert": 2}.get(spec, 3)
    assert ran["mix_bank"] == ran["mix_bank_backward"] == sums
    assert ran["score"] == (3 if spec.startswith("muddformer") else 0)
    for value, exact in zip(actual, replay(spec, tensors, torch.float64), strict=True):
        assert_close(value.double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_a_long_run_compiles_the_whole_model_where_not_all_are_kernels(spec):
    assert build(spec, DIM, 6).fused == (spec != "muddformer:norm=true")


def test_muddformer_s_norm_of_the_stream_starts_small():
    residual = build("muddformer:norm=true", DIM, 6)
    assert [w.unique().tolist() for w in residual.after.values()] == [[pytest.approx(1e-3)]] * 3
    assert all(w.eq(1).all() for w in residual.before.values())
    assert len(residual.before) == 4


class Additions(TorchDispatchMode):
    """Counts sums of two tensors as large as the stream, and copies of one."""

    count, copies = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        wide = 0
        for argument in args[:2]:
            if isinstance(argument, torch.Tensor) and argument.dim() == 3:
                wide += argument.shape[-1] == DIM
        kind = func.overloadpacket
        self.count += kind in (torch.ops.aten.add, torch.ops.aten.add_) and wide == 2
        self.copies += kind is torch.ops.aten.clone and wide == 1
        return func(*args, **(kwargs or {}))


def additions_of(spec):
    """Sums, and copies, of gradients outside of the kernels, of three depths."""
    counts, copies = [], []
    for sublayers in (2, 4, 6):
        residual, (x, *outputs) = build(on_kernels(spec), DIM, sublayers), draw(sublayers)
        state = residual.begin(x.requires_grad_())
        for i, y in enumerate(outputs):
            read, state = residual.read(state, i)
            state = residual.write(state, i, y * sum(inputs_of(read)))
        out = residual.end(state)
        with Additions() as additions:
            out.sum().backward()
        counts.append(additions.count)
        copies.append(additions.copies)
    return counts, copies


@pytest.mark.parametrize("spec", ["muddformer", "denseformer"])
def test_no_gradient_is_added_outside_of_the_kernels(spec):
    """One more layer adds as many as the one before, so none per source. No gradient is copied."""
    counts, copies = additions_of(spec)
    assert len(set(copies)) == 1
    assert counts[2] - counts[1] == counts[1] - counts[0] <= 2


@pytest.mark.parametrize("spec", SPECS)
def test_a_mixing_matrix_is_read_off_the_reference(spec):
    residual = build(on_kernels(spec), DIM, 4)
    from headwater.ops.triton.launch import launches

    before = launches.total()
    with hold_weights():
        state = residual.begin(torch.randn(2, DIM))
        residual.end(advance(residual, state, lambda i, _: torch.randn(2, DIM)))
    assert launches.total() == before
