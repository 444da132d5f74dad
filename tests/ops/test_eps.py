"""Two large eps, of the keys' norm and of the reader's: each operator against the formula."""

import pytest
import torch
from kernel_cases import interpreted, leaves_of, operators, with_gradients
from torch.testing import assert_close

from headwater.ops import depth_attention

EPS, NORM_EPS = 0.5, 0.08
BACKENDS = ["reference", pytest.param("triton", marks=interpreted)]


def draw(count):
    """Sources of about half the size of one, so that both eps show, and three vectors."""
    generator = torch.Generator().manual_seed(count)
    sizes = [(2, 12)] * count + [(12,)] * 3
    draws = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    halves = [0.5 * draw for draw in draws]
    *sources, query, key, norm = leaves_of(halves, torch.float32)
    return sources, query, key, norm


def unit(x, eps):
    square = x.square().mean(-1, keepdim=True)
    return x / (square + eps).sqrt()


def formula(sources, query, key, norm, norm_eps):
    """The read in fp64."""
    tensors = torch.stack(sources), query, key, norm
    stack, query, key, norm = (tensor.double() for tensor in tensors)
    weights = (unit(stack, EPS) * key @ query).softmax(0)
    read = (weights.unsqueeze(-1) * stack).sum(0)
    return unit(read, norm_eps) * norm


def agree(read, tensors, norm_eps=NORM_EPS):
    """Compare the value and every gradient with those of the formula."""
    sources, *vectors = tensors
    expected, inputs = formula(*tensors, norm_eps), [*sources, *vectors]
    generator = torch.Generator().manual_seed(9)
    seeds = [torch.randn(read.shape, generator=generator)]
    values, *gradients = with_gradients([read], inputs, seeds)
    truth, *exact = with_gradients([expected], inputs, seeds)
    assert_close(values.double(), truth, atol=1e-5, rtol=1e-5)
    assert_close(gradients, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_read_has_one_eps_for_both_norms(backend):
    sources, query, key, norm = tensors = draw(3)
    options = {"norm_weight": norm, "eps": EPS, "backend": backend}
    agree(depth_attention(sources, query, key, **options), tensors, EPS)
    with torch.no_grad():
        read = depth_attention(sources, query, key, **options)
    assert_close(read.double(), formula(*tensors, EPS))


def scored(ops, sources, query, key):
    """The sources again, and the scores of each, (..., 1, 1)."""
    threaded, scores = [], []
    folded = (query * key).unsqueeze(0)
    for source in sources:
        source, _, (score,) = ops.score(source, folded, EPS)
        threaded.append(source)
        scores.append(score)
    return threaded, scores


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_merge_has_one_for_the_sum_and_one_for_the_read(backend, opens):
    sources, query, key, norm = tensors = draw(3)
    ops, newest, partial = operators(backend), sources[-1], None
    if not opens:
        partial = torch.full((2, 12), 0.1)
        newest = newest - partial
    threaded, scores = scored(ops, sources[:-1], query, key)
    (out,), (lse,), _ = ops.mix(threaded, scores)
    arguments = newest, partial, out, lse, query, key, norm
    read, total = ops.merge(*arguments, eps=EPS, norm_eps=NORM_EPS)
    assert_close(total, sources[-1])
    agree(read, tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mix_and_a_span_of_outputs_have_the_read_s(backend):
    sources, query, key, norm = tensors = draw(4)
    ops = operators(backend)
    threaded, scores = scored(ops, sources, query, key)
    (read,), _, _ = ops.mix(threaded, scores, norm, NORM_EPS)
    agree(read, tensors)

    threaded, scores = scored(ops, sources, query, key)
    (out,), (lse,), _ = ops.mix(threaded[:2], scores[:2])
    pieces = (lse[..., None, None], *scores[2:])
    read, _ = ops.merge_outputs(out, threaded[2:], pieces, norm, NORM_EPS)
    agree(read, tensors)
