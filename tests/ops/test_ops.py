"""depth_attention against fla, its two-phase form and finite differences."""

import pytest
import torch
from kernel_cases import assert_all_equal, leaves_of, with_gradients
from torch.testing import assert_close

from headwater.errors import BackendError
from headwater.ops import depth_attention, routing
from headwater.ops.depth import reference


def draw(num_sources, dim, *, shape=(2, 3), dtype=torch.float32):
    torch.manual_seed(0)
    sources = []
    for n in range(num_sources):
        source = torch.randn(*shape, dim, dtype=dtype) * (n % 3 + 0.5)
        sources.append(source.requires_grad_())
    query = torch.randn(dim, dtype=dtype).div_(dim**0.5).requires_grad_()  # logits of order one
    key_weight = (1 + 0.3 * torch.randn(dim, dtype=dtype)).requires_grad_()
    return sources, query, key_weight


# Each count with one width, and each width with both norms: one channel, odd widths, a power of 2.
SHAPES = {1: 64, 2: 7, 3: 1, 8: 123, 9: 64, 17: 7, 33: 123, 64: 1, 129: 64}


@pytest.mark.parametrize(("num_sources", "dim"), SHAPES.items())
@pytest.mark.parametrize("normed", [False, True])
def test_agrees_with_fla_in_output_and_every_gradient(num_sources, dim, normed):
    from fla.ops.attnres import naive_attnres

    sources, query, key_weight = draw(num_sources, dim)
    inputs, norm_weight = [*sources, query, key_weight], None
    if normed:
        norm_weight = (1 + 0.3 * torch.randn(dim)).requires_grad_()
        inputs.append(norm_weight)
    read = depth_attention(sources, query, key_weight, norm_weight=norm_weight)
    expected = naive_attnres(query, sources, key_weight, norm_weight)
    if isinstance(expected, tuple):
        expected = expected[-1]
    seeds = [torch.randn_like(read)]
    (read, *values), (expected, *others) = (
        with_gradients([output], inputs, seeds) for output in (read, expected)
    )
    assert_close(read, expected, atol=1e-5, rtol=1e-5)
    for value, other in zip(values, others, strict=True):
        assert (value - other).norm() <= 1e-5 * max(other.norm(), 1.0)


@pytest.mark.parametrize("heads", [1, 2])
def test_gradients_match_finite_differences_in_fp64(heads):
    sources, query, key_weight = draw(4, 6, dtype=torch.float64)
    norm_weight = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def read(query, key_weight, norm_weight, *sources):
        return depth_attention(sources, query, key_weight, norm_weight=norm_weight, heads=heads)

    assert torch.autograd.gradcheck(read, (query, key_weight, norm_weight, *sources))


@pytest.mark.parametrize("zero", [0, 2], ids=["a finished block", "the running sum"])
def test_second_derivatives_match_finite_differences_where_a_source_is_zero(zero):
    """A sublayer whose last projection starts at zero writes such sources.

    Their length has no second derivative.
    """
    sources, query, key_weight = draw(3, 4, shape=(2,), dtype=torch.float64)
    sources[zero] = torch.zeros_like(sources[zero]).requires_grad_()

    def read(query, key_weight, *sources):
        return depth_attention(sources, query, key_weight, eps=0.1)

    def read_in_two_phases(query, key_weight, *sources):
        *blocks, last = sources
        vectors = query[None], key_weight[None]
        (out,), (lse,) = reference.attend_blocks(blocks, *vectors, 0.1)
        return reference.merge_partial(last, query, out, lse, key_weight, None, 0.1)

    for function in (read, read_in_two_phases):
        assert torch.autograd.gradgradcheck(function, (query, key_weight, *sources))


@pytest.mark.parametrize("num_blocks", [1, 2, 9])
@pytest.mark.parametrize("normed", [False, True])
def test_two_phases_equal_one_pass(num_blocks, normed):
    sources, _, _ = draw(num_blocks + 1, 24, dtype=torch.float64)
    queries, keys = leaves_of(torch.randn(2, 5, 24, dtype=torch.float64))
    norm_weight = torch.randn(24, dtype=torch.float64) if normed else None
    *blocks, partial = sources
    outs, lses = reference.attend_blocks(blocks, queries, keys, 1e-6)
    merged, direct = [], []
    for query, key, out, lse in zip(queries, keys, outs, lses):
        merged.append(reference.merge_partial(partial, query, out, lse, key, norm_weight, 1e-6))
        direct.append(depth_attention(sources, query, key, norm_weight=norm_weight))
    assert_close(merged, direct, atol=1e-12, rtol=1e-12)
    inputs = [*sources, queries, keys]
    seeds = torch.randn(5, *direct[0].shape)
    gradients = [with_gradients(reads, inputs, seeds) for reads in (merged, direct)]
    assert_close(*gradients, atol=1e-11, rtol=1e-11)


def test_weights_are_a_distribution_and_reproduce_the_read():
    sources, query, key_weight = draw(5, 16)
    read, weights = depth_attention(sources, query, key_weight, return_weights=True, heads=4)
    assert weights.shape == (5, 2, 3, 4)
    assert_close(weights.sum(0), torch.ones(2, 3, 4))
    grouped = torch.stack(sources).unflatten(-1, (4, 4))
    mixed = (weights.unsqueeze(-1) * grouped).sum(0)
    assert_close(mixed.flatten(-2), read)


def test_zero_query_is_the_mean_and_extremes_stay_finite():
    sources, _, _ = draw(6, 16)
    mean = torch.stack(sources).mean(0)
    assert_close(depth_attention(sources, torch.zeros(16)), mean)
    sizes = torch.tensor([0.0, 1e4, 1e-4]).view(3, 1, 1)
    hostile = list(sizes * torch.randn(3, 2, 16))
    for value in (80.0, -80.0):
        read = depth_attention(hostile, torch.full((16,), value))
        assert read.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_one_rounding_away_from_fp32(dtype):
    sources, query, key_weight = draw(9, 64, dtype=torch.float32)
    low = [source.detach().to(dtype) for source in sources]
    wide = [source.float() for source in low]
    exact = depth_attention(wide, query, key_weight).to(dtype)
    outs, lses = reference.attend_blocks(low, query[None], key_weight[None], 1e-6)
    assert_all_equal((depth_attention(low, query, key_weight), outs[0]), (exact, exact))
    assert lses.dtype == torch.float32


def test_autocast_rounds_nothing():
    """Weights over depth are read off small differences: every product stays in fp32."""
    sources, query, key_weight = draw(5, 64)
    *blocks, last = sources
    folded = (query * key_weight).unsqueeze(0)

    def results():
        out, lse = reference.attend_blocks(blocks, query[None], key_weight[None], 1e-6)
        scores = [reference.score(source, folded, 1e-6)[2][0] for source in blocks]
        mixed, lses, _ = reference.mix(blocks, scores, key_weight)
        arguments = last, query, out[0], lse[0], key_weight, key_weight
        merged = reference.merge_partial(*arguments, 1e-6)
        reads = depth_attention(sources, query, key_weight, return_weights=True)
        heads = depth_attention(sources, query, key_weight, heads=4)
        return [out, lse, *scores, *mixed, *lses, merged, *reads, heads]

    plain = results()
    with torch.autocast("cpu", torch.bfloat16):
        under = results()
    assert [t.dtype for t in plain] == [t.dtype for t in under]
    assert_all_equal(plain, under)


def test_rows_as_wide_as_a_program_holds_and_no_wider(monkeypatch):
    monkeypatch.setattr(routing, "INSTALLED", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert routing.obstacle(torch.empty(1, 32768)) is None
    assert routing.obstacle(torch.empty(1, 32769)) == "width 32769 is not between 1 and 32768"


def test_kernels_take_no_part_in_transforms_of_torch_func(monkeypatch):
    monkeypatch.setattr(routing, "INSTALLED", True)
    read = torch.vmap(lambda x: depth_attention([x, x], x, backend="triton"))
    with pytest.raises(BackendError, match=r"a transform of torch\.func is active"):
        read(torch.ones(2, 4))


def test_wrong_shapes_are_named():
    source, query = torch.zeros(2, 4), torch.zeros(4)
    wrong = [
        (([], query), {}, "all of one shape"),
        (([source, torch.zeros(2, 5)], query), {}, "all of one shape"),
        (([source], query), {"heads": 0}, "heads must be"),
        (([source], query), {"heads": 3}, "heads must be"),
        (([source], torch.zeros(5)), {}, "query must be"),
        (([source], query), {"key_weight": torch.ones(1)}, "key_weight must be"),
        (([source], query), {"norm_weight": torch.ones(1)}, "norm_weight must be"),
    ]
    for arguments, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            depth_attention(*arguments, **options)


@pytest.mark.parametrize("small", [0, 1024])
@pytest.mark.parametrize("sums", [1, 3])
def test_sums_source_by_source_are_those_of_products(sums, small, monkeypatch):
    """The faster way depends on the width; both paths are taken whatever that is here."""
    monkeypatch.setattr(reference, "SMALL", small)
    torch.manual_seed(0)
    sources = leaves_of(torch.randn(4, 2, 5, 8, dtype=torch.float64))
    scores = torch.randn(2, 5, 4, sums, dtype=torch.float64, requires_grad=True)
    expected = torch.einsum("btns,nbtd->sbtd", scores.softmax(-2), torch.stack(sources))
    outs, _, _ = reference.mix(sources, scores.split([1, 3], -2))
    inputs, seeds = (scores, *sources), [torch.randn(expected.shape)]
    mixed = torch.stack(outs)
    results = [with_gradients([sums], inputs, seeds) for sums in (mixed, expected)]
    assert_close(*results, atol=1e-12, rtol=1e-12)
