"""A layout given by hand: what fits decodes from a cache and is saved with the model; what does not fit is refused."""

import copy
import json

import pytest
import torch
from tinyhf import (
    agree,
    converted,
    greedy,
    load,
    load_elsewhere,
    logits,
    stir,
    tiny_config,
    tiny_model,
    tokens,
)
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from headwater.errors import UserError
from headwater.hf import Layout, convert, revert, verify
from headwater.hf.convert import trial
from headwater.hf.convert.depth import Depth
from headwater.hf.convert.layouts import LAYOUTS, SANDWICH

LINEAR = Layout(attention=("self_attn", "linear_attn"))
MAMBA = Layout(attention=("self_attn", "mamba"), mlp=("feed_forward",), mlp_norm="pre_ff_layernorm")
STATEFUL = {  # bodies with a state of their own besides keys and values
    "kimi_linear": Layout(),
    "bailing_hybrid": Layout(),
    "qwen3_next": LINEAR,
    "qwen3_5_text": LINEAR,
    "jamba": Layout(**{**MAMBA.to_dict(), "final_norm": "final_layernorm"}),
    "inkling_text": Layout(attention_out=("attn_sconv",), mlp_out=("mlp_sconv",)),
}


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_body_with_a_state_of_its_own_decodes_from_a_cache(kind):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {kind}")
    model = tiny_model(kind)
    assert convert(model, layout=STATEFUL[kind], block=3).difference < 1e-5
    result = verify(model, tiny_model(kind), tokens())
    assert result.equal, str(result)
    model = converted(kind=kind, amount=0.1, layout=STATEFUL[kind])
    rows = tokens(2, 9)
    assert torch.equal(greedy(model, rows), greedy(model, rows, use_cache=False))


FALCON = Layout(layers="h", final_norm="ln_f", attention=("self_attention",))
GPTJ = Layout(
    layers="h", final_norm="ln_f", attention=("attn",), attention_norm="ln_1", mlp_norm=None
)
MISFITS = [
    ("granitemoeshared", Layout(mlp=("block_sparse_moe",)), "does not know or use shared_mlp"),
    ("minicpm3", Layout(), "computes something else: hidden states .* are off by"),
    ("minimax", Layout(), "computes something else"),
    ("llama", Layout(mlp_out=("input_layernorm",)), "computes something else"),
    ("falcon", FALCON, "fails with|does not fit"),
    ("gptj", GPTJ, "fails with|does not fit"),
]


@pytest.mark.parametrize(("kind", "layout", "message"), MISFITS)
def test_a_layout_that_does_not_fit_is_refused_at_conversion(kind, layout, message):
    model = tiny_model(kind)
    before = set(model.state_dict())
    with pytest.raises(UserError, match=message):
        convert(model, layout=layout)
    assert not hasattr(model.config, "headwater")
    assert set(model.state_dict()) == before


def test_the_report_claims_only_what_was_measured():
    model = tiny_model("llama")
    assert "computes the same as before until it is trained (measured on" in str(convert(model))
    revert(model)
    unchecked = str(convert(model, check=False))
    assert "should compute the same" in unchecked
    assert "NOT CHECKED: it was not asked for" in unchecked
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(tiny_config("llama"))
    report = convert(empty)
    assert report.difference is None
    assert "NOT CHECKED: it is on the meta device" in str(report)


def test_what_the_trial_finds_is_refused(monkeypatch):
    """Its two comparisons, each with a model that fails it alone."""
    plain = tiny_model("llama")
    model = copy.deepcopy(plain)
    end = Depth.end

    def wrong(self, site, state, norm):
        return 1.1 * end(self, site, state, norm)

    def counting(self, site, state, norm):
        """Once it is trained, it looks at how many tokens there are."""
        trained = self.residual.reads["1"].query.abs().max()
        return end(self, site, state, norm) * (1 + trained * state.tensors[0].shape[1])

    def interrupted(self, site, state, norm):
        raise KeyboardInterrupt

    for fault, error, message in (
        (
            wrong,
            UserError,
            "computes something else: hidden states of tokens in one pass are off by",
        ),
        (counting, UserError, "decodes from a cache what one pass does not give"),
        (interrupted, KeyboardInterrupt, "^$"),
    ):
        monkeypatch.setattr(Depth, "end", fault)
        with pytest.raises(error, match=message):
            convert(model)
    monkeypatch.setattr(Depth, "end", end)
    assert convert(model).equal_at_start
    assert agree(model, plain)
    queries = [p for name, p in model.named_parameters() if name.endswith("query")]
    assert not any(query.any() for query in queries)


def test_a_layout_travels_in_the_config(tmp_path):
    assert "gemma4_text" not in LAYOUTS  # for its per-layer embeddings, which this one does without
    model = tiny_model("gemma4_text", hidden_size_per_layer_input=0, global_head_dim=8)
    convert(model, layout=SANDWICH)
    stir(model)
    model.save_pretrained(tmp_path / "model")
    inputs = {"input_ids": tokens()}
    about = load_elsewhere(tmp_path, inputs, {"model": None}, "AutoModelForCausalLM")["model"]
    torch.testing.assert_close(about["logits"], logits(model), rtol=1e-5, atol=1e-6)


def test_a_config_that_contradicts_itself_is_refused(tmp_path):
    """Parameters of blocks of 2 would load into blocks of 4 without a word."""
    converted("attnres-block:block=2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for residual in ("attnres-block:block=4", "attnres-full"):
        config["headwater"]["residual"] = residual
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match="contradicts itself"):
            load(tmp_path)


def test_the_trial_is_cheap():
    """Eleven passes over four rows of ten tokens."""
    model, sizes = tiny_model("llama"), []
    embedding = model.model.embed_tokens
    embedding.register_forward_hook(lambda module, args, out: sizes.append(args[0].numel()))
    convert(model)
    assert len(sizes) == 11
    assert max(sizes) == trial.ROWS * trial.TOKENS
