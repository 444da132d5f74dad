"""n parallel streams: the kernels against fp64 and plain PyTorch, in values and every gradient."""

import pytest
import torch
from kernel_cases import (
    DEVICES,
    DTYPES,
    HERE,
    assert_all_close,
    assert_all_equal,
    assert_captured,
    assert_first_order,
    check_against_fp64,
    error,
    leaves_of,
    needs_gpu,
    with_gradients,
    with_option,
)
from torch.testing import assert_close

from headwater.models import Decoder, ModelConfig
from headwater.ops.streams import project_streams, read_streams, write_streams
from headwater.ops.streams.operators import MAX_STREAMS

pytest.importorskip("triton", reason="the kernels need triton")

from headwater.ops.triton.launch import launches

BACKWARDS = ("read_streams_backward", "write_streams_backward")
OPERATORS = ("read_streams", "write_streams", *BACKWARDS)
SHAPES = [
    (1, 64, 1, "each"),  # one stream, one token
    (2, 123, 5, "together"),  # rows that begin anywhere
    (3, 40, 7, "each"),  # no power of two, several rows of one h
    (4, 300, 9, "together"),  # two tiles of channels, three of tokens
    (4, 16, 3, "constant"),  # no projection: the read gives its own gradient
]
SIZES = [(2, 512), (4, 384), (4, 512), (4, 2048), (5, 123), (8, 640)]


def draw(n, dim, tokens, norm, dtype=torch.float32, device=HERE):
    generator = torch.Generator().manual_seed(n)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    rows, width = {
        "together": (2 * n + n * n, n * dim),
        "each": (n + 2, dim),
        "constant": (n, n * dim),
    }[norm]
    x = normal(tokens, n, dim, dtype=dtype)
    y = normal(tokens, dim, dtype=dtype)
    coefficients = [normal(tokens, n), normal(tokens, n, n), normal(tokens, n)]
    weight = normal(rows, width) / width**0.5
    products = (tokens, n, rows) if norm == "each" else (tokens, rows)
    seeds = [normal(tokens, dim, dtype=dtype)]
    seeds += [normal(tokens, n, dim, dtype=dtype), normal(*products)]
    return [x, y, *coefficients, weight], seeds


def run(inputs, seeds, norm, backend):
    """Values and gradients of a read and a write whose coefficients depend on the streams."""
    leaves = leaves_of(inputs)
    x, y, post, res, pre, weight = leaves
    z, again, factors = None, x, None
    if norm != "constant":
        z, again, factors = project_streams(x, weight, 1e-6, backend=backend)
        pre = pre + 0.1 * z.tanh().flatten(1)[:, : pre.shape[-1]]
    h = read_streams(again, pre, factors, backend=backend)
    out = write_streams(again, y + 0.5 * h, post, res, backend=backend)
    outputs = (h, out) if z is None else (h, out, z)
    return with_gradients(outputs, leaves, seeds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "dim", "tokens", "norm"), SHAPES)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_are_as_exact_as_plain_pytorch(device, n, dim, tokens, norm, dtype):
    before = launches.copy()
    inputs, seeds = draw(n, dim, tokens, norm, dtype, device)
    assert len(check_against_fp64(run, inputs, seeds, norm)) >= 7
    ran = launches - before
    assert all(ran[name] == 1 for name in OPERATORS)
    assert ran["score"] == (norm != "constant")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["together", "each"])
@pytest.mark.parametrize(("n", "dim"), [(1, 100), *SIZES])
def test_many_tokens_are_as_exact_and_repeat_bit_by_bit(n, dim, norm, dtype):
    inputs, seeds = draw(n, dim, 1500, norm, dtype)
    values = check_against_fp64(run, inputs, seeds, norm)
    for _ in range(20):
        assert_all_equal(values, run(inputs, seeds, norm, "triton"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("used", [(2,), (0,), (0, 2), (1,)])
def test_what_is_left_unused_has_no_part_in_the_gradient(used, device):
    """Only the projection, only the read, both, and only the write."""
    inputs, seeds = draw(2, 20, 3, "together", device=device)

    def results(backend, dtype):
        (x,) = leaves_of(inputs[:1], dtype)
        y, post, res, pre, weight = (t.to(dtype) for t in inputs[1:])
        z, again, factors = project_streams(x, weight, 1e-6, backend=backend)
        h = read_streams(again, pre, factors, backend=backend)
        outputs = (h, write_streams(again, y, post, res, backend=backend), z)
        outputs, along = zip(*((outputs[k], seeds[k]) for k in used))
        return with_gradients(outputs, [x], along)

    values, truth = results("triton", torch.float32), results("reference", torch.float64)
    assert all(error(*pair) < 1e-5 for pair in zip(values, truth, strict=True))


def test_streams_that_share_their_memory_are_taken():
    """`begin` makes such streams of one embedding."""
    inputs, seeds = draw(3, 24, 2, "together")
    inputs[0] = inputs[0][:, :1].expand(-1, 3, -1)
    results = [run(inputs, seeds, "together", backend) for backend in ("triton", "reference")]
    assert_all_close(*results, rtol=1e-4)


def test_without_gradients_the_same_kernels_run():
    (x, _, _, _, pre, weight), _ = draw(2, 24, 2, "together")

    def results():
        z, again, factors = project_streams(x, weight, 1e-6, backend="triton")
        return z, read_streams(again, pre, factors, backend="triton")

    x.requires_grad_()
    expected = results()
    with torch.no_grad():
        assert_all_equal(results(), expected)


def test_second_derivatives_are_refused():
    (x, _, _, _, pre, _), _ = draw(2, 24, 2, "together")
    assert_first_order(read_streams(x.requires_grad_(), pre, backend="triton"), x)


def test_what_the_kernels_cannot_take_goes_to_the_reference_or_is_refused():
    many = torch.randn(2, MAX_STREAMS + 1, 8)
    pre = torch.randn(2, MAX_STREAMS + 1)
    expected = (pre.unsqueeze(-1) * many).sum(-2)
    assert_close(read_streams(many, pre), expected)
    with pytest.raises(ValueError, match="up to 8 streams"):
        read_streams(many, pre, backend="triton")
    with pytest.raises(ValueError, match="dtype"):
        read_streams(many[:, :2].double(), pre[:, :2].double(), backend="triton")


BANKS = ("muddformer", "denseformer", "elc-bert")
SPECS = ("mhc", "mhc-lite:streams=3", "hyper-connections", "hyper-connections:form=static", *BANKS)
DRAWS = 8  # one may flatter either side: a gradient of what hardly matters is all rounding
SHAPE = {
    "vocab_size": 64,
    "dim": 128,
    "layers": 3,
    "heads": 2,
    "kv_heads": 2,
    "mlp_dim": 256,
    "context": 64,
}


class Step:
    """A small decoder on a GPU: its loss and all gradients, for a draw of weights and tokens."""

    def __init__(self, spec, dtype=torch.bfloat16):
        self.config = ModelConfig(**SHAPE, residual=spec)
        self.model = Decoder(self.config).to("cuda", dtype)
        self.forward = self.model

    def draw(self, seed):
        torch.manual_seed(seed)
        fresh = Decoder(self.config).bfloat16()  # the same weights for every arm
        # A bank's parameters stay around their start: around zero its sums are all rounding.
        is_bank = self.config.residual.partition(":")[0] in BANKS
        with torch.no_grad():
            for p in fresh.residual.parameters():
                p.mul_(is_bank).add_(0.1 * torch.randn_like(p))
        self.model.load_state_dict(fresh.state_dict())
        self.tokens = torch.randint(0, 64, (2, 64)).cuda()

    def __call__(self):
        self.model.zero_grad(set_to_none=True)
        loss = self.forward(self.tokens).float().square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in self.model.parameters() if p.grad is not None)]

    def draws(self):
        """Each tensor of all draws, as one."""
        results = []
        for seed in range(DRAWS):
            self.draw(seed)
            results.append([t.double() for t in self()])
        return [torch.stack(several) for several in zip(*results, strict=True)]


def assert_step_as_exact(ours, spec):
    """At most twice plain PyTorch's error and a thousandth of each gradient, over all draws."""
    plain = with_option(spec, "backend=reference")
    arms = (ours, Step(plain), Step(plain, torch.float64))
    for value, other, exact in zip(*(arm.draws() for arm in arms), strict=True):
        assert (value - exact).norm() <= 2 * (other - exact).norm() + 1e-3 * exact.norm()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("spec", SPECS)
class TestAStep:
    def test_is_as_exact_as_plain_pytorchs(self, spec):
        assert_step_as_exact(Step(spec), spec)

    def test_compiles_without_a_break(self, spec):
        torch.compiler.reset()
        step = Step(spec)
        step.forward = torch.compile(step.model, fullgraph=True)
        assert_step_as_exact(step, spec)

    def test_can_be_captured(self, spec):
        run = Step(spec)
        run.draw(0)
        assert_captured(run)
