"""The options of the residual family: the contract holds for each, and a wrong one says what is allowed."""

import pytest
import torch
from test_contract import SPECS, gradients_of, model_of, tokens_of

from headwater.analyze.table import start_class
from headwater.models.pattern import FEED_FORWARDS, MIXERS
from headwater.residuals import StandardResidual, build, names, options_of, registry
from headwater.residuals.layerwise import KINDS

LOOK_BACK = [
    "ddl:width=2,compress=token",
    "ddl:width=3,compress=channel,expand=token",
    "ddl:width=2,compress=token,expand=token",
]


@pytest.mark.parametrize("spec", SPECS)
def test_the_measured_start_is_the_stated_one(spec):
    assert start_class(spec) == build(spec, 16, 8).at_start


@pytest.mark.parametrize("spec", SPECS)
def test_short_attention_leaves_gradients_their_size(spec):
    """Its output starts at zero: a sublayer that reads nothing else has a norm of zeros, whose gradient explodes."""

    def largest(**settings):
        _, gradients = gradients_of(model_of(spec, **settings), tokens_of())
        return max(gradient.norm() for gradient in gradients.values() if gradient is not None)

    assert largest(shortswa=4) < 3 * largest()


@torch.no_grad()
@pytest.mark.parametrize("spec", LOOK_BACK)
@pytest.mark.parametrize("value_residual", [False, True])
def test_a_cache_carries_what_token_convolutions_look_back_at(spec, value_residual):
    """Chunk by chunk, a first one shorter than the convolution included."""
    model, tokens = (
        model_of(spec, scatter=True, value_residual=value_residual),
        tokens_of(length=20),
    )
    cache = model.new_cache(len(tokens))
    pieces = [
        model(tokens[:, a:b], cache) for a, b in [(0, 2), (2, 3), (3, 11), (11, 12), (12, 20)]
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), atol=1e-4, rtol=1e-4)
    assert all(tensor.shape[1] == 3 for tensor in cache.past)
    lost = model.new_cache(len(tokens))
    model(tokens[:, :10], lost)
    lost.past = ()
    assert (model(tokens[:, 10:], lost) - model(tokens)[:, 10:]).abs().max() > 1e-2


def test_token_convolutions_do_not_look_ahead():
    model = model_of("ddl:width=2,compress=token,expand=token", scatter=True)
    tokens = tokens_of()
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 48
    assert torch.equal(model(tokens)[:, :7], model(changed)[:, :7])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("highway:gate=vector", "gate must be one of scalar, channel, got 'vector'"),
        ("highway:widht=1", "no option 'widht'. Valid options: gate, start"),
        ("attnres-block:blocks=2", "no option 'blocks'. Did you mean 'block'?"),
        ("laurel:rank=0", "rank must lie between 1 and the width 16, got 0"),
        ("laurel:form=previous,states=9", "states must lie between 2 and the 8 sublayers"),
        ("denseformer:dilation=0", "dilation counts layers"),
        ("denseformer:period=5", "period counts layers"),
        ("deepcrossattention:last=0", "last counts layer outputs"),
        ("hyper-connections:streams=0", "streams must be at least 1"),
        ("mhc:streams=1", "streams must be at least 2"),
        ("mhc:iterations=0", "iterations must be at least 1"),
        ("mhc-lite:streams=6", "streams must lie between 2 and 5"),
        ("ddl:width=0", "width must be at least 1"),
        ("ddl:width=4", "needs compress=channel or compress=token"),
        ("ddl:expand=token", "it needs width of at least 2"),
        ("ddl:beta=2", "beta must lie between 0 and 2"),
        ("depth-window:window=9", "must lie between 2 and 8, got 9"),
        ("depth-window:width=0", "width must be at least 1"),
        ("delta-attnres:block=9", "block counts sublayers"),
    ],
)
def test_a_wrong_option_says_what_is_allowed(spec, message):
    with pytest.raises(ValueError) as caught:
        build(spec, 16, 8)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "dim", "sublayers"),
    [
        *((name, 0, 8) for name in names()),
        *(("standard", *sizes) for sizes in (("64", 8), (64, 8.0))),
    ],
)
def test_sizes_must_be_whole_numbers(name, dim, sublayers):
    with pytest.raises(ValueError) as caught:
        build(name, dim, sublayers)
    assert (
        str(caught.value)
        == f"dim and sublayers must be whole numbers and at least 1, got {dim=}, {sublayers=}"
    )


@pytest.mark.parametrize("spec", ["denseformer", "attnres-block"])
def test_kinds_must_name_every_sublayer(spec):
    with pytest.raises(ValueError, match="kinds must name each of the 8 sublayers, got 2 names"):
        build(spec, 16, 8, kinds=("attention", "mlp"))


@pytest.mark.parametrize("spec", names())
def test_kinds_are_those_that_there_are(spec):
    """An MLP by another name, such as ffn: no layer ended: the whole network was one, and the residual plain."""
    with pytest.raises(
        ValueError,
        match=r"kinds are attention, .*, mlp, moe.*; got 'ffn'. A layer ends with its mlp or",
    ):
        build(spec, 16, 8, kinds=("attention", "ffn") * 4)
    build(spec, 16, 8, kinds=("mixer", "mlp") * 4)


def test_both_on_one_read_are_a_kind_where_kinds_are_not_told_apart():
    assert build("attnres-block", 16, 2, kinds=["parallel"] * 2).kinds == ("parallel", "parallel")
    with pytest.raises(ValueError, match="got 'parallel'"):
        build("denseformer", 16, 2, kinds=["parallel"] * 2)


def test_what_a_pattern_names_is_a_kind():
    assert {*MIXERS, *FEED_FORWARDS} < {*KINDS}


@pytest.mark.parametrize("name", names())
def test_every_option_says_what_it_means(name):
    missing = [option.name for option in options_of(name)[1] if not option.meaning]
    assert not missing


def test_a_meaning_is_what_the_docstring_says_after_the_name(monkeypatch):
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    @registry.register("talkative")
    class Talkative(StandardResidual):
        """h + f.

        `rate`: how much, 0.5 at
        most. `kind` one (a, b) or other; `more` of it. Then `rate` again, and `end`: the last.
        """

        def __init__(
            self,
            dim,
            sublayers,
            *,
            rate: float = 0.5,
            kind: str = "one",
            more: int = 1,
            silent: int = 2,
            end: int = 0,
        ):
            super().__init__(dim, sublayers)

    actual = {option.name: option.meaning for option in options_of("talkative")[1]}
    assert actual == {
        "rate": "how much, 0.5 at most", "kind": "one (a, b) or other", "more": "of it", "silent": "", "end": "the last"
    }  # fmt: skip
