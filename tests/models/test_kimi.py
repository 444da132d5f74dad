"""Kimi Linear as settings of the decoder: patterns, parts, counts, caches, gradients."""

import time
from functools import partial

import pytest
import torch
from tinykimi import KIMI
from tinymodels import gradients_of, in_pieces, model_of, tokens_of, without_gradient
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from headwater.generation.generate import generate
from headwater.models import SIZES, Decoder, ModelConfig
from headwater.models.mla import MLA
from headwater.models.moe import routers
from headwater.models.pattern import layers_of, write_pattern
from headwater.residuals.parameter_groups import sort_parameters

KINDS = ("kda", "mlp", "kda", "moe", "kda", "moe", "mla", "moe")
MLA_ONLY = {**KIMI, "pattern": "mla"}


def test_the_published_model_has_the_published_counts():
    began = time.monotonic()
    with torch.device("meta"):
        model = Decoder(ModelConfig.named("kimi-linear-48b", residual="attnres-block:block=6"))
    assert time.monotonic() - began < 10
    count = model.parameter_count()
    assert count["total"] - count["residual"] == 49_122_675_072
    assert count["active"] - count["residual"] == 3_484_453_248
    parts = {}
    for sublayer in model.sublayers:
        parts[sublayer.kind] = sum(p.numel() for p in sublayer.body.parameters())
    assert parts == {"kda": 39_514_272, "mlp": 63_700_992, "moe": 1_819_607_040, "mla": 29_114_880}
    # Published is a pair of 2304 numbers for each of 55 reads; here the first, of one source, has none.
    assert count["residual"] == 253_440 - 2 * 2304
    layers = [i // 2 for i, kind in enumerate(model.config.kinds) if kind == "mla"]
    assert layers == [*range(3, 26, 4), 26]
    assert model.residual.num_sources(54) == 10  # nine blocks and the embedding


@pytest.mark.parametrize("size", [name for name in SIZES if name.startswith("kimi")])
def test_sizes_are_three_to_one_with_experts_after_the_first_layer(size):
    kinds = ModelConfig.named(size, vocab_size=64).kinds
    assert kinds[:8] == KINDS
    assert kinds[-2:] == ("mla", "moe")


@pytest.mark.parametrize(
    ("pattern", "layers", "expected"),
    [
        ("attention", 2, [("attention", "mlp")] * 2),
        ("kda:mla", 4, [("kda", "mlp"), ("mla", "mlp")] * 2),
        ("kda*2:mla", 3, [("kda", "mlp"), ("kda", "mlp"), ("mla", "mlp")]),
        ("kda+mlp:shortswa+attention", 2, [("kda", "mlp"), ("shortswa", "attention", "mlp")]),
    ],
)
def test_patterns(pattern, layers, expected):
    assert list(layers_of(pattern, layers, experts=0, dense=0)) == expected


def test_experts_take_the_feed_forwards_that_a_pattern_leaves_open():
    layers = layers_of("kda:kda+mlp:mla+moe:kda", 4, experts=8, dense=1)
    assert [layer[-1] for layer in layers] == ["mlp", "mlp", "moe", "moe"]


@pytest.mark.parametrize("pattern", ["kda*3:mla", "kda:mla", "kda", "kda*2:mla:kda"])
def test_a_pattern_is_written_as_it_was_read(pattern):
    layers = layers_of(pattern, 12, experts=0, dense=0)
    mixers = [layer[0] for layer in layers]
    assert write_pattern(mixers) == pattern


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "kda:mamba"}, "'mamba' in the pattern 'kda:mamba' names no layer. Valid: att"),
        ({"pattern": "kda+mlp+moe"}, "names no layer"),
        ({"pattern": "kda*x:mla"}, "must end in a number of layers"),
        ({"pattern": "kda*2:mla"}, "names 3 layers, of which 4 layers are no multiple: name all 4"),
        ({"pattern": "kda+moe", "experts": 0}, "names moe: give experts"),
        ({"pattern": "shortswa+kda"}, "shortswa must be given"),
        ({"value_residual": True}, "value_residual must be false without"),
        ({"experts": 1}, "experts must be at least 2"),
        ({"experts_per_token": 5}, "experts_per_token must be at most"),
        ({"mlp_dim": 2}, "mlp_dim must be at least 3"),
        ({"heads": 3, "kda_head_dim": 8}, "unless mla_head_dim and mla_value_dim"),
        ({"kda_head_dim": 512}, "kda_head_dim must be at most 256"),
    ],
)
def test_what_cannot_be_built_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        model_of("standard", **{**KIMI, **settings})


# Of each kind: one stream, sources, layers with three inputs, streams, tokens that look back.
RESIDUALS = ("standard", "attnres-block", "muddformer", "mhc", "ddl:width=2,compress=token")


@pytest.mark.parametrize("spec", RESIDUALS)
def test_residuals_of_each_kind_train_and_decode_it(spec):
    """Gradients reach every parameter and recompute; a prompt in pieces is the whole."""
    model, tokens = model_of(spec, scatter=True, **KIMI), tokens_of(length=20)
    assert model.config.kinds == KINDS
    logits, gradients = gradients_of(model, tokens)
    assert without_gradient(gradients) == []
    model.around = partial(checkpoint, use_reentrant=False)
    recomputed = gradients_of(model, tokens)[1]
    assert_close(recomputed, gradients, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        pieces = in_pieces(model, tokens, 9, 1, 7, 1, 1, 1)
    assert_close(pieces, logits, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "settings",
    [{"kda_gate": "bounded"}, {"shortswa": 3}, {"pattern": "kda:attention"}],
)
def test_parts_mix(settings, tmp_path):
    model = model_of("attnres-block", scatter=True, **KIMI | settings)
    prompt = tokens_of(length=5)
    text = generate(model, prompt, 12)
    assert torch.equal(generate(model, prompt, 12, use_cache=False), text)
    model.save(tmp_path)
    assert torch.equal(Decoder.load(tmp_path)(prompt), model(prompt))


@pytest.mark.slow
def test_compiled_layers_are_whole_graphs_and_count_loads():
    """Two layers have every part: KDA, a dense MLP, MLA and experts."""
    shape = KIMI | {"pattern": "kda:mla", "layers": 2}
    model, tokens = model_of("attnres-block", scatter=True, **shape), tokens_of(length=20)
    logits, gradients = gradients_of(model, tokens)
    loads = {name: router.load.clone() for name, router in routers(model).items()}
    model.compile_layers(backend="aot_eager", fullgraph=True, dynamic=False)
    again, compiled = gradients_of(model, tokens)
    assert_close(again, logits, atol=1e-6, rtol=1e-6)
    assert_close(compiled, gradients, atol=1e-6, rtol=1e-5)
    for name, router in routers(model).items():
        assert torch.equal(router.load, 2 * loads[name])


def test_a_token_never_sees_its_future():
    model = model_of("standard", scatter=True, **KIMI).eval()
    tokens = tokens_of(length=30)
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 48
    before, after = model(tokens), model(changed)
    assert_close(before[:, :20], after[:, :20], atol=1e-6, rtol=1e-6)
    assert (before[:, 20:] - after[:, 20:]).abs().max() > 1e-2


def test_a_cache_is_as_small_as_promised():
    model = model_of("standard", **KIMI)
    cache = model.new_cache(batch=2, room=20)
    model(tokens_of(length=20), cache)
    kda, mla = cache[0], cache[6]
    assert tuple(kda.state.shape) == (2, 4, 8, 8)
    assert kda.state.dtype == torch.float32
    assert tuple(kda.tail.shape) == (2, 3, 3 * 32)
    assert tuple(mla.latents.shape) == (2, 20, 32 + 4)  # for all heads together
    assert cache.lengths.even == 20


def test_absorbed_decoding_is_the_plain_one(monkeypatch):
    model, tokens = model_of("standard", scatter=True, **MLA_ONLY), tokens_of(length=20)
    calls, absorbed = [], MLA._absorbed

    def counted(self, *args):
        calls.append(1)
        return absorbed(self, *args)

    def decode(limit):
        monkeypatch.setattr("headwater.models.mla.ABSORBED", limit)
        return in_pieces(model, tokens, 10, 1, 7, 2)

    monkeypatch.setattr(MLA, "_absorbed", counted)
    plain = decode(0)
    assert not calls
    assert_close(decode(8), plain, atol=1e-5, rtol=1e-5)
    assert len(calls) == 3 * 4


def test_a_gain_starts_values_smaller_and_leaves_keys():
    """MLA makes both with one matrix: for each head the keys' rows, then the values'."""
    plain, scaled = (model_of(spec, **MLA_ONLY) for spec in ("standard", "deepnorm"))
    gain = scaled.residual.weight_gain
    assert gain < 1
    keys, values = keys_and_values(plain.sublayers[0].body)
    scaled_keys, scaled_values = keys_and_values(scaled.sublayers[0].body)
    assert torch.equal(scaled_keys, keys)
    assert torch.equal(scaled_values, gain * values)


def keys_and_values(mla):
    rows = mla.up.weight.unflatten(0, (mla.heads, -1))
    return rows[:, : mla.head_dim], rows[:, mla.head_dim :]


def test_flops_count_what_a_token_meets():
    def flops(**settings):
        return model_of("standard", **KIMI | {"expert_dim": 16} | settings).flops_per_token()

    # Of the router alone: four more scores in each of three layers.
    assert flops(experts=8) - flops(experts=4) == 3 * 2 * 3 * 4 * 32
    # The second expert of a token in each of three layers: three products.
    assert flops() - flops(experts_per_token=1) == 3 * 2 * 3 * 3 * 32 * 16


def test_convolutions_and_decays_do_not_decay():
    model = model_of("standard", **KIMI)
    names_by_id = {id(p): name for name, p in model.named_parameters()}
    groups = {}
    for group, parameters in sort_parameters(model).items():
        names = [names_by_id[id(p)] for p in parameters]
        groups[group] = {name.rpartition("body.")[2] for name in names}
    assert {"query_conv.weight", "decay.rate", "decay.bias", "norm.weight"} <= groups["rest"]
    matrices = {"experts.gate", "experts.output", "router.weight", "decay_up.weight"}
    assert matrices <= groups["matrices"]


def test_a_decay_starts_within_its_range():
    torch.manual_seed(0)
    model = model_of("standard", **{**KIMI, "dim": 128, "heads": 8})
    gate = model.sublayers[0].body.decay
    rate, step = gate.rate.exp(), torch.nn.functional.softplus(gate.bias)
    assert ((rate >= 1) & (rate <= 16)).all()
    assert ((step > 0.9e-3) & (step < 1.1e-1)).all()
    assert step.log().std() > 1
