"""A layout given by hand: what fits decodes from a cache and is saved with the model; what does not fit is refused."""

import copy
import json

import pytest
import torch
from processes import python
from safetensors.torch import load_file, save_file
from tinyhf import stir, tiny_config, tiny_model, tokens
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


@pytest.mark.parametrize("model_type", STATEFUL)
def test_a_body_with_a_state_of_its_own_decodes_from_a_cache(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {model_type}")
    model, plain = tiny_model(model_type), tiny_model(model_type)
    report = convert(model, layout=STATEFUL[model_type], block=3)
    assert report.difference < 1e-5
    result = verify(model, plain, tokens())
    assert result.equal, str(result)
    stir(model, 0.1)
    rows = {
        "input_ids": tokens(2, 9),
        "do_sample": False,
        "max_new_tokens": 12,
        "min_new_tokens": 12,
    }
    assert torch.equal(model.generate(**rows), model.generate(**rows, use_cache=False))


def refused(match: str, model_type: str, layout: Layout, **sizes) -> None:
    model = tiny_model(model_type, **sizes)
    before = model.state_dict()
    with pytest.raises(UserError, match=match):
        convert(model, layout=layout)
    assert not hasattr(model.config, "headwater")
    assert set(model.state_dict()) == set(before)


def test_a_layout_that_does_not_fit_is_refused_at_conversion():
    granite = Layout(multiplier="residual_multiplier", mlp=("block_sparse_moe", "shared_mlp"))
    refused(
        "its layout does not know or use: shared_mlp",
        "granitemoeshared",
        Layout(mlp=("block_sparse_moe",)),
    )
    refused("its layout does not know or use: shared_mlp", "granitemoeshared", granite)
    refused("computes something else: hidden states .* are off by", "minicpm3", Layout())
    refused("computes something else", "minimax", Layout())
    refused("computes something else", "llama", Layout(mlp_out=("input_layernorm",)))
    refused(
        "fails with|does not fit",
        "falcon",
        Layout(layers="h", final_norm="ln_f", attention=("self_attention",)),
    )
    gptj = Layout(
        layers="h", final_norm="ln_f", attention=("attn",), attention_norm="ln_1", mlp_norm=None
    )
    refused("fails with|does not fit", "gptj", gptj)


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
        return end(self, site, state, norm) * (
            1 + self.residual.reads["1"].query.abs().max() * state.tensors[0].shape[1]
        )

    def interrupted(self, site, state, norm):
        raise KeyboardInterrupt

    monkeypatch.setattr(Depth, "end", wrong)
    with pytest.raises(
        UserError, match="computes something else: hidden states of tokens in one pass are off by"
    ):
        convert(model)
    monkeypatch.setattr(Depth, "end", counting)
    with pytest.raises(UserError, match="decodes from a cache what one pass does not give"):
        convert(model)
    monkeypatch.setattr(Depth, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(model)
    monkeypatch.setattr(Depth, "end", end)
    assert convert(model).equal_at_start
    assert verify(model, plain, tokens()).equal
    assert all(
        parameter.eq(0).all()
        for name, parameter in model.named_parameters()
        if name.endswith("query")
    )


LOAD = """
import sys, torch, transformers
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
import headwater.hf
from safetensors.torch import load_file, save_file
model = transformers.AutoModelForCausalLM.from_pretrained(".")
save_file({"logits": model(load_file("tokens.safetensors")["tokens"]).logits.detach()}, "logits.safetensors")
"""


def test_a_layout_travels_in_the_config(tmp_path):
    assert "gemma4_text" not in LAYOUTS  # for its per-layer embeddings, which this one does without
    model = tiny_model("gemma4_text", hidden_size_per_layer_input=0, global_head_dim=8)
    convert(model, layout=SANDWICH)
    stir(model)
    model.save_pretrained(tmp_path)
    save_file({"tokens": tokens()}, tmp_path / "tokens.safetensors")
    python("-c", LOAD, cwd=tmp_path)
    found = load_file(tmp_path / "logits.safetensors")["logits"]
    torch.testing.assert_close(found, model(tokens()).logits, rtol=1e-5, atol=1e-6)
    config = json.loads((tmp_path / "config.json").read_text())
    config["headwater"]["layout"]["attention_norms"] = "x"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="a layout has no field attention_norms"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_config_that_contradicts_itself_is_refused(tmp_path):
    """Parameters of blocks of 2 would load into blocks of 4 without a word."""
    model = tiny_model("llama")
    convert(model, block=2)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for residual in ("attnres-block:block=4", "attnres-full"):
        config["headwater"]["residual"] = residual
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match="contradicts itself"):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_trial_is_cheap():
    """Eleven passes over four rows of ten tokens."""
    model, calls = tiny_model("llama"), []
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: calls.append(args[0].numel())
    )
    convert(model)
    assert len(calls) == 11
    assert max(calls) == trial.ROWS * trial.TOKENS
