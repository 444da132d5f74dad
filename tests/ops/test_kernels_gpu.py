"""The kernels on a GPU over the full grid. Without CUDA, tests/ops/test_kernels.py runs instead.

`make test-gpu` runs them with every other GPU test, many at once; tests that take most of the
memory run one by one.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from kernel_cases import (
    DTYPES,
    assert_all_equal,
    assert_as_exact,
    assert_captured,
    draw,
    error,
    extremes,
    growing,
    needs_gpu,
    read,
    run,
    two_phases,
    worst,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from benchmarks.arms import Stack
from benchmarks.attnres import worst_of
from benchmarks.measure import peak_gib
from headwater.models import Decoder, ModelConfig
from headwater.ops.depth import reference
from headwater.ops.routing import MAX_WIDTH

if torch.cuda.is_available():  # else the interpreter's variable may come after triton
    from headwater.ops.depth import autograd
    from headwater.ops.triton.launch import launches

pytestmark = [pytest.mark.gpu, needs_gpu]

SOURCES = [1, 2, 3, 8, 9, 17, 33, 64, 129]
WIDTHS = [64, 123, 1000, 2048, 7168]
SHAPE = {
    "vocab_size": 64,
    "dim": 128,
    "layers": 6,
    "heads": 2,
    "kv_heads": 2,
    "mlp_dim": 256,
    "context": 64,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 15])
@pytest.mark.parametrize("function", [read, two_phases])
def test_error_is_at_most_twice_plain_pytorchs(function, tokens, dim, dtype):
    draws = 8 if tokens == 1 else 1
    for count in SOURCES[function is two_phases :]:
        assert worst(function, count, dim, tokens, dtype, "cuda", draws) <= 1, count


@pytest.mark.big  # up to 120 GB
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("function", [read, two_phases])
def test_many_tokens(function, dim, dtype):
    for count in SOURCES[function is two_phases :]:
        assert worst(function, count, dim, 4096, dtype, "cuda") <= 1, count
        torch.cuda.empty_cache()


@pytest.mark.big  # 14 tensors of 4.3 GB
def test_rows_beyond_two_to_the_31_numbers_are_found():
    """An offset in 32 bits would wrap around: the last rows would be read and written elsewhere."""
    width, last = 2048, 64
    rows = 2**31 // width + last
    y, partial, out, dx, dtotal = (
        torch.randn(rows, width, dtype=torch.bfloat16, device="cuda") for _ in range(5)
    )
    lse = torch.randn(rows, device="cuda")
    query, key, norm = (torch.randn(width, device="cuda") for _ in range(3))
    query = query * width**-0.5

    def merged(ops, here, **options):
        leaves = [t[here].detach().requires_grad_() for t in (y, partial, out, lse)]
        results = ops.merge(*leaves, query, key, norm, **options)
        return [*results, *torch.autograd.grad(results, leaves, (dx[here], dtotal[here]))]

    values = [t[-last:] for t in merged(autograd, slice(None))]
    small = merged(autograd, slice(-last, None))
    assert_all_equal(values, small)
    plain = merged(reference, slice(-last, None))
    for value, expected in zip(values, plain, strict=True):
        assert error(value, expected.double()) < 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [123, 1000, 4096, 7168])
@pytest.mark.parametrize("spec", ["attnres-block:block=6", "attnres-full"])
def test_the_schedule_of_training_is_as_exact(spec, dim, dtype):
    """Gradients added in place, norms undone, sums too wide for one program."""
    assert worst_of(spec, dim, 33, dtype) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [7168, 12288, MAX_WIDTH])
def test_rows_as_wide_as_allowed(dim, dtype):
    for function, count in ((growing, 3), (two_phases, 9), (read, 9)):
        assert worst(function, count, dim, 15, dtype, "cuda") <= 1, function


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [80.0, -80.0])
def test_extremes_stay_finite(value, dtype):
    assert all(t.isfinite().all() for t in extremes(value, dtype, "cuda"))


def test_repeats_are_bit_equal():
    sources, *parameters = draw(9, 1000, 333, torch.bfloat16, "cuda")
    first, seeds = run(two_phases, [*sources, *parameters], "triton", torch.bfloat16)
    for _ in range(250):
        again, _ = run(two_phases, [*sources, *parameters], "triton", torch.bfloat16, seeds)
        assert_all_equal(first, again)


STEPS = ("attnres-block:block=4", "attnres-full:heads=4", "denseformer")


@pytest.fixture(scope="module", params=STEPS)
def step(request):
    """A small decoder in bf16 and a function that returns its loss and all gradients."""
    torch.manual_seed(0)
    model = Decoder(ModelConfig(**SHAPE, residual=request.param)).to("cuda", torch.bfloat16)
    for name, p in model.named_parameters():
        if name.endswith("query"):
            torch.nn.init.normal_(p, std=0.1)
    tokens = torch.randint(0, 64, (2, 64), device="cuda")

    def run(forward=model):
        model.zero_grad(set_to_none=True)
        loss = forward(tokens).float().square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    return run, model


def test_a_decoder_compiles_without_a_break(step):
    run, model = step
    expected = [t.clone() for t in run()]
    for value, other in zip(run(torch.compile(model, fullgraph=True)), expected, strict=True):
        assert (value - other).float().norm() <= 0.05 * other.float().norm() + 1e-6


@pytest.mark.parametrize("spec", ["attnres-block:block=2", "attnres-full"])
def test_a_compiled_step_adds_gradients_in_place_too(spec):
    """Its copies of them, of which there are as many as sources, must not be there at all."""
    x = torch.randn(4096, 512, device="cuda").bfloat16()
    stack = Stack(spec, 512, 24).to("cuda", torch.bfloat16)
    forwards = [stack, torch.compile(stack)]
    peaks = []
    for forward in [*forwards, *forwards]:  # compiled first, measured then
        stack.zero_grad(set_to_none=True)
        peaks.append(peak_gib(lambda forward=forward: forward(x).sum().backward()))
    assert peaks[-1] <= peaks[-2] + 3 * x.nbytes / 2**30


def test_a_step_can_be_captured(step):
    assert_captured(step[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_give_the_same_gradients(step, reentrant):
    run, model = step
    expected = [t.clone() for t in run()]
    model.around = functools.partial(checkpoint, use_reentrant=reentrant)
    try:
        assert_all_equal(run(), expected)
    finally:
        model.around = None


@pytest.mark.parametrize("wide", [False, True])
def test_autocast(wide):
    """fp32 weights, bf16 bodies, bf16 or fp32 states: as near to fp32 as the reference."""

    def results(backend, half):
        torch.manual_seed(0)
        residual = f"attnres-block:block=4,backend={backend}"
        model = Decoder(ModelConfig(**SHAPE, residual=residual, fp32_stream=wide)).cuda()
        tokens = torch.randint(0, 64, (2, 64), device="cuda")
        before = launches["merge"]
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = model(tokens).float().square().mean()
        loss.backward()
        assert (launches["merge"] > before) == (backend == "triton")
        return [loss.detach(), *(p.grad for p in model.parameters())]

    truth = [t.double() for t in results("reference", half=False)]
    plain = results("reference", half=True)
    assert_as_exact(results("triton", half=True), plain, truth, spare=1e-3)


def test_sharded_parameters(step):
    """FSDP2 over a group of one: parameters are DTensors outside of the pass, whole inside."""
    _, model = step
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = copy.deepcopy(model)
        for sublayer in sharded.sublayers:
            fully_shard(sublayer.body)
        fully_shard(sharded)
        generator = torch.Generator("cuda").manual_seed(4)
        tokens = torch.randint(0, 64, (2, 64), device="cuda", generator=generator)
        model.zero_grad(set_to_none=True)
        for module in (model, sharded):
            module(tokens).float().square().mean().backward()
        for value, other in zip(sharded.parameters(), model.parameters(), strict=True):
            assert isinstance(value, DTensor)
            assert torch.equal(value.grad.full_tensor(), other.grad)
    finally:
        dist.destroy_process_group()
