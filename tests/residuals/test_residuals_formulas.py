"""Each residual, with each of its options, against its formula written a second time in the plainest way, on fixed
sources in fp64; and where it starts, which a formula does not say."""

import inspect
from math import log
from typing import Literal, get_args, get_origin

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headwater.residuals import build, entry, names, parse
from headwater.residuals.record import replay
from tests.formulas import FORMULAS, formula_of

DIM, SUBLAYERS = 8, 6
OPTIONS = [
    "attnres-block:block=2",
    "attnres-block:block=4",  # the last block is partial
    "attnres-block:block=2,query=projected",  # from the running sum, or from the newest finished block
    "attnres-block:block=2,weights=sigmoid",
    "attnres-block:block=2,weights=static",
    "attnres-block:block=2,key_norm=false",
    "attnres-block:block=2,heads=4",
    "attnres-block:block=2,window=1",
    "attnres-block:block=2,key_dim=3",
    "attnres-block:block=2,eps=0.1",
    "attnres-block:block=2,key_norm=false,query=projected,eps=0.1",  # the query's norm stays
    "attnres-block:block=2,query=projected,weights=sigmoid,heads=2,window=2,key_dim=6,eps=0.01",
    "attnres-block:schedule=one-pass",
    "attnres-block:backend=reference",
    "attnres-full:query=projected",
    "attnres-full:weights=sigmoid",
    "attnres-full:weights=static",
    "attnres-full:weights=static,heads=4",
    "attnres-full:key_norm=false",
    "attnres-full:heads=4",
    "attnres-full:heads=2,weights=sigmoid,key_norm=false",
    "attnres-full:window=1",
    "attnres-full:window=3,weights=static",
    "attnres-full:key_dim=3",
    "attnres-full:key_dim=4,heads=2",
    *(
        f"{name},{options}"
        for name in ("attnres-full:heads=1", "attnres-block:block=2")
        for options in (
            "scale=root",
            "scale=width,query=projected",
            "scale=gain",
            "key_weight=false,start=0.5",
        )
    ),
    "attnres-full:key_dim=4,heads=2,query=projected",
    "attnres-full:eps=0.1",
    "attnres-full:schedule=one-pass",
    "attnres-full:backend=reference",
    "highway:gate=channel",
    "laurel:form=previous,states=2,rank=3",
    "laurel:form=previous",
    "laurel:form=weighted",
    "laurel:form=weighted-low-rank,rank=3",
    "denseformer:dilation=2",
    "denseformer:period=2",
    "denseformer:dilation=2,period=3",
    "denseformer:dilation=3,period=2",
    "denseformer:backend=reference",
    "elc-bert:variant=base",
    "elc-bert:variant=normalized",
    "elc-bert:variant=weighted-output",
    "elc-bert:backend=reference",
    "deepcrossattention:version=v1",
    "deepcrossattention:version=v2",
    "deepcrossattention:last=1",
    "deepcrossattention:version=v1,last=1",
    "deepcrossattention:version=v2,inputs=shared,last=2",
    "hyper-connections:streams=3",
    "hyper-connections:streams=3,form=static",
    "hyper-connections:backend=reference",
    "hyper-attnres:streams=3,block=1",
    "hyper-attnres:form=static,block=4",
    "hyper-attnres:backend=reference",
    "mhc:streams=3",
    "mhc:streams=3,iterations=2",
    "mhc:backend=reference",
    "muddformer:backend=reference",
    "muddformer:norm=true",
    "muddformer:norm=true,backend=reference",
    "mhc-lite:streams=3",
    "mhc-lite:streams=3,backend=reference",
    "deepnorm:eps=0.1",
    "ddl:value=linear",
    "ddl:width=3,compress=channel",
    "ddl:width=3,compress=channel,value=linear,expand=token",
    "ddl:width=2,compress=token",
    "ddl:width=2,compress=token,value=linear,expand=token",
    "depth-window:window=2,width=3",
    "depth-window:maps=reader",
    "depth-window:maps=reader,window=2,width=3",
    "depth-window:maps=shared,window=3",
    "delta-attnres:block=2",
    "delta-attnres:block=4,eps=0.1",
]
IN_TWO_PHASES = [
    "attnres-block:schedule=two-phase,backend=reference",
    "attnres-full:schedule=two-phase,backend=reference",
    "attnres-full:schedule=two-phase,backend=reference,scale=root,eps=0.1",
    "attnres-block:schedule=two-phase,backend=reference,scale=gain,key_weight=false,eps=0.1",
]
ELSEWHERE = {"backend=triton"}  # the kernels' own tests hold them against the reference
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
    ("mhc-lite:streams=2,start=identity", "mappings.2.bias", [1.0, -1.0, 0.0, 0.0, 0.0, -8.0]),
    ("mhc-lite:streams=2,start=biased", "mappings.2.bias", [1.0, -1.0, 1.0, -1.0, 0.0, -8.0]),
    ("mhc-lite:streams=2,start=uniform", "mappings.3.bias", [0.0] * 6),
]
# A saved model names the options that its user gave and those that follow from the network: another default would make
# other models of the rest.
DEFAULTS = {
    "AttentionResidual": "block=None query='static' weights='softmax' key_norm=True heads=1 window=None key_dim=None "
    "key_weight=True scale='one' start=None eps=1e-06 backend='auto' schedule='auto'",
    "DeepCrossAttentionResidual": "version='v3' inputs='separate' last=None",
    "DeepDeltaResidual": "width=1 compress='none' expand='repeat' value='bounded' beta=1.0",
    "DeepNormResidual": "eps=1e-06",
    "DeltaAttentionResidual": "block=1 eps=1e-06",
    "DenseFormerResidual": "dilation=1 period=1 backend='auto'",
    "DepthWindowResidual": "window=None width=None maps='state'",
    "EveryLayerCountsResidual": "variant='zero' backend='auto'",
    "HighwayResidual": "gate='scalar' start='mean'",
    "HyperAttentionResidual": "streams=4 form='dynamic' block=None backend='auto'",
    "HyperConnectionsResidual": "streams=4 form='dynamic' backend='auto'",
    "LaurelResidual": "form='low-rank' rank=None states=3",
    "LayerScaleResidual": "start=0.0001",
    "MHCLiteResidual": "streams=4 start='identity' backend='auto'",
    "MHCResidual": "streams=4 iterations=20 start='identity' backend='auto'",
    "MUDDFormerResidual": "norm=False backend='auto'",
    "ReZeroResidual": "start=0.0",
    "StandardResidual": "",
    "VerticalAttentionResidual": "",
}


def scattered(spec, sublayers=SUBLAYERS, kinds=None):
    """A residual in fp64 with random parameters, and random sources."""
    torch.manual_seed(0)
    residual = build(spec, DIM, sublayers, kinds).double()
    with torch.no_grad():
        for p in residual.parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype))
    return residual, list(torch.randn(sublayers + 1, 2, 5, DIM, dtype=torch.float64))


def unit(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def differences(residual, sources, kinds=None):
    """Distance of each read from the formula's."""
    expected = []

    def run(i, read):
        assert i == len(expected)
        expected.append(read)
        return sources[i + 1]

    expected.append(formula_of(residual, kinds)(sources[0], run))
    reads = replay(residual, sources)
    assert len(reads) == len(expected) == residual.sublayers + 1
    pairs = [
        [torch.stack(x) if isinstance(x, tuple) else x for x in pair]
        for pair in zip(reads, expected)
    ]
    assert all(read.shape == desired.shape for read, desired in pairs)
    return torch.stack(
        [(read - desired).abs().max() / desired.abs().max() for read, desired in pairs]
    )


@pytest.mark.parametrize("spec", [*names(), *OPTIONS])
def test_reads_are_the_formula_s(spec):
    assert differences(*scattered(spec)).max() < 1e-12


BY_LAYER = [spec for spec in (*names(), *OPTIONS) if entry(spec.partition(":")[0]).takes_kinds]


@pytest.mark.parametrize("spec", [spec.replace("period=3", "period=2") for spec in BY_LAYER])
def test_reads_are_the_formula_s_where_layers_begin_with_short_attention(spec):
    """Its output joins the layer's input, the query, key and value inputs of the attention included."""
    kinds = ("shortswa", "attention", "mlp") * 3
    assert differences(*scattered(spec, len(kinds), kinds), kinds).max() < 1e-12


@pytest.mark.parametrize("spec", BY_LAYER)
def test_short_attention_behind_the_attention_is_a_sublayer_like_any_other(spec):
    """Only what stands before a layer's attention belongs to its input; and a layer may have no attention at all."""
    spec = spec.replace("period=3", "period=2").replace("dilation=3", "dilation=2")
    late_kinds = ("attention", "shortswa", "mlp") * 2
    residual, sources = scattered(spec, kinds=late_kinds)
    other, _ = scattered(spec, kinds=("attention", "attention", "mlp") * 2)
    for one, two in zip(replay(residual, sources), replay(other, sources)):
        assert torch.equal(*(torch.stack(x) if isinstance(x, tuple) else x for x in (one, two)))
    residual, sources = scattered(
        spec, kinds=("shortswa", "mlp", "shortswa", "mlp", "shortswa", "mlp")
    )
    assert all(read.isfinite().all() for read in replay(residual, sources))


@pytest.mark.parametrize("spec", ["muddformer", "deepcrossattention", "deepcrossattention:last=1"])
def test_inputs_that_are_routed_apart_reach_the_attention_behind_short_attention(spec):
    kinds = ("shortswa", "attention", "mlp") * 2
    residual, sources = scattered(spec, kinds=kinds)
    reads = replay(residual, sources)
    routed = [
        kind for kind, read in zip((*kinds, "head"), reads, strict=True) if isinstance(read, tuple)
    ]
    assert routed == ["attention"]  # of the second layer; the first has the embedding alone to read


@pytest.mark.parametrize("spec", IN_TWO_PHASES)
def test_reads_in_two_phases_are_the_formula_s(spec):
    """Scores are kept in fp32."""
    assert differences(*scattered(spec)).max() < 1e-5


@pytest.mark.parametrize("maps", ["state", "reader", "shared"])
@pytest.mark.parametrize("window", [2, 6])
def test_operations_of_a_depth_window_are_those_of_its_formula(maps, window):
    """Its projections, as PyTorch counts them in the formula's products; then scores and sums, two each a channel."""
    residual, sources = scattered(f"depth-window:window={window},width=3,maps={maps}")
    with FlopCounterMode(display=False) as counter:
        formula_of(residual)(sources[0], lambda i, read: sources[i + 1])
    tokens, reads = 2 * 5, sum(min(i + 1, window) for i in range(SUBLAYERS))
    outputs = 2 * reads - 1  # keys and values in the formula, which makes them for each read again
    twice = 0 if maps == "reader" else 2 * 3 * DIM * (outputs - 2 * SUBLAYERS)
    rest = 4 * 3 * reads + 2 * DIM * SUBLAYERS
    assert residual.flops_per_token() == counter.get_total_flops() // tokens - twice + rest


def test_every_residual_has_a_formula():
    assert set(FORMULAS) == set(names())


@pytest.mark.parametrize("name", names())
def test_every_option_has_an_oracle(name):
    """Each value of a choice, and of what is a number one that is not the default, in a test of this file."""
    specs = [*OPTIONS, *IN_TWO_PHASES, *(spec for spec, _, _ in STARTS)]
    arguments = [parse(spec)[1] for spec in specs if spec.partition(":")[0] == name]
    keywords = inspect.signature(entry(name).build).parameters
    for option, kind in entry(name).options.items():
        default = keywords[option].default
        tried = [default, *(options[option] for options in arguments if option in options)]
        values = (
            get_args(kind) if get_origin(kind) is Literal else (True, False) if kind is bool else ()
        )
        missing = [
            value for value in values if value not in tried and f"{option}={value}" not in ELSEWHERE
        ]
        assert not missing, option
        assert values or set(tried) != {default}, option


@pytest.mark.parametrize(("spec", "parameter", "expected"), STARTS)
def test_it_starts_where_its_option_says(spec, parameter, expected):
    torch.testing.assert_close(
        build(spec, DIM, SUBLAYERS).get_parameter(parameter).data, torch.tensor(expected)
    )


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
    ],
)
def test_random_starts_have_their_scale(spec, parameter, deviation):
    torch.manual_seed(0)
    assert build(spec, 256, 4).get_parameter(parameter).std().item() == pytest.approx(
        deviation, rel=0.15
    )


@pytest.mark.parametrize("name", names())
def test_defaults_stay_what_saved_models_mean_by_them(name):
    cls = entry(name).build
    keywords = [
        p
        for p in inspect.signature(cls).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name != "kinds"
    ]
    assert " ".join(f"{p.name}={p.default!r}" for p in keywords) == DEFAULTS[cls.__name__]


@pytest.mark.parametrize("bias", [8.0, 12.0, 16.0])
def test_a_highway_s_gate_that_is_nearly_one_lets_through_as_much_as_it_says(bias):
    """Beside an output ten thousand times smaller than the stream, 1 - g decides what is left; and g learns by it."""
    torch.manual_seed(0)
    sources, seed, results = (
        (torch.randn(4, DIM), 1e-4 * torch.randn(4, DIM)),
        torch.randn(4, DIM),
        [],
    )
    for dtype in (torch.float64, torch.float32):
        residual = build("highway", DIM, 1).to(dtype)
        residual.gates["0"].bias.data.fill_(bias)
        leaves = [source.to(dtype).requires_grad_() for source in sources]
        read = residual.end(
            residual.write(residual.read(residual.begin(leaves[0]), 0)[1], 0, leaves[1])
        )
        results.append(
            [read, *torch.autograd.grad(read, (*leaves, residual.gates["0"].bias), seed.to(dtype))]
        )
    for truth, actual in zip(*results, strict=True):
        torch.testing.assert_close(
            actual.double() / truth.abs().max(), truth / truth.abs().max(), rtol=0, atol=4e-6
        )


def test_laurel_starts_with_the_paper_s_down_matrix():
    down = build("laurel:rank=3", DIM, 2).low_rank["0"].down
    expected = (
        torch.tensor([[float(c % 3 == r) for c in range(DIM)] for r in range(3)]) / (3 * DIM) ** 0.5
    )
    torch.testing.assert_close(down, expected)


def test_denseformer_keeps_only_what_a_later_sum_reads():
    residual, (x, *outputs) = scattered("denseformer:dilation=2,period=2", sublayers=8)
    state = residual.begin(x)
    for i, y in enumerate(outputs):
        _, state = residual.read(state, i)
        state = residual.write(state, i, y)
    assert len(state) == 3  # layer outputs 0, 2 and 4, not 1 and 3


def test_the_cross_attention_query_can_leave_zero():
    residual = build("deepcrossattention", DIM, SUBLAYERS)
    reads = replay(residual, list(torch.randn(SUBLAYERS + 1, 2, 3, DIM)))
    reads[-1].square().sum().backward()
    gradient = residual.grns[str(SUBLAYERS)].query.grad
    assert gradient is not None
    assert gradient.abs().min() > 0


def test_permutation_mixtures_are_doubly_stochastic_without_iterations():
    residual, (x, *_) = scattered("mhc-lite:streams=4")
    res = residual.coefficients(residual.begin(x)[0], 0)[2]
    for axis in (-1, -2):
        torch.testing.assert_close(
            res.sum(axis), torch.ones(2, 5, 4, dtype=torch.float64), atol=1e-14, rtol=0
        )


def test_delta_learning_contracts_the_error_along_its_direction():
    residual, (x, y, *_) = scattered("ddl")
    _, state = residual.read(residual.begin(x), 0)
    (after,) = residual.write(state, 0, y)
    write = residual.writes["0"]
    k = y / (y.square().sum(-1, keepdim=True) + 1e-10).sqrt()
    beta = 2 * torch.sigmoid(unit(x) @ write.beta_weight[0] + write.beta_bias)
    value = 4 * torch.sigmoid(x @ write.value_weight[0] + write.value_bias)
    before_error, after_error = (k * x).sum(-1) - value, (k * after[..., 0, :]).sum(-1) - value
    torch.testing.assert_close(after_error, (1 - beta) * before_error, atol=1e-8, rtol=1e-8)
