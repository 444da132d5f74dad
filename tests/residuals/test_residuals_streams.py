"""Residuals with n streams: what a state looks like, and what is kept for the backward pass."""

import pytest
import torch
from kernel_cases import replay, ways, with_option
from tinymodels import advance, scattered
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from headwater.residuals import build
from headwater.residuals.base import hold_weights

BATCH, TOKENS, DIM, SUBLAYERS, STREAMS = 3, 5, 64, 6, 4
SPECS = [
    "hyper-connections",
    "hyper-connections:form=static",
    "mhc",
    "mhc-lite",
    "identity-hc",
    "mhc:final=learned,eps=1e-3",
    "gated-hc",
    "ddl:width=4,compress=channel",
]
# Launches of two sublayers and a final read: of reads, of products with the streams, of mHC's gates.
LAUNCHES = {
    "mhc:streams=2": (2, 2, 2),
    "mhc-lite:streams=3": (2, 2, 0),
    "mhc": (2, 2, 2),
    "hyper-connections": (2, 2, 0),
    "hyper-connections:streams=2,form=static": (2, 0, 0),
    "mhc:final=learned,eps=1e-3": (3, 3, 0),
    "identity-hc": (3, 3, 0),
    "gated-hc": (0, 0, 0),
}
# Every kernel as it is called
COMPILED = ("mhc", "hyper-connections", "hyper-connections:streams=2,form=static")


def with_sources(spec):
    """A residual, and its sources, which are leaves."""
    residual = scattered(spec, DIM, SUBLAYERS, scale=0.1)
    sources = torch.randn(SUBLAYERS + 1, BATCH, TOKENS, DIM)
    return residual, [source.clone().requires_grad_() for source in sources]


@pytest.mark.parametrize("spec", SPECS)
def test_streams_sit_beside_the_channels_not_in_the_batch(spec):
    residual, (x, *outputs) = with_sources(spec)
    state = residual.begin(x)
    for i, y in enumerate(outputs):
        assert state[0].shape == (BATCH, TOKENS, STREAMS, DIM)
        read, state = residual.read(state, i)
        assert read.shape == (BATCH, TOKENS, DIM)
        assert all(part.shape[:2] == (BATCH, TOKENS) for part in state)
        # The rest are coefficients
        assert sum(part.numel() for part in state) < 1.5 * BATCH * TOKENS * STREAMS * DIM
        state = residual.write(state, i, y)
        assert len(state) == 1


# The gates of gated-hc are as wide as the streams.
@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith(("ddl", "gated"))])
def test_a_sublayer_keeps_its_n_streams_and_no_copy_of_them(spec):
    residual, (x, *outputs) = with_sources(spec)
    tensors = (x, *outputs, *residual.parameters())
    arguments = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    saved = {}  # tensors too, so that no address is used twice

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in arguments:
            saved[storage.data_ptr()] = tensor, storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        state = advance(residual, residual.begin(x), lambda i, _: outputs[i])
        residual.end(state).sum()
    wide = [size for _, size in saved.values()]
    streams = BATCH * TOKENS * STREAMS * DIM
    assert max(wide) == streams
    # One state a sublayer, and one of a learned final read.
    reads = SUBLAYERS + ("identity" in spec or "learned" in spec)
    assert sum(size >= BATCH * TOKENS * DIM for size in wide) <= reads


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
@pytest.mark.parametrize(("spec", "compiled"), ways(LAUNCHES, COMPILED))
def test_kernels_give_the_same(spec, compiled):
    pytest.importorskip("triton", reason="the kernels need triton")
    from headwater.ops.triton.launch import launches

    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(3, 1, 3, DIM, generator=generator).unbind(0)
    before = launches.copy()
    on_kernels = with_option(spec, "backend=triton")
    actual = replay(on_kernels, tensors, compiled=compiled, unused=True)
    ran = launches - before
    assert (ran["read_streams"], ran["score"], ran["gate_streams"]) == LAUNCHES[spec]
    assert ran["gate_streams_backward"] == ran["gate_streams"]
    assert ran["write_streams"] == ran["write_streams_backward"] == 2
    assert ran["sinkhorn"] == 0
    expected = replay(spec, tensors, torch.float64, unused=True)
    for value, exact in zip(actual, expected, strict=True):
        if exact is not None:  # nobody reads the last ones' mixing
            assert_close(value.double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
def test_a_mixing_matrix_is_read_off_the_reference():
    pytest.importorskip("triton", reason="the kernels need triton")
    from headwater.ops.triton.launch import launches

    residual, before = build("mhc:backend=triton", DIM, 1), launches.total()
    with hold_weights():
        state = residual.begin(torch.randn(2, DIM))
        advance(residual, state, lambda i, _: torch.randn(2, DIM))
    assert launches.total() == before


class SumsUnderAutocast(TorchFunctionMode):
    """Note for each sum over streams whether autocast is on: a GPU would then compute in fp32."""

    def __init__(self):
        super().__init__()
        self.autocast = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.sum and args[1:] == (-2,):
            self.autocast.append(torch.is_autocast_enabled("cpu"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", ["hyper-connections", "mhc", "mhc-lite"])
def test_the_head_sees_streams_that_were_summed_in_their_own_dtype(spec):
    residual, (x, *outputs) = with_sources(spec)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        state = advance(residual, residual.begin(x.bfloat16()), lambda i, _: outputs[i])
        with SumsUnderAutocast() as sums:
            end = residual.end(state)
    assert sums.autocast == [False]
    assert end.dtype == torch.bfloat16
