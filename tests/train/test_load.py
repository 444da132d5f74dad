"""A trained model back from its folder, and a run that begins with its weights."""

import shutil
from contextlib import suppress
from dataclasses import fields

import pytest
import torch
from tinyrun import STEPS, changed, tiny

from headwater.errors import UserError
from headwater.models import Decoder, ModelConfig
from headwater.runs.settings import load_file
from headwater.train import load
from headwater.train.data.tokenizer import ByteTokenizer
from headwater.train.load import LoadedRun, fill_from, load_run
from headwater.train.loop import train
from headwater.train.run import begin


def begun(config, folder):
    return begin(config, folder, resume=False).whole


def test_a_run_begins_with_the_weights_of_another(tmp_path):
    """A residual keeps its own start where the other run has another."""
    config, first = tiny(tmp_path, residual="attnres-full"), tmp_path / "first"
    train(config, first)
    trained = dict(load_run(first).model.named_parameters())
    onward = changed(config, init_from=str(first))
    for residual in ("attnres-full", "standard", "attnres-block"):
        asked = changed(onward, residual=residual)
        expected = dict(trained)
        if residual == "attnres-block":
            fresh = begun(changed(asked, init_from=""), tmp_path / "fresh").named_parameters()
            starts = {key: value for key, value in fresh if key.startswith("residual.")}
            assert starts
            expected |= starts
        for key, parameter in begun(asked, tmp_path / residual).named_parameters():
            assert torch.equal(parameter, expected[key]), (residual, key)
    absent = tmp_path / "absent"
    for settings, message in (
        ({"layers": 3}, "weights do not fit the model"),
        ({"init_from": str(absent)}, r"no checkpoint in .*absent"),
        ({"tokenizer": "bpe", "bpe_vocab": 300}, "was trained with another tokenizer"),
    ):
        with pytest.raises(UserError, match=message):
            begun(changed(onward, **settings), tmp_path / "refused")


def test_a_run_with_the_tokenizer_of_another_begins_with_its_weights(tmp_path):
    """On another text, of which a BPE of its own would be another; and it goes on when the other run is gone."""
    first, second, other = tmp_path / "first", tmp_path / "second", tmp_path / "other.txt"
    config = tiny(tmp_path, tokenizer="bpe", bpe_vocab=300)
    train(config, first)
    other.write_text("".join(f"other words {i}\n" for i in range(2000)))
    onward = changed(config, source=(str(other),), init_from=str(first), validation=0.05)
    message = rf"another tokenizer \(.* with data.tokenizer = .*{first}"
    with pytest.raises(UserError, match=message):
        begun(onward, second)
    train(changed(onward, tokenizer=str(first)), second)
    assert load_run(second).tokenizer.to_json() == load_run(first).tokenizer.to_json()
    shutil.rmtree(first)
    again = load_file(second)
    assert train(changed(again, steps=STEPS + 2), second, resume=True).steps == STEPS + 2
    assert load_file(second).data == again.data
    third = changed(again, init_from="")
    with pytest.raises(UserError, match=rf"no tokenizer at {first}"):
        train(third, tmp_path / "third")
    begun(changed(third, tokenizer=str(second)), tmp_path / "third")


WIDTHS = {"dim": 16, "heads": 2, "kv_heads": 2, "mlp_dim": 32, "kda_heads": 2, "kda_head_dim": 8}
MIXED = {
    "layers": 3, "pattern": "kda:shortswa:attention", "shortswa": 2, "experts": 4, "expert_dim": 8,
    "context": 16, "mla_head_dim": 8, "mla_value_dim": 8, "mla_shared_dim": 4, "mla_latent": 16,
}  # fmt: skip
OTHER = {  # of every setting of a model another value: those of a shape, and those that no shape shows
    "vocab_size": 64, "dim": 32, "layers": 6, "mlp_dim": 48, "residual": "highway", "value_residual": True,
    "qk_norm": True, "kda_heads": 4, "kda_head_dim": 4, "kda_conv": 3, "mla_latent": 8, "mla_head_dim": 4,
    "mla_shared_dim": 2, "mla_value_dim": 4, "experts": 8, "expert_dim": 4, "shared_experts": 2, "dense_layers": 2,
    "context": 32, "fp32_stream": True, "depth_start": False, "router_rate": 0.1, "tie_embeddings": True,
    "pattern": "kda:attention:shortswa", "heads": 4, "kv_heads": 1, "shortswa": 3, "rope_theta": 500.0,
    "norm_eps": 0.1, "kda_gate": "bounded", "kda_norm_eps": 0.1, "experts_per_token": 1, "expert_scale": 2.0,
}  # fmt: skip


def decoder(**settings) -> Decoder:
    return Decoder(ModelConfig(**{"vocab_size": 32, **WIDTHS, **settings})).eval()


@pytest.fixture
def fill(monkeypatch):
    """Gives a model the weights of another one, as if that were the model of a run."""

    def fill_model(model, trained):
        tokenizer = ByteTokenizer()
        loaded = LoadedRun(trained, tokenizer, None)
        monkeypatch.setattr(load, "load_run", lambda folder: loaded)
        fill_from(model, tokenizer, "there")

    return fill_model


def assert_equal(model, other):
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens), other(tokens))


@pytest.mark.parametrize("name", [field.name for field in fields(ModelConfig)])
def test_weights_that_fit_and_would_compute_something_else_are_refused(name, fill):
    """Whatever a new setting changes: what is loaded computes the same, or is not loaded."""
    base = {**MIXED, "pattern": "mla"} if name.startswith("mla") else MIXED
    trained = decoder(**base)
    for parameter in trained.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    # A number of heads by itself would show in the shapes of keys.
    also = {"kv_heads": OTHER["heads"]} if name == "heads" else {}
    model = decoder(**{**base, name: OTHER[name], **also})
    with suppress(UserError):
        fill(model, trained)
        assert_equal(model, trained)
        return
    # Either shapes differ, or the settings are compared.
    with pytest.raises(UserError, match=rf"weights do not fit the model|model.{name} = "):
        fill(model, trained)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({}, {"pattern": "attention:attention"}),
        ({"pattern": "kda*2", "rope_theta": 500.0}, {"pattern": "kda:kda"}),
        ({}, {"kda_gate": "bounded", "kda_norm_eps": 0.1}),
        ({}, {"experts_per_token": 1, "expert_scale": 3.0}),
    ],
)
def test_settings_of_what_a_model_does_not_have_do_not_count(there, here, fill):
    trained, model = decoder(layers=2, **there), decoder(layers=2, **here)
    fill(model, trained)
    assert_equal(model, trained)


def test_a_longer_context_may_bring_another_rope_base(fill):
    trained, longer = decoder(context=16), decoder(context=32, rope_theta=5e5)
    fill(longer, trained)
    torch.testing.assert_close(longer.weights(), trained.weights(), rtol=0, atol=0)
    for settings, message in (
        ({"context": 32, "norm_eps": 0.1}, r"model\.norm_eps"),
        ({"context": 8, "rope_theta": 5e5}, r"model\.rope_theta"),
    ):
        with pytest.raises(UserError, match=message):
            fill(decoder(**settings), trained)
