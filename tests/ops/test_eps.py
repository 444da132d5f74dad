"""The eps of the keys' norm and the eps of the reader's, large and apart: each operator against the formula."""

import pytest
import torch
from kernel_cases import operators

from headwater.ops import depth_attention

EPS, NORM_EPS = 0.5, 0.08
BACKENDS = [
    "reference",
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off there"),
    ),
]


def draw(count):
    """Sources of about half the size of one, so that both eps show, and query, key weight and norm weight."""
    generator = torch.Generator().manual_seed(count)
    sizes = [*[(2, 12)] * count, (12,), (12,), (12,)]
    tensors = [
        torch.randn(size, generator=generator, dtype=torch.float64).mul_(0.5) for size in sizes
    ]
    *sources, query, key, norm = (t.float().requires_grad_() for t in tensors)
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
    values, truth = (
        torch.autograd.grad(read, inputs, along),
        torch.autograd.grad(expected, inputs, along.double()),
    )
    for value, other in zip(values, truth, strict=True):
        torch.testing.assert_close(value, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_read_has_one_eps_for_both_norms(backend):
    sources, query, key, norm = draw(3)
    expected = formula(sources, query, key, norm, EPS)
    options = {"norm_weight": norm, "eps": EPS, "backend": backend}
    agree(depth_attention(sources, query, key, **options), expected, [*sources, query, key, norm])
    with torch.no_grad():
        torch.testing.assert_close(
            depth_attention(sources, query, key, **options).double(), expected
        )


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
