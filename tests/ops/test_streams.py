"""n parallel streams: the kernels against fp64 and plain PyTorch, in values and in every gradient."""

import pytest
import torch
from kernel_cases import assert_captured, poisoned

from headwater.models import Decoder, ModelConfig
from headwater.ops.streams import project_streams, read_streams, write_streams
from headwater.ops.streams.operators import MAX_STREAMS

GPU = torch.cuda.is_available()
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(GPU, reason="the interpreter is off where there is a GPU")
    ),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
    ),
]
OPERATORS = (
    "read_streams",
    "write_streams",
    "score",
    "read_streams_backward",
    "write_streams_backward",
)
SHAPES = [
    (1, 64, 1, "each"),  # one stream, one token
    (2, 123, 5, "together"),  # rows that begin anywhere
    (3, 40, 7, "each"),  # no power of two, several rows of one h
    (4, 300, 9, "together"),  # two tiles of channels, three of tokens
    (4, 16, 3, "constant"),  # no projection: the read gives its own gradient
]


SIZES = [(2, 512), (4, 384), (4, 512), (4, 2048), (5, 123), (8, 640)]


def draw(n, dim, tokens, norm, dtype, device):
    generator = torch.Generator().manual_seed(n)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    rows = {"together": (2 * n + n * n, n * dim), "each": (n + 2, dim), "constant": (n, n * dim)}[
        norm
    ]
    inputs = [
        normal(tokens, n, dim, dtype=dtype),
        normal(tokens, dim, dtype=dtype),
        normal(tokens, n),
    ]
    inputs += [normal(tokens, n, n), normal(tokens, n), normal(*rows) / rows[-1] ** 0.5]
    products = (tokens, rows[0]) if norm != "each" else (tokens, n, rows[0])
    seeds = [
        normal(tokens, dim, dtype=dtype),
        normal(tokens, n, dim, dtype=dtype),
        normal(*products),
    ]
    return inputs, seeds


def run(inputs, seeds, norm, backend, dtype=None):
    """The values and all gradients of a read and a write whose coefficients depend on the streams."""
    x, y, post, res, pre, weight = leaves = [
        (t if dtype is None else t.to(dtype)).detach().requires_grad_() for t in inputs
    ]
    z, again, factors = (
        project_streams(x, weight, 1e-6, backend=backend) if norm != "constant" else (None, x, None)
    )
    gate = pre if z is None else pre + 0.1 * z.tanh().flatten(1)[:, : pre.shape[-1]]
    h = read_streams(again, gate, factors, backend=backend)
    out = write_streams(again, y + 0.5 * h, post, res, backend=backend)
    outputs = (h, out) if z is None else (h, out, z)
    along = [seed.to(output.dtype) for seed, output in zip(seeds, outputs)]
    gradients = torch.autograd.grad(outputs, leaves, along, allow_unused=True)
    return [*outputs, *(g for g in gradients if g is not None)]


def error(found, truth):
    return ((found.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "dim", "tokens", "norm"), SHAPES)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_are_as_exact_as_plain_pytorch(device, n, dim, tokens, norm, dtype):
    pytest.importorskip("triton", reason="the kernels need triton")
    from headwater.ops.triton.launch import launches

    inputs, seeds = draw(n, dim, tokens, norm, dtype, device)
    before = launches.copy()
    with poisoned():
        values = run(inputs, seeds, norm, "triton")
    ran = launches - before
    assert all(ran[name] == 1 for name in OPERATORS if name != "score" or norm != "constant")
    plain = run(inputs, seeds, norm, "reference")
    truth = run([t.double() for t in inputs], seeds, norm, "reference", torch.float64)
    assert len(values) == len(plain) == len(truth) >= 7
    times = (
        8 if dtype == torch.bfloat16 and device == "cpu" else 2
    )  # the interpreter truncates where a GPU rounds
    for value, other, exact in zip(values, plain, truth):
        assert value.dtype == other.dtype
        assert error(value, exact) <= times * error(other, exact) + 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_left_unused_has_no_part_in_the_gradient(device):
    """The projection alone, the read alone, both, and the write alone."""
    pytest.importorskip("triton", reason="the kernels need triton")
    (x, y, post, res, pre, weight), seeds = draw(2, 20, 3, "together", torch.float32, device)

    def results(backend, used, dtype):
        leaf, arguments = x.to(dtype).requires_grad_(), [t.to(dtype) for t in (y, post, res)]
        z, again, factors = project_streams(leaf, weight.to(dtype), 1e-6, backend=backend)
        read = read_streams(again, pre.to(dtype), factors, backend=backend)
        outputs = (read, write_streams(again, *arguments, backend=backend), z)
        return torch.autograd.grad(
            [outputs[k] for k in used], leaf, [seeds[k].to(dtype) for k in used]
        )[0]

    for used in ((2,), (0,), (0, 2), (1,)):
        truth = results("reference", used, torch.float64)
        assert error(results("triton", used, torch.float32), truth) < 1e-5


def test_streams_that_share_their_memory_are_taken():
    """`begin` makes such streams of one embedding."""
    pytest.importorskip("triton", reason="the kernels need triton")
    inputs, seeds = draw(3, 24, 2, "together", torch.float32, "cuda" if GPU else "cpu")
    inputs[0] = inputs[0][:, :1].expand(-1, 3, -1)
    for value, other in zip(
        *(run(inputs, seeds, "together", backend) for backend in ("triton", "reference"))
    ):
        torch.testing.assert_close(value, other, atol=1e-5, rtol=1e-4)


def test_without_gradients_the_same_kernels_run():
    pytest.importorskip("triton", reason="the kernels need triton")
    (x, _, _, _, pre, weight), _ = draw(
        2, 24, 2, "together", torch.float32, "cuda" if GPU else "cpu"
    )
    z, again, factors = project_streams(x.requires_grad_(), weight, 1e-6, backend="triton")
    h = read_streams(again, pre, factors, backend="triton")
    with torch.no_grad():
        actual, again, factors = project_streams(x, weight, 1e-6, backend="triton")
        assert torch.equal(actual, z)
        assert torch.equal(read_streams(again, pre, factors, backend="triton"), h)


def test_second_derivatives_are_refused():
    pytest.importorskip("triton", reason="the kernels need triton")
    (x, _, _, _, pre, _), _ = draw(2, 24, 2, "together", torch.float32, "cuda" if GPU else "cpu")
    h = read_streams(x.requires_grad_(), pre, backend="triton")
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(h.sum(), x, create_graph=True)


def test_what_the_kernels_cannot_take_goes_to_the_reference_or_is_refused():
    many = torch.randn(2, MAX_STREAMS + 1, 8)
    pre = torch.randn(2, MAX_STREAMS + 1)
    torch.testing.assert_close(read_streams(many, pre), (pre.unsqueeze(-1) * many).sum(-2))
    with pytest.raises(ValueError, match="up to 8 streams"):
        read_streams(many, pre, backend="triton")
    with pytest.raises(ValueError, match=r"dtype torch.float64|triton is not installed"):
        read_streams(many[:, :2].double(), pre[:, :2].double(), backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("n", "dim", "norm"),
    [
        (1, 100, "each"),  # of one stream, both are the same
        *((n, dim, norm) for n, dim in SIZES for norm in ("together", "each")),
    ],
)
def test_many_tokens_are_as_exact_and_repeat_bit_by_bit(n, dim, norm, dtype):
    inputs, seeds = draw(n, dim, 1500, norm, dtype, "cuda")
    with poisoned():
        values = run(inputs, seeds, norm, "triton")
    plain = run(inputs, seeds, norm, "reference")
    truth = run([t.double() for t in inputs], seeds, norm, "reference", torch.float64)
    for value, other, exact in zip(values, plain, truth, strict=True):
        assert error(value, exact) <= 2 * error(other, exact) + 1e-5
    for _ in range(20):
        assert all(
            torch.equal(a, b)
            for a, b in zip(values, run(inputs, seeds, norm, "triton"), strict=True)
        )


SHAPE = {
    "vocab_size": 64,
    "dim": 128,
    "layers": 3,
    "heads": 2,
    "kv_heads": 2,
    "mlp_dim": 256,
    "context": 64,
}


BANKS = ("muddformer", "denseformer", "elc-bert")
DRAWS = 8  # one may flatter either side: a gradient of what hardly matters is all rounding


class Step:
    """A small decoder on a GPU; calls return its loss and all gradients, for a draw of weights and tokens."""

    def __init__(self, spec, dtype=torch.bfloat16):
        self.config = ModelConfig(**SHAPE, residual=spec)
        self.model = Decoder(self.config).to("cuda", dtype)
        self.forward = self.model

    def draw(self, seed):
        torch.manual_seed(seed)
        fresh = Decoder(self.config).bfloat16()  # the same weights for every arm
        with torch.no_grad():
            for p in (
                fresh.residual.parameters()
            ):  # a bank's around their start: around zero its sums are all rounding
                p.mul_(self.config.residual.partition(":")[0] in BANKS).add_(
                    0.1 * torch.randn_like(p)
                )
        self.model.load_state_dict(fresh.state_dict())
        self.tokens = torch.randint(0, 64, (2, 64)).cuda()

    def __call__(self):
        self.model.zero_grad(set_to_none=True)
        loss = self.forward(self.tokens).float().square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in self.model.parameters() if p.grad is not None)]

    def drawn(self, seed):
        self.draw(seed)
        return [t.double() for t in self()]


def assert_as_exact(ours, spec):
    """Over all draws together, at most twice plain PyTorch's error and a thousandth of each gradient."""
    join = "," if ":" in spec else ":"
    arms = (
        ours,
        Step(f"{spec}{join}backend=reference"),
        Step(f"{spec}{join}backend=reference", torch.float64),
    )
    actual = [zip(*(arm.drawn(seed) for arm in arms), strict=True) for seed in range(DRAWS)]
    for several in zip(*actual, strict=True):  # draws of one tensor
        value, other, exact = (torch.stack(some).flatten() for some in zip(*several, strict=True))
        assert (value - exact).norm() <= 2 * (other - exact).norm() + 1e-3 * exact.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(
    "spec",
    [
        *("mhc", "mhc-lite:streams=3", "hyper-connections", "hyper-connections:form=static"),
        *BANKS,
    ],
)
class TestAStep:
    def test_is_as_exact_as_plain_pytorchs(self, spec):
        assert_as_exact(Step(spec), spec)

    def test_compiles_without_a_break(self, spec):
        torch.compiler.reset()
        step = Step(spec)
        step.forward = torch.compile(step.model, fullgraph=True)
        assert_as_exact(step, spec)

    def test_can_be_captured(self, spec):
        run = Step(spec)
        run.draw(0)
        assert_captured(run)
