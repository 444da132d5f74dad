"""Two large eps, of the keys' norm and of the reader's: each operator against the formula."""

import pytest
import torch
from kernel_cases import interpreted, operators

from headwater.ops import depth_attention

EPS, NORM_EPS = 0.5, 0.08
BACKENDS = ["reference", pytest.param("triton", marks=interpreted)]


def draw(count):
    """Sources of about half the size of one, so that both eps show, and three vectors."""
    generator = torch.Generator().manual_seed(count)
    sizes = [*[(2, 12)] * count, (12,), (12,), (12,)]
    tensors = []
    for size in sizes:
        tensor = 0.5 * torch.randn(size, generator=generator, dtype=torch.float64)
        tensors.append(tensor.float().requires_grad_())
    *sources, query, key, norm = tensors
    return sources, query, key, norm


def formula(sources, query, key, norm, norm_eps):
    """The read in fp64."""
    stack = torch.stack([source.double() for source in sources])
    keys = stack / (stack.square().mean(-1, keepdim=True) + EPS).sqrt() * key.double()
    read = ((keys @ query.double()).softmax(0).unsqueeze(-1) * stack).sum(0)
    return read / (read.square().mean(-1, keepdim=True) + norm_eps).sqrt() * norm.double()


def agree(read, expected, inputs):
    """Compare the value and every gradient."""
    torch.testing.assert_close(read.double(), expected, atol=1e-5, rtol=1e-5)
    along = torch.randn(read.shape, generator=torch.Generator().manual_seed(9))
    values = torch.autograd.grad(read, inputs, along)
    truth = torch.autograd.grad(expected, inputs, along.double())
    torch.testing.assert_close(values, truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_read_has_one_eps_for_both_norms(backend):
    sources, query, key, norm = draw(3)
    expected = formula(sources, query, key, norm, EPS)
    options = {"norm_weight": norm, "eps": EPS, "backend": backend}
    agree(depth_attention(sources, query, key, **options), expected, [*sources, query, key, norm])
    with torch.no_grad():
        read = depth_attention(sources, query, key, **options)
    torch.testing.assert_close(read.double(), expected)


def scored(ops, sources, query, key):
    """The sources again, and the scores of each, (..., 1, 1)."""
    results = [ops.score(source, (query * key).unsqueeze(0), EPS) for source in sources]
    return [source for source, *_ in results], [scores for _, _, (scores,) in results]


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_merge_has_one_for_the_sum_and_one_for_the_read(backend, opens):
    sources, query, key, norm = draw(3)
    ops, added = operators(backend), torch.full((2, 12), 0.1)
    threaded, scores = scored(ops, sources[:-1], query, key)
    outs, lses, _ = ops.mix(threaded, scores)
    newest, partial = (sources[-1], None) if opens else (sources[-1] - added, added)
    read, total = ops.merge(
        newest, partial, outs[0], lses[0], query, key, norm, eps=EPS, norm_eps=NORM_EPS
    )
    agree(read, formula(sources, query, key, norm, NORM_EPS), [*sources, query, key, norm])
    torch.testing.assert_close(total, sources[-1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mix_and_a_span_of_outputs_have_the_read_s(backend):
    sources, query, key, norm = draw(4)
    ops = operators(backend)
    threaded, scores = scored(ops, sources, query, key)
    outs, _, _ = ops.mix(threaded, scores, norm, NORM_EPS)
    agree(outs[0], formula(sources, query, key, norm, NORM_EPS), [*sources, query, key, norm])

    threaded, scores = scored(ops, sources, query, key)
    outs, lses, _ = ops.mix(threaded[:2], scores[:2])
    pieces = (lses[0][..., None, None], *scores[2:])
    read, _ = ops.merge_outputs(outs[0], threaded[2:], pieces, norm, NORM_EPS)
    agree(read, formula(sources, query, key, norm, NORM_EPS), [*sources, query, key, norm])
