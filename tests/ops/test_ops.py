"""depth_attention against an independent implementation, its two-phase form and finite differences."""

import pytest
import torch

from headwater.errors import BackendError
from headwater.ops import depth_attention, routing
from headwater.ops.depth import reference


def draw(num_sources, dim, *, shape=(2, 3), dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    sources = [
        torch.randn(*shape, dim, dtype=dtype).mul_(n % 3 + 0.5).requires_grad_()
        for n in range(num_sources)
    ]
    query = torch.randn(dim, dtype=dtype).div_(dim**0.5).requires_grad_()  # logits of order one
    key_weight = (1 + 0.3 * torch.randn(dim, dtype=dtype)).requires_grad_()
    return sources, query, key_weight


@pytest.mark.parametrize("num_sources", [1, 2, 3, 8, 9, 17, 33, 64, 129])
@pytest.mark.parametrize("dim", [1, 7, 64, 123])  # one channel, odd widths, a power of two
@pytest.mark.parametrize("normed", [False, True])
def test_agrees_with_fla_in_output_and_every_gradient(num_sources, dim, normed):
    from fla.ops.attnres import naive_attnres

    sources, query, key_weight = draw(num_sources, dim)
    norm_weight = (1 + 0.3 * torch.randn(dim)).requires_grad_() if normed else None
    inputs = [*sources, query, key_weight, *([norm_weight] if normed else [])]
    values = depth_attention(sources, query, key_weight, norm_weight=norm_weight)
    reference_value = naive_attnres(query, sources, key_weight, norm_weight)
    reference_value = reference_value[-1] if isinstance(reference_value, tuple) else reference_value
    seed = torch.randn_like(values)
    torch.testing.assert_close(values, reference_value, atol=1e-5, rtol=1e-5)
    for value, other in zip(
        torch.autograd.grad(values, inputs, seed),
        torch.autograd.grad(reference_value, inputs, seed),
    ):
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
    """A sublayer whose last projection starts at zero writes such sources; their length has no second derivative."""
    sources, query, key_weight = draw(3, 4, shape=(2,), dtype=torch.float64)
    sources[zero] = torch.zeros_like(sources[zero]).requires_grad_()

    def read(query, key_weight, *sources):
        return depth_attention(sources, query, key_weight, eps=0.1)

    def read_in_two_phases(query, key_weight, *sources):
        out, lse = reference.attend_blocks(sources[:-1], query[None], key_weight[None], 0.1)
        merge = reference.merge_partial
        return merge(sources[-1], query, out[0], lse[0], key_weight, None, 0.1)

    for function in (read, read_in_two_phases):
        assert torch.autograd.gradgradcheck(function, (query, key_weight, *sources))


@pytest.mark.parametrize("num_blocks", [1, 2, 9])
@pytest.mark.parametrize("normed", [False, True])
def test_two_phases_equal_one_pass(num_blocks, normed):
    sources, _, _ = draw(num_blocks + 1, 24, dtype=torch.float64)
    queries = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    key_weights = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    norm_weight = torch.randn(24, dtype=torch.float64, requires_grad=True) if normed else None
    *blocks, partial = sources
    out, lse = reference.attend_blocks(blocks, queries, key_weights, 1e-6)
    for s in range(5):
        merged = reference.merge_partial(
            partial, queries[s], out[s], lse[s], key_weights[s], norm_weight, 1e-6
        )
        direct = depth_attention(sources, queries[s], key_weights[s], norm_weight=norm_weight)
        torch.testing.assert_close(merged, direct, atol=1e-12, rtol=1e-12)
        inputs = [*sources, queries, key_weights]
        seed = torch.randn_like(direct)
        two = torch.autograd.grad(merged, inputs, seed, retain_graph=True)
        for value, other in zip(two, torch.autograd.grad(direct, inputs, seed)):
            torch.testing.assert_close(value, other, atol=1e-11, rtol=1e-11)


def test_weights_are_a_distribution_and_reproduce_the_read():
    sources, query, key_weight = draw(5, 16)
    read, weights = depth_attention(sources, query, key_weight, return_weights=True, heads=4)
    assert weights.shape == (5, 2, 3, 4)
    torch.testing.assert_close(weights.sum(0), torch.ones(2, 3, 4))
    grouped = torch.stack(sources).unflatten(-1, (4, 4))
    torch.testing.assert_close((weights.unsqueeze(-1) * grouped).sum(0).flatten(-2), read)


def test_zero_query_is_the_mean_and_extremes_stay_finite():
    sources, _, _ = draw(6, 16)
    torch.testing.assert_close(
        depth_attention(sources, torch.zeros(16)), torch.stack(sources).mean(0)
    )
    hostile = [torch.zeros(2, 16), torch.full((2, 16), 1e4), torch.randn(2, 16) * 1e-4]
    for value in (80.0, -80.0):
        read = depth_attention(hostile, torch.full((16,), value))
        assert read.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_one_rounding_away_from_fp32(dtype):
    sources, query, key_weight = draw(9, 64, dtype=torch.float32)
    low = [source.detach().to(dtype) for source in sources]
    exact = depth_attention([s.float() for s in low], query, key_weight)
    assert torch.equal(depth_attention(low, query, key_weight), exact.to(dtype))
    out, lse = reference.attend_blocks(low, query.unsqueeze(0), key_weight.unsqueeze(0), 1e-6)
    assert torch.equal(out[0], exact.to(dtype))
    assert lse.dtype == torch.float32


def test_autocast_rounds_nothing():
    """Weights over depth are read off small differences: under autocast every product stays in fp32."""
    sources, query, key_weight = draw(5, 64)
    *blocks, last = sources

    def results():
        first_phase = reference.attend_blocks
        out, lse = first_phase(blocks, query.unsqueeze(0), key_weight.unsqueeze(0), 1e-6)
        scored = [
            reference.score(source, (query * key_weight).unsqueeze(0), 1e-6)[2][0]
            for source in blocks
        ]
        mixed, lses, _ = reference.mix(blocks, scored, key_weight)
        weights = (key_weight, key_weight)
        merged = reference.merge_partial(last, query, out[0], lse[0], *weights, 1e-6)
        read, weights = depth_attention(sources, query, key_weight, return_weights=True)
        heads = depth_attention(sources, query, key_weight, heads=4)
        return [out, lse, *scored, *mixed, *lses, merged, read, weights, heads]

    plain = results()
    with torch.autocast("cpu", torch.bfloat16):
        under = results()
    for one, other in zip(plain, under, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_rows_as_wide_as_a_program_holds_and_no_wider(monkeypatch):
    monkeypatch.setattr(routing, "INSTALLED", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert routing.obstacle(torch.empty(1, 32768)) is None
    assert routing.obstacle(torch.empty(1, 32769)) == "width 32769 is not between 1 and 32768"


def test_kernels_take_no_part_in_transforms_of_torch_func(monkeypatch):
    monkeypatch.setattr(routing, "INSTALLED", True)
    with pytest.raises(
        BackendError, match=r"a transform of torch\.func is active, such as grad or vmap"
    ):
        torch.vmap(lambda x: depth_attention([x, x], x, backend="triton"))(torch.ones(2, 4))


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match="at least one source"):
        depth_attention([], torch.zeros(4))
    with pytest.raises(ValueError, match=r"source 1 is \(2, 5\)"):
        depth_attention([torch.zeros(2, 4), torch.zeros(2, 5)], torch.zeros(4))
    with pytest.raises(ValueError, match="width 4"):
        depth_attention([torch.zeros(2, 4)], torch.zeros(5))
    with pytest.raises(ValueError, match="heads must be at least 1"):
        depth_attention([torch.zeros(2, 4)], torch.zeros(4), heads=0)
    for name in ("key_weight", "norm_weight"):
        with pytest.raises(ValueError, match=rf"{name} must be \(4,\), got \(1,\)"):
            depth_attention([torch.zeros(2, 4)], torch.zeros(4), **{name: torch.ones(1)})
    with pytest.raises(ValueError, match="3 heads do not divide 4"):
        depth_attention([torch.zeros(2, 4)], torch.zeros(4), heads=3)


@pytest.mark.parametrize("sums", [1, 3])
def test_sums_source_by_source_are_those_of_products(sums, monkeypatch):
    """The faster way depends on the width; both paths are taken whatever that is here."""
    torch.manual_seed(0)
    sources = [torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    scores = torch.randn(2, 5, 4, sums, dtype=torch.float64, requires_grad=True)
    expected = torch.einsum("btns,nbtd->sbtd", scores.softmax(-2), torch.stack(sources))
    desired = torch.autograd.grad(expected.square().sum(), (scores, *sources))
    for small in (0, 1024):
        monkeypatch.setattr(reference, "SMALL", small)
        outs, _, _ = reference.mix(sources, (scores[..., :1, :], scores[..., 1:, :]))
        torch.testing.assert_close(torch.stack(outs), expected)
        actual = torch.autograd.grad(torch.stack(outs).square().sum(), (scores, *sources))
        torch.testing.assert_close(actual, desired)
