"""The kernels against fp64 and plain PyTorch: shared by the interpreter's small set and the full grid on a GPU."""

from contextlib import contextmanager

import torch

from headwater.ops import attend_blocks, depth_attention, merge_partial


def error(value, truth):
    return ((value.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def draw(count, dim, tokens, dtype, device, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, spread=1.0, mean=0.0):
        return (torch.randn(*shape, generator=generator) * spread + mean).to(device=device, dtype=dtype)

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
    out, lse = attend_blocks(blocks, queries, keys, backend=backend)
    merged = (
        merge_partial(partial, q, o, m, k, norm_weight=w, backend=backend)
        for q, o, m, k, w in zip(queries, out, lse, keys, (norm, None))
    )
    return (*merged, out, lse)


def run(function, inputs, backend, dtype, seeds=None):
    """Outputs and the gradients of every input, of which the first ones are the sources."""
    leaves = [t.to(dtype).detach().requires_grad_() for t in inputs]
    *sources, queries, keys, norm = leaves
    outputs = function(sources, queries, keys, norm, backend)
    if seeds is None:
        generator = torch.Generator().manual_seed(9)
        seeds = [torch.randn(o.shape, generator=generator).to(o.device).to(inputs[0].dtype) for o in outputs]
    grads = torch.autograd.grad(outputs, leaves, [s.to(o.dtype) for s, o in zip(seeds, outputs)], allow_unused=True)
    return [*outputs, *(g for g in grads if g is not None)], seeds


def worst(function, count, dim, tokens, dtype, device, **options):
    """max over outputs and gradients of  error / (2 * plain PyTorch's error + 1e-5); at most 1 is allowed."""
    sources, queries, keys, norm = draw(count, dim, tokens, dtype, device, **options)
    inputs = [*sources, queries, keys, norm]
    truth, seeds = run(function, inputs, "reference", torch.float64)
    plain, _ = run(function, inputs, "reference", dtype, seeds)
    with poisoned():
        ours, _ = run(function, inputs, "triton", dtype, seeds)
    assert all(torch.isfinite(t).all() for t in ours)
    return max(error(o, t) / (2 * error(p, t) + 1e-5) for o, p, t in zip(ours, plain, truth, strict=True))


@contextmanager
def poisoned():
    """Unwritten memory is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
