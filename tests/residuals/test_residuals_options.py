"""The options of the residual family: a wrong option says what is allowed, and each says what it
means."""

import pytest
import torch
from test_contract import SPECS, gradients_of, model_of, tokens_of
from torch.testing import assert_close

from headwater.models.pattern import FEED_FORWARDS, MIXERS
from headwater.residuals import (
    AttentionResidual,
    StandardResidual,
    build,
    names,
    options_of,
    pinned,
    registry,
)
from headwater.residuals.layerwise import KINDS


@pytest.mark.parametrize("spec", SPECS)
def test_short_attention_leaves_gradients_their_size(spec):
    """Its output starts at zero: a sublayer that reads nothing else has a norm of zeros, whose
    gradient explodes."""

    def largest(**settings):
        _, gradients = gradients_of(model_of(spec, **settings), tokens_of())
        return max(gradient.norm() for gradient in gradients.values() if gradient is not None)

    assert largest(shortswa=4) < 3 * largest()


LOOK_BACK = [
    "ddl:width=2,compress=token",
    "ddl:width=3,compress=channel,expand=token",
    "ddl:width=2,compress=token,expand=token",
]


@torch.no_grad()
@pytest.mark.parametrize("spec", LOOK_BACK)
@pytest.mark.parametrize("value_residual", [False, True])
def test_a_cache_carries_what_token_convolutions_look_back_at(spec, value_residual):
    """Chunk by chunk, a first one shorter than the convolution included."""
    model = model_of(spec, scatter=True, value_residual=value_residual)
    tokens = tokens_of(length=20)
    expected, cache = model(tokens), model.new_cache(len(tokens))
    sizes = (2, 1, 8, 1, 8)
    pieces = [model(piece, cache) for piece in tokens.split(sizes, 1)]
    assert_close(torch.cat(pieces, 1), expected, atol=1e-4, rtol=1e-4)
    assert all(tensor.shape[1] == 3 for tensor in cache.past)
    # Without the past the next tokens are others.
    cache = model.new_cache(len(tokens))
    model(tokens[:, :10], cache)
    cache.past = ()
    forgetful = model(tokens[:, 10:], cache)
    assert (forgetful - expected[:, 10:]).abs().max() > 1e-2


def test_token_convolutions_do_not_look_ahead():
    model, tokens = model_of(LOOK_BACK[2], scatter=True), tokens_of()
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 48
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("attnres-blok", r"unknown residual 'attnres-blok'. Did you mean 'attnres-block'\?"),
        (AttentionResidual, r"given by its name, such as .*; got AttentionResidual"),
        ("attnres-block:blok=2", r"no option 'blok'. Did you mean 'block'\? Valid options: block,"),
        ("attnres-block:block=two", "block must be a whole number or none, got 'two'"),
        ("attnres-full:query=dynamic", "one of static, projected, got 'dynamic'"),
        ("attnres-full:key_norm=maybe", "true or false"),
        # Numbers out of range
        ("attnres-block:block=9", "block must lie between 1 and 8, got 9"),
        ("mhc:streams=1", "streams must be at least 2, got 1"),
        # Options that do not go together
        ("attnres-full:heads=3", "heads must divide the width, 16"),
        ("attnres-full:key_dim=6,heads=4", "and key_dim, 6, got 4"),
        ("attnres-full:heads=4,backend=triton", "backend=triton needs static queries, softmax"),
        ("attnres-full:schedule=two-phase,heads=2", "schedule=two-phase needs static queries"),
        ("attnres-full:scale=gain,start=0", "needs query=static and a start above zero"),
        ("attnres-full:weights=static,scale=root", "set up queries"),
        ("ddl:width=4", "needs compress=channel or compress=token"),
        ("mhc:backend=cuda", "backend"),
    ],
)
def test_a_wrong_spec_says_what_is_allowed(spec, message):
    with pytest.raises(ValueError, match=message):
        build(spec, 16, 8)


@pytest.mark.parametrize(
    "options",
    [{"weights": "sofmax"}, {"query": "statc"}, {"scale": "rot"}, {"schedule": "two_phase"}],
)
def test_a_word_that_a_class_does_not_know_is_an_error_too(options):
    """From Python no name is parsed: what decides how reads are made is looked up."""
    with pytest.raises(KeyError, match=next(iter(options.values()))):
        AttentionResidual(16, 8, **options)


@pytest.mark.parametrize(
    ("spec", "saved"),
    [
        ("standard", "standard"),
        ("attnres-block", "attnres-block:block=2"),
        ("attnres-block:block=none,heads=2", "attnres-block:heads=2,block=2"),
        ("depth-window:width=8", "depth-window:width=8,window=4"),
    ],
)
def test_a_saved_spec_names_the_options_that_follow_from_the_network(spec, saved):
    residual = build(spec, 16, 8)
    assert pinned(residual) == saved == pinned(build(saved, 16, 8))
    assert residual.spec == spec


def test_kinds_name_every_sublayer_by_a_word_that_there_is():
    """An MLP by another name, such as ffn: no layer would end, and the whole network be one."""
    with pytest.raises(ValueError, match="kinds must name each of the 8 sublayers, got 2 names"):
        build("denseformer", 16, 8, kinds=("attention", "mlp"))
    for spec in names():
        with pytest.raises(ValueError, match=r"kinds are attention, .*; got 'ffn'. A layer ends"):
            build(spec, 16, 8, kinds=("attention", "ffn") * 4)
        build(spec, 16, 8, kinds=("mixer", "mlp") * 4)
    assert {*MIXERS, *FEED_FORWARDS} < {*KINDS}


def test_both_on_one_read_are_a_kind_where_kinds_are_not_told_apart():
    residual = build("attnres-block", 16, 2, kinds=["parallel"] * 2)
    assert residual.kinds == ("parallel", "parallel")
    with pytest.raises(ValueError, match="got 'parallel'"):
        build("denseformer", 16, 2, kinds=["parallel"] * 2)


def test_every_option_says_what_it_means():
    for name in names():
        assert not [option.name for option in options_of(name)[1] if not option.meaning], name


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

    assert [option.meaning for option in options_of("talkative")[1]] == [
        "how much, 0.5 at most",
        "one (a, b) or other",
        "of it",
        "",
        "the last",
    ]
