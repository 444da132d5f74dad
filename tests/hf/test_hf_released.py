"""Layouts released elsewhere, and models of `headwater train`: every tensor finds its place, both ways."""

import json

import pytest
import torch
from tinyhf import agree, converted, load, logits, same, stir, tiny_model, tokens
from transformers import AutoTokenizer

from headwater.errors import UserError
from headwater.generation.generate import generate
from headwater.hf import (
    FLA,
    KIMI_K3,
    Layout,
    export,
    export_run,
    from_release,
    load_released,
    to_release,
)
from headwater.hf.formats.folder import fast_tokenizer, write_model
from headwater.models import Decoder, ModelConfig
from headwater.train import load_run
from headwater.train.data.tokenizer import ByteTokenizer

naive_attnres = pytest.importorskip(
    "fla.ops.attnres.naive", reason="the oracle is fla-core's reference"
).naive_attnres
NEAR = {"rtol": 1e-4, "atol": 1e-4}


def released(release):
    """A small random checkpoint in a release's layout, on the body of a tiny Llama."""
    model = converted("attnres-block:block=2", exact=False)
    weights = to_release(model.state_dict(), release)
    torch.manual_seed(3)
    for name in first_pair(release):
        weights[name] = torch.randn_like(weights[name])
    return weights


def first_pair(release):
    """The parameters of the first read, on which nothing depends."""
    return [f"model.layers.0.{release.attention}_{part}.weight" for part in ("proj", "norm")]


@torch.no_grad()
def oracle(weights, release, boundary, eps):
    """The forward of a release, from its description: `boundary(i)` opens a block at sublayer i."""
    plain = tiny_model("llama")
    body = plain.model
    x = tokens()
    hidden = body.embed_tokens(x)
    positions = torch.arange(x.shape[1])[None]
    rotary = body.rotary_emb(hidden, position_ids=positions)
    bank, running = [], hidden

    def mix(name):
        proj, norm = weights[f"model.{name}_proj.weight"], weights[f"model.{name}_norm.weight"]
        return naive_attnres(
            proj, [*bank, running] if running is not None else bank, norm, rms_eps=eps
        )

    for index, layer in enumerate(body.layers):
        for part, name in enumerate((release.attention, release.mlp)):
            read = running if not bank else mix(f"layers.{index}.{name}")
            if boundary(2 * index + part):
                bank, running = [*bank, running], None
            if part == 0:
                normed = layer.input_layernorm(read)
                out = layer.self_attn(normed, position_embeddings=rotary, attention_mask=None)[0]
            else:
                out = layer.mlp(layer.post_attention_layernorm(read))
            running = out if running is None else running + out
    return plain.lm_head(body.norm(mix(release.output)))


CASES = [  # config of the release, and where blocks open by its own rule
    (FLA, {"attnres_block_size": 3, "norm_eps": 1e-6}, lambda i: i % 3 == 0),
    (FLA, {"attnres_block_size": 1, "norm_eps": 0.4}, lambda i: True),
    (
        KIMI_K3,
        {"attn_res_block_size": 2, "rms_norm_eps": 1e-5},
        lambda i: i % 2 == 0 and (i // 2) % 2 == 0,
    ),
    # One partial block
    (KIMI_K3, {"attn_res_block_size": 12, "rms_norm_eps": 0.4}, lambda i: i == 0),
]


@pytest.mark.parametrize(("release", "config", "boundary"), CASES)
def test_a_released_checkpoint_computes_what_its_own_rule_says(release, config, boundary):
    weights = released(release)
    expected = oracle(weights, release, boundary, release.eps(config))
    model = tiny_model("llama", seed=5)
    load_released(model, weights, config)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("release", [FLA, KIMI_K3])
def test_names_map_both_ways(release):
    weights = released(release)
    back = to_release(from_release(weights, release), release)
    assert back.keys() == weights.keys()
    for name, tensor in weights.items():
        assert back[name].shape == tensor.shape
        assert name in first_pair(release) or torch.equal(back[name], tensor), name


def test_a_release_without_all_its_weights_is_refused_and_the_model_untouched():
    model, config = tiny_model("llama"), {"attn_res_block_size": 2, "rms_norm_eps": 1e-5}
    for name, message in (
        ("model.output_attn_res_proj.weight", "without all its reads"),
        ("model.norm.weight", "missing"),
    ):
        weights = released(KIMI_K3)
        del weights[name]
        with pytest.raises(UserError, match=message):
            load_released(model, weights, config)
    assert type(model).__name__ == "LlamaForCausalLM"
    with pytest.raises(UserError, match="neither 'attnres_block_size'"):
        load_released(model, released(KIMI_K3), {})


@pytest.mark.parametrize(
    "settings",
    [
        {"residual": "attnres-block:block=3"},
        {"residual": "muddformer", "qk_norm": True},
        {"residual": "standard", "tie_embeddings": True},
        {"residual": "hyper-connections", "kv_heads": 4},
    ],
)
def test_a_decoder_of_headwater_train_exports(settings, tmp_path):
    torch.manual_seed(0)
    config = ModelConfig.named("nano", vocab_size=257, **settings)
    decoder = Decoder(config).eval()
    stir(decoder, 0.1)
    model = export(config.to_dict(), decoder.weights(), end_of_text=256)
    write_model(model, fast_tokenizer(ByteTokenizer().to_json(), config.context), tmp_path / "out")
    torch.testing.assert_close(logits(load(tmp_path / "out")), decoder(tokens()), **NEAR)


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", [False, True])
def test_an_exported_model_has_every_setting_of_the_decoder(qk_norm):
    """Each away from its default, and norms away from one."""
    torch.manual_seed(0)
    shape = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_dim": 40, "context": 16}
    config = ModelConfig(vocab_size=80, **shape, norm_eps=0.3, rope_theta=30.0, qk_norm=qk_norm)
    decoder = Decoder(config).eval()
    for parameter in decoder.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    model = export(config.to_dict(), decoder.weights())
    torch.testing.assert_close(logits(model), decoder(tokens()), **NEAR)
    assert model.config.max_position_embeddings == 16


@torch.no_grad()
def test_a_saved_model_of_headwater_is_exported_with_its_tokenizer(tmp_path, command):
    torch.manual_seed(0)
    run, out, half = (tmp_path / name for name in ("run", "out", "half"))
    config = ModelConfig.named("nano", vocab_size=257, residual="attnres-block:block=3")
    decoder = Decoder(config).eval()
    stir(decoder, 0.1)
    decoder.save(run)
    ByteTokenizer().save(run)
    model, tokenizer = export_run(load_run(run), out=out)
    for exported in (model, load(out)):
        torch.testing.assert_close(logits(exported), decoder(tokens()), **NEAR)
    for encoder in (tokenizer, AutoTokenizer.from_pretrained(out)):
        assert encoder.encode("def ") == [*b"def "]
    with pytest.raises(UserError, match="not an empty folder"):
        export_run(load_run(run), out=out)
    command("convert", run, "--dtype", "bfloat16", "--out", half)
    pairs = zip(load(half).parameters(), model.parameters(), strict=True)
    assert all(torch.equal(rounded, exact.bfloat16()) for rounded, exact in pairs)


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
# The latter has a table besides positions.
@pytest.mark.parametrize("residual", ["standard", "mhc-lite:streams=2"])
def test_what_has_no_counterpart_is_exported_as_headwater_s_own_decoder(
    tmp_path, command, residual, tied
):
    parts = {"shortswa": 4, "value_residual": True, "tie_embeddings": tied, "residual": residual}
    decoder = Decoder(ModelConfig.named("nano", vocab_size=257, **parts))
    # A start that any other decoder would have too shows nothing.
    for parameter in decoder.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))
    export(decoder.config.to_dict(), decoder.weights(), 256).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.config.model_type == "headwater-decoder"
    assert model.config.headwater == {"residual": residual}
    assert torch.equal(logits(model), decoder(tokens()))
    assert (model.decoder.head.weight is model.decoder.embedding.weight) == tied
    prompt = tokens()[:1, :5]
    written = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(written, generate(decoder, prompt, 6, temperature=0.0, stop=256))
    targets = tokens()[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits(model)[:, :-1].flatten(0, 1), targets)
    torch.testing.assert_close(model(tokens(), labels=tokens()).loss, loss)
    padded = torch.ones_like(prompt)
    padded[0, 0] = 0
    with pytest.raises(ValueError, match="no padding on the left"):
        model(prompt, attention_mask=padded)
    assert agree(model, model)  # which pads rows where there is a cache
    for words in (["convert"], ["convert", "--remote-code"], ["revert"]):
        error = command(*words, tmp_path, "--out", tmp_path / "out", code=1)
        assert f"{tmp_path} is headwater's own decoder with the residual" in error


def test_the_byte_tokenizer_encodes_the_same_in_transformers(tmp_path):
    text = "déjà vu: \t\n∀x 🙂 def f(x):\x00"
    tokenizer = fast_tokenizer(ByteTokenizer().to_json(), 128)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode(text) == list(text.encode())
    assert loaded.decode(list(text.encode())) == text
    assert loaded.eos_token_id == ByteTokenizer().end_of_text
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 128


@pytest.mark.parametrize("layout", [None, Layout()])
def test_a_release_on_the_body_of_kimi_linear(layout):
    """Linear attention, latent attention and experts under the names of Kimi K3."""
    plain = tiny_model("kimi_linear", seed=5)
    model = converted("attnres-block:block=4,eps=1e-5", "kimi_linear", exact=False)
    weights = to_release(model.state_dict(), KIMI_K3)
    assert "model.layers.1.self_attention_res_proj.weight" in weights
    report = load_released(plain, weights, {"attn_res_block_size": 2, "rms_norm_eps": 1e-5}, layout)
    assert report.residual == "attnres-block:block=4,eps=1e-05"
    assert same(plain, model)
