"""Reads with the options of Attention Residuals: the kernels against fp64 and plain PyTorch, in every gradient."""

import pytest
import torch
from kernel_cases import poisoned
from test_banks import DEVICES, error

from headwater.ops.depth import weigh_sources

GPU = torch.cuda.is_available()
CASES = [  # sources before the first read, heads, width, keys, tokens, softmax, key_norm, a query of each token
    (1, 1, 64, 64, (2,), False, True, False),  # one source
    (9, 4, 64, 64, (1, 3), True, True, False),  # more sources than a program takes at once
    (3, 3, 192, 192, (2,), True, True, False),  # heads that are no power of two
    (2, 2, 246, 246, (2,), False, False, False),  # nor their channels, and rows that begin anywhere
    (3, 1, 123, 40, (3,), True, True, False),  # a part of the channels are keys
    (2, 1, 300, 7, (2,), True, False, True),
    (3, 8, 128, 128, (2, 2), True, True, True),
    (2, 4, 4096, 4096, (20,), True, True, False),  # three tokens a program, and two for the last
]
READS = 2


def draw(count, heads, dim, keys, tokens, softmax, norm, each, dtype, device):
    generator = torch.Generator().manual_seed(count)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    sources = [normal(*tokens, dim, dtype=dtype) * (0.5 + n % 3) for n in range(count)]
    queries = [
        normal(*(tokens if each else ()), keys) / (keys / heads) ** 0.5 for _ in range(READS)
    ]
    gains = [1 + 0.3 * normal(keys) for _ in range(READS)]
    seeds = [normal(*tokens, dim, dtype=dtype) for _ in range(READS)]
    return [*sources, *queries, *gains], seeds


def run(inputs, seeds, heads, softmax, norm, backend, dtype=None):
    """Values and all gradients of two reads of sources, of which the first adds one."""
    leaves = [(t if dtype is None else t.to(dtype)).detach().requires_grad_() for t in inputs]
    state, queries, gains = leaves[: -2 * READS], leaves[-2 * READS : -READS], leaves[-READS:]
    options = {"eps": 0.1, "heads": heads, "softmax": softmax, "key_norm": norm, "backend": backend}
    outputs = []
    for k, (query, gain) in enumerate(zip(queries, gains)):
        x, state = weigh_sources(state, query, gain, **options, thread=k < READS - 1)
        outputs.append(x)
        state = [*state, 0.5 * x]
    along = [seed.to(output.dtype) for seed, output in zip(seeds, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, along)]


def compare(case, dtype, device):
    """Our results, and how far they are from the truth beside plain PyTorch's."""
    (heads, softmax, norm), (inputs, seeds) = (case[1], *case[5:7]), draw(*case, dtype, device)
    with poisoned():
        ours = run(inputs, seeds, heads, softmax, norm, "triton")
    plain = run(inputs, seeds, heads, softmax, norm, "reference")
    truth = run(inputs, seeds, heads, softmax, norm, "reference", torch.float64)
    assert [t.dtype for t in ours] == [t.dtype for t in plain]
    return ours, [(error(a, c), error(b, c)) for a, b, c in zip(ours, plain, truth, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_are_as_exact_as_plain_pytorch(device, case, dtype):
    pytest.importorskip("triton", reason="the kernels need triton")
    from headwater.ops.triton.launch import launches

    before = launches.copy()
    _, errors = compare(case, dtype, device)
    assert launches - before == {"weigh": READS, "weigh_backward": READS}
    times = (
        8 if dtype == torch.bfloat16 and device == "cpu" else 2
    )  # the interpreter truncates where a GPU rounds
    assert all(mine <= times * its + 1e-5 for mine, its in errors), errors


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [-400.0, 400.0])
def test_logits_far_from_zero_stay_exact(device, value):
    """Below -88 and above 88 their exponentials leave fp32."""
    pytest.importorskip("triton", reason="the kernels need triton")
    sources = [torch.full((1, 8), scale, device=device) for scale in (1.0, 0.999, 0.0)]
    query, gain, seeds = (
        torch.full((8,), value / 8),
        torch.ones(8),
        [torch.arange(8.0, device=device)[None]] * 2,
    )
    inputs = [*sources, *(t.to(device) for t in (query, query, gain, gain))]
    for softmax in (True, False):
        ours, plain = (
            run(inputs, seeds, 1, softmax, False, backend) for backend in ("triton", "reference")
        )
        truth = run(inputs, seeds, 1, softmax, False, "reference", torch.float64)
        for mine, its, exact in zip(ours, plain, truth, strict=True):
            assert (mine - exact).norm() <= 2 * (its - exact).norm() + 1e-5 * (1 + exact.norm())


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_left_unused_has_no_part_in_the_gradient(device):
    """The read, all sources, and one source beside the read."""
    pytest.importorskip("triton", reason="the kernels need triton")
    inputs, seeds = draw(3, 2, 20, 20, (3,), True, True, False, torch.float32, device)
    inputs, seeds = inputs[:4], [seeds[0], seeds[1]]

    def results(backend, used, dtype):
        leaves = [t.to(dtype).detach().requires_grad_() for t in inputs]
        x, again = weigh_sources(leaves[:3], leaves[3], heads=2, backend=backend)
        made = (x, again[1].view_as(x))
        given = [seeds[k].to(dtype) for k in used]
        return torch.autograd.grad([made[k] for k in used], leaves, given, allow_unused=True)

    for used in ((0,), (1,), (0, 1)):
        for mine, exact in zip(
            results("triton", used, torch.float32), results("reference", used, torch.float64)
        ):
            assert (mine is None and exact is None) or error(mine, exact) < 1e-5


def test_without_gradients_the_same_kernel_runs_and_second_derivatives_are_refused():
    pytest.importorskip("triton", reason="the kernels need triton")
    sources = [
        torch.randn(2, 16, device="cuda" if GPU else "cpu", requires_grad=True) for _ in range(3)
    ]
    query = torch.randn(16, device=sources[0].device)
    x, again = weigh_sources(sources, query, heads=2, backend="triton")
    assert all(mine.grad_fn is not None for mine in again)
    with torch.no_grad():
        assert torch.equal(weigh_sources(sources, query, heads=2, backend="triton")[0], x)
    last = weigh_sources(sources, query, heads=2, thread=False, backend="triton")[1]
    assert all(mine is given for mine, given in zip(last, sources, strict=True))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(x.sum(), sources, create_graph=True)


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize(
    ("query", "gain", "heads", "message"),
    [
        ((9,), None, 1, "the sources' width 8"),
        (
            (3, 8),
            None,
            1,
            r"queries must be \(8,\) or \(2, 8\)",
        ),  # a kernel would read what lies behind
        ((8,), (4,), 1, r"key_weight must be \(8,\)"),
        ((8,), None, 3, "3 heads do not divide 8"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(backend, query, gain, heads, message):
    sources, gain = [torch.zeros(2, 8)] * 2, None if gain is None else torch.ones(gain)
    with pytest.raises(ValueError, match=message):
        weigh_sources(sources, torch.zeros(query), gain, heads=heads, backend=backend)
    with pytest.raises(ValueError, match=r"source 0 is \(2, 8\), source 1 is \(2, 9\)"):
        weigh_sources([sources[0], torch.zeros(2, 9)], torch.zeros(4), backend=backend)


def test_heads_of_a_part_of_the_keys_are_left_to_the_reference():
    sources, query = [torch.randn(2, 8) for _ in "ab"], torch.randn(4)
    weigh_sources(sources, query, heads=2)
    with pytest.raises(
        ValueError, match=r"2 heads: the kernels of this read have one|triton is not installed"
    ):
        weigh_sources(sources, query, heads=2, backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("count", "heads", "dim", "keys", "softmax", "norm", "each"),
    [
        (25, 16, 128, 128, True, True, False),
        (25, 1, 384, 32, True, True, False),
        (47, 4, 384, 384, False, True, False),  # heads of 96
        (9, 3, 192, 192, True, False, True),
        (12, 1, 2048, 2048, True, True, True),
        (5, 8, 7168, 7168, True, True, False),
        (3, 1, 32768, 32768, False, True, False),  # as wide as allowed
        (3, 3, 123, 123, True, True, False),
    ],
)
def test_many_tokens_are_as_exact_and_repeat_bit_by_bit(
    count, heads, dim, keys, softmax, norm, each, dtype
):
    case = (count, heads, dim, keys, (2, 750), softmax, norm, each)
    ours, errors = compare(case, dtype, "cuda")
    assert all(mine <= 2 * its + 1e-5 for mine, its in errors), errors
    inputs, seeds = draw(*case, dtype, "cuda")
    for _ in range(10):
        again = run(inputs, seeds, heads, softmax, norm, "triton")
        assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


def test_whole_keys_are_the_sources_themselves():
    """A slice of all channels would give a gradient of its own, copied into zeros."""
    sources = [torch.randn(3, 8, requires_grad=True) for _ in range(2)]
    for keys in (8, 5):
        reached, seen = (
            [weigh_sources(sources, torch.randn(keys), backend="reference")[0].grad_fn],
            set(),
        )
        while reached:
            node = reached.pop()
            seen.add(node.name())
            reached += [after for after, _ in node.next_functions if after is not None]
        assert ("SliceBackward0" in seen) == (keys == 5)
