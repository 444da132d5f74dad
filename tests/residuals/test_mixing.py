"""The depth-mixing matrix of a model, its measures, and the structure each residual is known to have."""

import math

import pytest
import torch
from kernel_cases import leaves_of
from tinymodels import inputs_of, model_of, scattered, tokens_of
from torch.testing import assert_close

from headwater.analyze import measures, mixing_matrix
from headwater.residuals import mixing, names, record
from headwater.residuals.base import hold_weights
from headwater.residuals.record import replay

SUBLAYERS = 8


def matrix_of(spec, scale=0.5):
    """The matrix of a residual with random parameters on random sources, (L + 1, L + 1, 2, 3)."""
    residual = scattered(spec, scale=scale)
    return mixing(residual, torch.randn(SUBLAYERS + 1, 2, 3, 16))


@pytest.mark.parametrize(
    "spec", [*names(), "ddl:width=2,compress=token", "attnres-full:heads=4", "muddformer:norm=true"]
)
def test_with_its_weights_held_a_residual_is_linear_in_its_sources(spec):
    """Euler: the Jacobian applied to the sources is the read itself, also where no scalar matrix can
    say so."""
    residual = scattered(spec, sublayers=6, dtype=torch.float64)
    sources = leaves_of(torch.randn(7, 2, 3, 16, dtype=torch.float64))
    with hold_weights():
        reads_held = replay(residual, sources)
    close = {"atol": 1e-9, "rtol": 1e-9}
    options = {"retain_graph": True, "materialize_grads": True}
    for read, free in zip(reads_held, replay(residual, sources)):
        for h, f in zip(inputs_of(read), inputs_of(free)):
            assert_close(h, f, **close)
            along = torch.randn_like(h)
            gradients = torch.autograd.grad(h, sources, along, **options)
            total = sum((g * v).sum() for g, v in zip(gradients, sources))
            assert_close(total, (h * along).sum(), **close)


WEIGHTED_SUMS = [
    "muddformer",
    "muddformer:norm=true",
    "denseformer",
    "elc-bert",
    "vertical-attention",
    "attnres-block:block=2",
]


@pytest.mark.parametrize("spec", WEIGHTED_SUMS)
def test_weights_times_what_the_state_holds_are_the_read(spec):
    residual = scattered(spec, sublayers=6, dtype=torch.float64)
    x, *outputs = torch.randn(7, 2, 3, 16, dtype=torch.float64)

    def mixed(state, i):
        weights = residual.weights(state, i)
        return sum(w * s for w, s in zip(weights, state))

    state = residual.begin(x)
    for i, y in enumerate(outputs):
        expected = mixed(state, i)
        read, state = residual.read(state, i)
        assert_close(inputs_of(read)[0], expected)
        state = residual.write(state, i, y)
    assert_close(residual.end(state), mixed(state, 6))


def test_groups_of_the_matrix_are_the_heads_of_a_read():
    """Two heads of eight channels: equal counts would hide that channels were taken in turn."""
    residual = scattered("attnres-full:heads=2", sublayers=3, scale=1.0)
    sources = torch.randn(4, 2, 5, 16)
    with torch.no_grad(), record(residual) as trace:
        replay(residual, sources)
    matrix = mixing(residual, sources, groups=2)
    one, other = matrix[-1].unbind(-1)
    assert (one - other).abs().max() > 0.1
    for row, weights in zip(matrix, trace.weights, strict=True):
        assert_close(row[: len(weights)], weights)
    shares = mixing(residual, sources, groups=8).unflatten(-1, (2, 4))
    assert_close(shares.mean(-1), matrix)
    assert_close(shares[..., 0, 0], matrix[..., 0])


def test_what_is_no_residual_or_not_one_pass_is_refused():
    model, tokens = model_of("attnres-full"), tokens_of(1, 4)
    with pytest.raises(TypeError, match=r"takes a residual, .*; got a Decoder"):
        record(model).__enter__()
    for passes in (0, 2):
        with torch.no_grad(), record(model.residual) as trace:
            for _ in range(passes):
                model(tokens)
        with pytest.raises(ValueError, match=rf"mixes 9 sources.*; got {9 * passes}\."):
            mixing(model.residual, trace.sources)


def test_matrix_of_a_model_per_token_and_averaged():
    model, tokens = model_of("attnres-full", scatter=True), tokens_of()
    result = mixing_matrix(model, tokens)
    assert result.tokens.shape == (9, 9, 2, 12)
    assert result.exact
    assert result.sublayers == ("attention", "mlp") * 4
    assert_close(result.average, result.tokens.mean((2, 3)))
    sums = result.average.sum(1)
    assert_close(sums, torch.ones(9), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("highway", "scalar"),
        ("layerscale", "channel"),
        ("deepcrossattention", "channel"),
        ("ddl", "operator"),
    ],
)
def test_a_summary_says_that_it_is_one(spec, kind):
    result = mixing_matrix(model_of(spec, scatter=True), tokens_of())
    assert (result.kind, result.exact) == (kind, kind == "scalar")
    assert result.note.startswith("exact" if kind == "scalar" else "a summary")


@pytest.mark.parametrize("spec", ["ddl", "laurel", "depth-window"])
def test_where_sources_pass_through_matrices_it_is_how_much_of_them_is_left(spec):
    """Against the Jacobian of one read, for all channels and for each half of them; a source of zeros
    has no direction, and no weight."""
    residual, (read, source) = scattered(spec, 8, 4), (3, 1)
    sources = list(torch.randn(5, 1, 1, 8))
    sources[2].zero_()
    assert residual.mixes == "operator"

    def read_of(v):
        changed = list(sources)
        changed[source] = v
        return replay(residual, changed)[read]

    with hold_weights():
        jacobian = torch.autograd.functional.jacobian(read_of, sources[source])
    v = sources[source].flatten()
    share = jacobian.view(8, 8) @ v
    assert (share / v).std() > 1e-2
    for parts in (1, 2):
        matrix = mixing(residual, sources, groups=parts).view(5, 5, parts)
        along = (share * v).view(parts, -1).sum(-1)
        length = (v * v).view(parts, -1).sum(-1)
        assert_close(matrix[read, source], along / length, atol=1e-5, rtol=1e-5)
        assert (matrix[:, 2] == 0).all()


def test_three_inputs_have_three_matrices():
    model, tokens = model_of("muddformer", scatter=True), tokens_of()
    query = mixing_matrix(model, tokens).average
    for name in ("key", "value"):
        average = mixing_matrix(model, tokens, name).average
        assert (query - average).abs().max() > 1e-2
        assert_close(query[1::2], average[1::2])  # an MLP has one input


def test_the_plain_residual_is_all_ones_and_1_semiseparable():
    matrix = matrix_of("standard")
    expected = torch.ones(9, 9).tril()
    assert_close(matrix, expected[:, :, None, None].expand_as(matrix))
    assert (measures.semiseparable_rank(matrix) == 1).all()
    assert (measures.numerical_rank(matrix) == 9).all()
    sums = measures.row_sums(matrix)[:, 0, 0]
    assert_close(sums, torch.arange(1.0, 10.0))


@pytest.mark.parametrize("spec", ["highway", "attnres-full"])
def test_rows_sum_to_one(spec):
    sums = measures.row_sums(matrix_of(spec))
    assert_close(sums, torch.ones_like(sums), atol=1e-5, rtol=0)


def test_highway_is_stick_breaking():
    matrix = matrix_of("highway").double()
    assert (measures.semiseparable_rank(matrix) == 1).all()
    for row in range(2, 9):  # every older source is carried by the same factor
        carried = matrix[row, :row] / matrix[row - 1, :row]
        first = carried[:1].expand_as(carried)
        assert_close(carried, first, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", ["rezero", "laurel:form=weighted"])
def test_one_stream_is_1_semiseparable(spec):
    assert (measures.semiseparable_rank(matrix_of(spec)) == 1).all()


@pytest.mark.parametrize("name", ["hyper-connections", "mhc", "mhc-lite"])
@pytest.mark.parametrize("streams", [2, 3])
def test_n_streams_are_n_semiseparable(name, streams):
    matrix = matrix_of(f"{name}:streams={streams}", scale=2.0)
    ranks = measures.semiseparable_rank(matrix, tolerance=1e-5)
    assert (ranks <= streams).all()
    assert (ranks == streams).any()


def test_denseformer_is_the_resolvent_of_its_weights():
    """M = A (I - S A)^-1 on layer increments: A the sums' weights, S the shift from a layer's input to
    its output."""
    residual = scattered("denseformer")
    weights = torch.eye(5)
    for m in range(1, 5):
        weights[m, : m + 1] = residual.sums[f"{2 * m}"].detach()
    shift = torch.eye(5).roll(1, 0).tril(-1)
    expected = weights @ torch.linalg.inv(torch.eye(5) - shift @ weights)
    matrix = mixing(residual, torch.randn(SUBLAYERS + 1, 2, 3, 16))
    of_layers, of_attention = matrix[::2, ::2, 0, 0], matrix[::2, 1::2, 0, 0]
    assert_close(of_layers, expected, atol=1e-4, rtol=1e-4)
    # Both outputs of a layer have one weight.
    assert_close(of_attention, expected[:, 1:], atol=1e-4, rtol=1e-4)


def test_full_attention_residuals_are_dense():
    matrix = matrix_of("attnres-full")
    below = torch.ones(9, 9).tril().bool()
    assert (matrix[below] > 0).all()
    assert (measures.semiseparable_rank(matrix, 1e-6) >= 4).all()


@pytest.mark.parametrize("block", [2, 4])
def test_block_attention_residuals_have_rank_between_n_and_n_plus_s(block):
    """Later reads need one tensor per block of earlier sources. (M itself is triangular with a full diagonal.)"""
    blocks = SUBLAYERS // block
    ranks = measures.semiseparable_rank(matrix_of(f"attnres-block:block={block}"), 1e-5)
    assert (ranks >= blocks).all()
    # At most N + S, and in fact one tensor a block and the embedding
    assert (ranks <= blocks + 1).all()


def test_delta_attention_residual_is_ones_plus_a_softmax():
    matrix = matrix_of("delta-attnres")
    reads = measures.row_sums(matrix)[:-1]
    expected = torch.arange(2.0, 10.0)[:, None, None].expand_as(reads)
    assert_close(reads, expected, atol=1e-5, rtol=1e-5)


def test_measures_of_a_known_row():
    matrix = torch.tensor([[1.0, 0, 0], [0.5, -0.5, 0], [0.2, 0.2, 0.6]])
    assert measures.row_sums(matrix).tolist() == [1.0, 0.0, 1.0]
    entropy = measures.entropy(matrix)
    assert entropy.tolist()[:2] == pytest.approx([0.0, math.log(2)])
    assert_close(measures.effective_sources(matrix), entropy.exp())
    assert measures.effective_depth(matrix).tolist() == pytest.approx([0.0, 0.5, 0.6])
    row = torch.arange(1.0, 4)
    assert measures.numerical_rank(torch.outer(row, row)) == 1


def test_measures_keep_the_token_axes():
    matrix = matrix_of("attnres-full")
    for name in ("row_sums", "entropy", "effective_sources", "effective_depth"):
        measure = getattr(measures, name)
        values = measure(matrix)
        assert values.shape == (9, 2, 3)
        assert_close(values[:, 1, 2], measure(matrix[..., 1, 2]))
    ranks = measures.numerical_rank(matrix), measures.semiseparable_rank(matrix)
    assert [rank.shape for rank in ranks] == [(2, 3)] * 2
