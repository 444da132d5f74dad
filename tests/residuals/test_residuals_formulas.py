"""Each residual, with its options crossed, against its formula written a second time in the plainest
way, on fixed sources in fp64; and where it starts, which a formula does not say."""

from math import log

import pytest
import torch
from covering import DIM, SUBLAYERS, covering
from tinymodels import advance
from tinymodels import scattered as scattered_residual
from torch.testing import assert_close

from headwater.residuals import build, entry, names
from headwater.residuals.record import replay
from tests.formulas import FORMULAS, formula_of, unit

SPECS = [spec for name in names() for spec in covering(name)]
# Reads in two phases, whose scores are kept in fp32.
IN_TWO_PHASES = [
    "attnres-block:schedule=two-phase,backend=reference",
    "attnres-full:schedule=two-phase,backend=reference",
    "attnres-full:schedule=two-phase,backend=reference,scale=root,eps=0.1",
    "attnres-block:schedule=two-phase,backend=reference,scale=gain,key_weight=false,eps=0.1",
]
STARTS = [  # spec, parameter, what it begins with
    ("rezero:start=0.5", "gains.3", [0.5]),
    ("layerscale:start=0.25", "gains.3", [0.25] * DIM),
    ("layerscale", "gains.3", [1e-4] * DIM),
    ("highway:start=mean", "gates.2.bias", [-log(3)]),
    ("highway:start=carry", "gates.2.bias", [-2.0]),
    ("highway:gate=channel,start=carry", "gates.2.bias", [-2.0] * DIM),
    ("ddl:beta=0.5", "writes.3.beta_bias", [log(0.25 / 0.75)]),
    ("ddl:width=2,compress=channel", "compressors.2.read", [0.5, 0.5]),
    ("attnres-full:scale=gain", "reads.3.gain", [0.0]),
    ("attnres-full", "reads.3.query", [0.0] * DIM),
    ("attnres-full:weights=static", "reads.3.scalars", [[0.25]] * 4),
    ("attnres-full:weights=static,window=2,heads=2", "reads.5.scalars", [[1 / 3] * 2] * 3),
    ("elc-bert:variant=base", "logits.4", [0.0, 0.0, 1.0]),
    ("elc-bert:variant=zero", "logits.4", [0.0, 0.0, 0.0]),
    ("hyper-connections:streams=3", "connections.4.pre", [0.0, 1.0, 0.0]),
    ("hyper-connections:streams=3", "connections.4.mix_scale", [0.01]),
    # Sublayer 2 of 2 streams prefers stream 0; a choice per layer, i // 2, would prefer stream 1.
    (
        "mhc:streams=2,start=identity",
        "mappings.2.bias",
        [1.0, -1.0, 0.0, 0.0, 0.0, -8.0, -8.0, 0.0],
    ),
    ("mhc:streams=2,start=biased", "mappings.2.bias", [1.0, -1.0, 1.0, -1.0, 0.0, -8.0, -8.0, 0.0]),
    ("mhc:streams=2,start=uniform", "mappings.3.bias", [0.0] * 8),
    ("mhc:streams=2", "mappings.3.scale", [0.01] * 3),
    ("mhc:streams=2,start=normal,final=learned", "mappings.3.scale", [1.0] * 3),
    ("mhc:streams=2,start=normal,final=learned", "mappings.10.bias", [0.0] * 2),
    # The weight of a stream that all are given at the start is 1 / n, the logarithm of its odds -log(n - 1).
    (
        "identity-hc:streams=3,start=normal,magnitude=3.0",
        "mappings.2.bias",
        [-log(2)] * 3 + [0.0] * 3,
    ),
    ("identity-hc:streams=3,start=normal", "mappings.10.bias", [-log(2)] * 3),
    (
        "identity-hc:streams=2,magnitude=3.0,eps=0.25",
        "mappings.1.bias",
        [-1.0, 1.0, log(1 / 3), log(1 / 3)],
    ),
    ("mhc-lite:streams=2,start=identity", "mappings.2.bias", [1.0, -1.0, 0.0, 0.0, 0.0, -8.0]),
    ("mhc-lite:streams=2,start=biased", "mappings.2.bias", [1.0, -1.0, 1.0, -1.0, 0.0, -8.0]),
    ("mhc-lite:streams=2,start=uniform", "mappings.3.bias", [0.0] * 6),
]


def scattered(spec, sublayers=SUBLAYERS, kinds=None):
    """A residual in fp64 with random parameters, and random sources."""
    options = {"scale": 0.3, "dtype": torch.float64, "kinds": kinds}
    residual = scattered_residual(spec, DIM, sublayers, **options)
    return residual, list(torch.randn(sublayers + 1, 2, 5, DIM, dtype=torch.float64))


def differences(residual, sources, kinds=None):
    """Distance of each read from the formula's, relative to the read."""
    expected = []

    def run(i, read):
        assert i == len(expected)
        expected.append(read)
        return sources[i + 1]

    expected.append(formula_of(residual, kinds)(sources[0], run))
    distances = []
    for read, desired in zip(replay(residual, sources), expected, strict=True):
        read, desired = stacked(read), stacked(desired)
        assert read.shape == desired.shape
        distance = (read - desired).abs().max()
        distances.append(distance / desired.abs().max())
    return torch.stack(distances)


def stacked(read):
    return torch.stack(read) if isinstance(read, tuple) else read


@pytest.mark.parametrize("spec", SPECS)
def test_reads_are_the_formula_s(spec):
    assert differences(*scattered(spec)).max() < 1e-12


BY_LAYER = [name for name in names() if entry(name).takes_kinds]


@pytest.mark.parametrize("spec", [spec for name in BY_LAYER for spec in covering(name)])
def test_reads_are_the_formula_s_where_layers_begin_with_short_attention(spec):
    """Its output joins the layer's input, and the query, key and value inputs of the attention."""
    kinds = ("shortswa", "attention", "mlp") * 3
    assert differences(*scattered(spec, len(kinds), kinds), kinds).max() < 1e-12


# attnres-routed counts sublayers: each attention has three reads, a short one has one.
@pytest.mark.parametrize("name", sorted({*BY_LAYER} - {"attnres-routed"}))
def test_short_attention_behind_the_attention_is_a_sublayer_like_any_other(name):
    """Only what stands before a layer's attention belongs to its input; and a layer may have no
    attention at all."""
    behind = replay(*scattered(name, 6, ("attention", "shortswa", "mlp") * 2))
    beside = replay(*scattered(name, 6, ("attention", "attention", "mlp") * 2))
    for one, other in zip(behind, beside):
        assert torch.equal(stacked(one), stacked(other))
    alone = replay(*scattered(name, 6, ("shortswa", "mlp") * 3))
    assert all(read.isfinite().all() for read in alone)


@pytest.mark.parametrize("spec", ["muddformer", "deepcrossattention", "deepcrossattention:last=1"])
def test_inputs_that_are_routed_apart_reach_the_attention_behind_short_attention(spec):
    kinds = ("shortswa", "attention", "mlp") * 2
    reads = replay(*scattered(spec, len(kinds), kinds))
    # The first layer has the embedding alone to read.
    assert [i for i, read in enumerate(reads) if isinstance(read, tuple)] == [4]


@pytest.mark.parametrize("spec", IN_TWO_PHASES)
def test_reads_in_two_phases_are_the_formula_s(spec):
    assert differences(*scattered(spec)).max() < 1e-5


def test_every_residual_has_a_formula():
    assert set(FORMULAS) == set(names())


@pytest.mark.parametrize(("spec", "parameter", "expected"), STARTS)
def test_it_starts_where_its_option_says(spec, parameter, expected):
    start = build(spec, DIM, SUBLAYERS).get_parameter(parameter).data
    assert_close(start, torch.tensor(expected))


@pytest.mark.parametrize("name", ["mhc", "mhc-lite"])
def test_uniform_mappings_start_at_random(name):
    weight = build(f"{name}:streams=2,start=uniform", DIM, 2).mappings["0"].weight
    outputs, inputs = weight.shape
    bound = (6 / (inputs + outputs)) ** 0.5
    assert 0.8 * bound < weight.abs().max() <= bound
    assert build(f"{name}:streams=2", DIM, 2).mappings["0"].weight.abs().max() == 0


@pytest.mark.parametrize(
    ("spec", "parameter", "deviation"),
    [
        ("ddl", "writes.0.beta_weight", 0.5 / 16),
        ("ddl", "writes.0.value_weight", 0.5 / 16),
        ("depth-window", "reads.1.query", 1 / 16),
        ("depth-window", "reads.1.key", 1 / 16),
        ("depth-window", "reads.1.value", 1 / 16),
        ("muddformer", "dense.2.down", 1 / 16),
        ("attnres-full:start=0.5", "reads.1.query", 0.5),
        ("attnres-full:scale=gain", "reads.1.query", 1.0),
        ("mhc:start=normal,final=learned", "mappings.4.weight", 0.02),
        ("identity-hc:start=normal", "mappings.4.weight", 0.02),
        ("gated-hc", "gates.1.up", 0.02),
        ("gated-hc:start=normal", "gates.1.down", 0.02),
        ("gated-hc:start=normal", "gates.1.inject", 0.02),
    ],
)
def test_random_starts_have_their_scale(spec, parameter, deviation):
    torch.manual_seed(0)
    start = build(spec, 256, 4).get_parameter(parameter)
    assert start.std().item() == pytest.approx(deviation, rel=0.15)


@pytest.mark.parametrize("bias", [8.0, 12.0, 16.0])
def test_a_highway_s_gate_that_is_nearly_one_lets_through_as_much_as_it_says(bias):
    """Beside an output ten thousand times smaller than the stream, 1 - g decides what is left.

    And g learns by it.
    """
    torch.manual_seed(0)
    x, y, seed = torch.randn(3, 4, DIM)
    y = 1e-4 * y
    results = []
    for dtype in (torch.float64, torch.float32):
        residual = build("highway", DIM, 1).to(dtype)
        gate = residual.gates["0"].bias
        gate.data.fill_(bias)
        leaves = [source.to(dtype).requires_grad_() for source in (x, y)]
        state = advance(residual, residual.begin(leaves[0]), lambda i, _, y=leaves[1]: y)
        read = residual.end(state)
        gradients = torch.autograd.grad(read, (*leaves, gate), seed.to(dtype))
        results.append([read, *gradients])
    for truth, actual in zip(*results, strict=True):
        error = (actual.double() - truth).abs().max()
        assert error <= 4e-6 * truth.abs().max()


def test_laurel_starts_with_the_paper_s_down_matrix():
    down = build("laurel:rank=3", DIM, 2).low_rank["0"].down
    expected = torch.eye(3).repeat(1, DIM // 3) / (3 * DIM) ** 0.5
    assert_close(down, expected)


def test_denseformer_keeps_only_what_a_later_sum_reads():
    residual, (x, *outputs) = scattered("denseformer:dilation=2,period=2", sublayers=8)
    state = advance(residual, residual.begin(x), lambda i, _: outputs[i])
    assert len(state) == 3  # layer outputs 0, 2 and 4, not 1 and 3


def test_the_cross_attention_query_can_leave_zero():
    residual = build("deepcrossattention", DIM, SUBLAYERS)
    reads = replay(residual, list(torch.randn(SUBLAYERS + 1, 2, 3, DIM)))
    reads[-1].square().sum().backward()
    assert residual.grns[str(SUBLAYERS)].query.grad.abs().min() > 0


def test_permutation_mixtures_are_doubly_stochastic_without_iterations():
    residual, (x, *_) = scattered("mhc-lite:streams=4")
    res = residual.coefficients(residual.begin(x)[0], 0)[2]
    ones = torch.ones(2, 5, 4, dtype=torch.float64)
    for axis in (-1, -2):
        assert_close(res.sum(axis), ones, atol=1e-14, rtol=0)


def test_delta_learning_contracts_the_error_along_its_direction():
    residual, (x, y, *_) = scattered("ddl")
    _, state = residual.read(residual.begin(x), 0)
    (after,) = residual.write(state, 0, y)
    write = residual.writes["0"]
    k = y / (y.square().sum(-1, keepdim=True) + 1e-10).sqrt()
    beta = 2 * torch.sigmoid(unit(x) @ write.beta_weight[0] + write.beta_bias)
    value = 4 * torch.sigmoid(x @ write.value_weight[0] + write.value_bias)
    error = (k * x).sum(-1) - value
    error_after = (k * after[..., 0, :]).sum(-1) - value
    assert_close(error_after, (1 - beta) * error, atol=1e-8, rtol=1e-8)
