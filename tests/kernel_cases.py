"""Kernels against fp64 and plain PyTorch: for the interpreter's small set and the grid on a GPU."""

from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from headwater.ops import depth_attention
from headwater.ops.depth import reference
from headwater.ops.numerics import accumulation_dtype
from headwater.residuals import build

# A graph of an earlier run is no answer: its key is of PyTorch's operators, not of ours.
INDUCTOR = {"fx_graph_cache": False}
# All of inductor but the C++ in which it would join PyTorch's own operators: that takes seconds.
UNFUSED = {"fallback_by_default": True}

GPU = torch.cuda.is_available()
HERE = "cuda" if GPU else "cpu"
interpreted = pytest.mark.skipif(GPU, reason="the interpreter is off where there is a GPU")
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")
DEVICES = [
    pytest.param("cpu", marks=interpreted),
    pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu]),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def error(value, truth):
    """The relative error of a tensor."""
    return ((value.double() - truth).norm() / truth.norm().clamp_min(1e-6)).item()


def assert_as_exact(values, plain, truth, spare=1e-5):
    """Each error is at most twice plain PyTorch's."""
    for value, other, exact in zip(values, plain, truth, strict=True):
        assert (value.dtype, value.shape) == (other.dtype, other.shape)
        assert error(value, exact) <= 2 * error(other, exact) + spare


def assert_all_close(values, expected, atol=1e-5, rtol=1e-5):
    for value, other in zip(values, expected, strict=True):
        torch.testing.assert_close(value, other, atol=atol, rtol=rtol)


def assert_all_equal(*results):
    """Several lists of tensors are the same to the last bit."""
    for one, other in pairwise(results):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_first_order(output, x):
    """The gradient is not to be differentiated again."""
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(output.sum(), x, create_graph=True)


def with_option(spec, option):
    return f"{spec}{',' if ':' in spec else ':'}{option}"


def draw(count, dim, tokens, dtype, device, seed=0, scale=1.0):
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape, spread=1.0, mean=0.0):
        return (torch.randn(*shape, generator=generator, device=device) * spread + mean).to(dtype)

    sources = [normal(tokens, dim, spread=scale * (n % 3 + 0.5)) for n in range(count)]
    return (
        sources,
        normal(2, dim, spread=dim**-0.5),
        normal(2, dim, spread=0.3, mean=1.0),
        normal(dim, spread=0.3, mean=1.0),
    )


def read(sources, queries, keys, norm, backend):
    return (depth_attention(sources, queries[0], keys[0], norm_weight=norm, backend=backend),)


def two_phases(sources, queries, keys, norm, backend):
    """Two queries over all sources but the last, each then merged with it."""
    *blocks, partial = sources
    outs, lses = first_phase(blocks, queries, keys, backend)
    options = {} if backend == "reference" else {"keep": True}
    merge, merged = operators(backend).merge, []
    for q, out, lse, k, weight in zip(queries, outs, lses, keys, (norm, None)):
        merged.append(merge(partial, None, out, lse, q, k, weight, **options)[0])
    return (*merged, torch.stack(outs), torch.stack(lses))


def first_phase(blocks, queries, keys, backend):
    """Outputs and log-sum-exps of all queries over all blocks."""
    ops = operators(backend)
    dtype = accumulation_dtype(queries.dtype)
    folded = queries.to(dtype) * keys.to(dtype)
    threaded, pieces = [], []
    for block in blocks:
        block, folded, (piece,) = ops.score(block, folded, 1e-6)
        threaded.append(block)
        pieces.append(piece)
    outs, lses, _ = ops.mix(threaded, pieces)
    return outs, lses


def operators(backend):
    """The module that has the operators of two phases."""
    if backend == "reference":
        return reference
    from headwater.ops.depth import autograd

    return autograd


def growing(sources, queries, keys, norm, backend):
    """An output joins its block's sum, whose gradient comes from a later read as well."""
    y, partial, out = sources
    lse = torch.zeros(out.shape[:-1], dtype=accumulation_dtype(out.dtype), device=out.device)
    options = {} if backend == "reference" else {"keep": True}
    merge = operators(backend).merge
    return merge(y, partial, out, lse, queries[0], keys[0], norm, **options)


def leaves_of(tensors, dtype=None):
    """Copies that have a gradient, in a dtype or each in its own."""
    return [t.to(dtype or t.dtype).detach().requires_grad_() for t in tensors]


def with_gradients(outputs, leaves, seeds):
    """Outputs, and the gradients of the leaves that have a part in them."""
    along = [seed.to(output) for seed, output in zip(seeds, outputs)]
    gradients = torch.autograd.grad(outputs, leaves, along, allow_unused=True)
    return [*outputs, *(g for g in gradients if g is not None)]


def check_against_fp64(run, inputs, seeds, *arguments, spare=1e-5):
    """The kernels' results, which are as exact as plain PyTorch's.

    `run` takes the inputs, the seeds, the arguments and a backend; unwritten memory is NaN.
    """
    with poisoned():
        values = run(inputs, seeds, *arguments, "triton")
    plain = run(inputs, seeds, *arguments, "reference")
    exact = run([t.double() for t in inputs], seeds, *arguments, "reference")
    assert_as_exact(values, plain, exact, spare)
    return values


def saved_for_backward(function):
    """The tensors that a function's backward keeps."""
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return saved


def run(function, inputs, backend, dtype, seeds=None):
    """Outputs and the gradients of every input, of which the first ones are the sources."""
    leaves = leaves_of(inputs, dtype)
    *sources, queries, keys, norm = leaves
    outputs = function(sources, queries, keys, norm, backend)
    if seeds is None:
        seeds = seeds_of(outputs, inputs[0])
    return with_gradients(outputs, leaves, seeds), seeds


def seeds_of(outputs, like):
    """Random gradients of the outputs, rounded to the dtype of `like`."""
    generator, seeds = torch.Generator(like.device).manual_seed(9), []
    for output in outputs:
        seed = torch.randn(output.shape, generator=generator, device=like.device)
        seeds.append(seed.to(like.dtype))
    return seeds


def extremes(value, dtype, device):
    """Results over sources of norm zero, large and tiny ones, with logits of +-`value` or more."""
    hostile = [torch.zeros(2, 16), torch.full((2, 16), 1e4)]
    hostile += [torch.randn(2, 16) * 1e-4, torch.randn(2, 16)]
    inputs = [*hostile, torch.full((2, 16), value / 4), torch.ones(2, 16), torch.ones(16)]
    return run(two_phases, [t.to(device, dtype) for t in inputs], "triton", dtype)[0]


def worst(function, count, dim, tokens, dtype, device, draws=1, seed=0):
    """The largest error / (2 * plain PyTorch's error + 1e-5); at most 1 is allowed.

    It is taken over outputs and gradients. Errors of several draws are taken together: one token's
    error in bf16 is a handful of roundings.
    """
    squares = 0.0  # (results, 3): of our error, of plain PyTorch's, of the truth
    for number in range(seed, seed + draws):
        squares = squares + squared_errors(function, count, dim, tokens, dtype, device, number)
    error, plain, size = squares.sqrt().unbind(-1)
    size = size.clamp_min(1e-30)
    return (error / size / (2 * plain / size + 1e-5)).max().item()


def squared_errors(function, count, dim, tokens, dtype, device, seed):
    """Sums of squares of each result of one draw: our error, plain PyTorch's, the truth."""
    sources, *parameters = draw(count, dim, tokens, dtype, device, seed)
    with poisoned():
        values, seeds = run(function, [*sources, *parameters], "triton", dtype)
    assert all(torch.isfinite(t).all() for t in values)
    plain, _ = run(function, [*sources, *parameters], "reference", dtype, seeds)
    squares = torch.zeros(len(values), 3, dtype=torch.float64)
    # Outputs and gradients of sources go by token; gradients of parameters are sums over tokens.
    by_token = len(seeds) + count
    shared = [0.0] * (len(values) - by_token)
    for here, truth in truths(function, sources, parameters, seeds):
        for k, t in enumerate(truth[:by_token]):
            squares[k] += measured(rows(values[k], here, tokens), rows(plain[k], here, tokens), t)
        shared = [s + t for s, t in zip(shared, truth[by_token:], strict=True)]
    for k, t in enumerate(shared, by_token):
        squares[k] = measured(values[k], plain[k], t)
    return squares


def truths(function, sources, parameters, seeds):
    """Results in fp64, as many tokens at a time as fit in memory."""
    tokens, limit = len(sources[0]), max(1, 2**28 // (len(sources) * sources[0].shape[-1]))
    for start in range(0, tokens, limit):
        here = slice(start, start + limit)
        inputs = [*(source[here] for source in sources), *parameters]
        along = [rows(seed, here, tokens) for seed in seeds]
        values, _ = run(function, inputs, "reference", torch.float64, along)
        yield here, values


def rows(result, here, tokens):
    """Rows of a result with tokens first, or second after the queries."""
    return result[here] if len(result) == tokens else result[:, here]


def measured(value, plain, truth):
    differences = (value.double() - truth, plain.double() - truth, truth)
    return torch.stack([difference.square().sum() for difference in differences]).cpu()


def results(function, x, dtype):
    """Outputs of a function of one tensor, and its gradient."""
    leaves = leaves_of([x], dtype)
    outputs = function(*leaves)
    return with_gradients(outputs, leaves, seeds_of(outputs, x))


def excess(function, x):
    """The largest error / (2 * plain PyTorch's error + 1e-6); at most 1 is allowed.

    It is taken over outputs and the gradient of `function(x, backend)`; unwritten memory is NaN.
    """
    with poisoned():
        values = results(lambda x: function(x, "triton"), x, x.dtype)
    plain = results(lambda x: function(x, "reference"), x, x.dtype)
    truth = results(lambda x: function(x, "reference"), x, torch.float64)
    ratios = []
    for value, other, exact in zip(values, plain, truth, strict=True):
        assert (value.dtype, value.shape) == (other.dtype, other.shape)
        limit = 2 * (other - exact).norm() + 1e-6 * exact.norm()
        ratios.append(((value - exact).norm() / limit).item())
    return max(ratios)


def compiled_nodes(function, x):
    """`results` of a compiled function, and the operators of its graphs, forward and backward."""
    nodes = []

    def note(graph, _):
        nodes.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph)

    compiled = torch.compile(function, backend=aot_autograd(fw_compiler=note), fullgraph=True)
    actual = results(compiled, x, x.dtype)
    torch._dynamo.reset()
    return actual, *nodes


def assert_captured(run):
    """Replayed as a CUDA graph, it gives what it gave."""
    expected = [t.clone() for t in run()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    graph.replay()
    assert_all_equal(results, expected)


@contextmanager
def poisoned():
    """Unwritten memory is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def ways(specs, compiled):
    """Parameters of a test of `replay`: every spec as it is, and some compiled."""
    return [*((spec, None) for spec in specs), *((spec, "aot_eager") for spec in compiled)]


def replay(spec, tensors, dtype=torch.float32, compiled=None, unused=False):
    """All reads of a residual, what the head sees, and every gradient.

    Sublayers produce a part of what they read. `unused`: some inputs have no gradient.
    """
    torch.manual_seed(1)
    residual = build(spec, tensors[0].shape[-1], len(tensors) - 1)
    for p in residual.parameters():
        torch.nn.init.normal_(p, std=0.3)
    residual, leaves = residual.to(dtype), leaves_of(tensors, dtype)

    def forward(x, *outputs):
        state, reads = residual.begin(x), []
        for i, y in enumerate(outputs):
            read, state = residual.read(state, i)
            several = read if isinstance(read, tuple) else (read,)
            reads += several
            state = residual.write(state, i, y + 0.5 * several[-1] - 0.2 * several[0])
        return *reads, residual.end(state)

    run = forward
    if compiled is not None:
        run = torch.compile(forward, backend=compiled, fullgraph=True)
    outputs, seeds = run(*leaves), []
    for k, output in enumerate(outputs):
        generator = torch.Generator().manual_seed(k)
        seeds.append(torch.randn(output.shape, generator=generator).to(dtype))
    inputs = [*leaves, *residual.parameters()]
    return [*outputs, *torch.autograd.grad(outputs, inputs, seeds, allow_unused=unused)]
