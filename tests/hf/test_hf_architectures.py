"""Every architecture in the table: converted, it computes what it did; reverted, it is what it was."""

import json

import pytest
import torch
import torch.distributed as dist
import transformers
from tinyhf import (
    agree,
    converted,
    load,
    logits,
    sample,
    stir,
    tiny_config,
    tiny_model,
    tokens,
    training,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaForCausalLM, T5Config, T5Model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.architectures import MARKS, PAGE, RESULTS, TEXT_OF, digest, tables
from headwater.errors import UserError
from headwater.hf import Layout, convert, revert, verify
from headwater.hf.convert.layouts import ROWS
from headwater.hf.convert.refusals import REFUSED, layout_of
from headwater.residuals import names


def classes(model: nn.Module) -> list[tuple[str, type, set[str]]]:
    return [(name, type(module), set(module.__dict__)) for name, module in model.named_modules()]


def test_a_tiny_model_has_few_experts_by_whatever_name():
    """Saving and loading 128, each stored by itself, would take seconds."""
    assert tiny_config("qwen3_moe").num_experts == 4


@pytest.mark.parametrize("kind", sample())
def test_converted_equals_plain_and_reverts(kind):
    model, other = tiny_model(kind), tiny_model(kind)
    before, kinds, config = digest(model), classes(model), model.config
    report = convert(model, "attnres-block", block=2)
    result = verify(model, other, tokens())
    assert report.equal_at_start
    assert result.equal, str(result)
    assert result.logit_difference < 1e-5
    added = dict(model.named_parameters()).keys() - dict(other.named_parameters()).keys()
    assert added == set(report.added)
    stir(model)
    # No silent no-op
    assert not torch.allclose(logits(model), logits(other), atol=1e-3)
    assert digest(other) == before
    revert(model)
    assert digest(model) == before
    assert classes(model) == kinds
    assert model.config is config


@pytest.mark.parametrize("residual", names())
def test_the_whole_family_converts_and_says_how_it_starts(residual):
    model = tiny_model("qwen3")
    report = convert(model, residual)
    # A read of gated-hc is normed: its scale is the token's own, for which convert vouches for nothing.
    assert agree(model, tiny_model("qwen3")) == (report.equal_at_start or residual == "gated-hc")
    assert ("does NOT compute the same" in str(report)) != report.equal_at_start
    stir(model, 0.1)
    assert training(model).isfinite().all()
    parameters = dict(model.named_parameters())
    assert all(parameters[name].grad is not None for name in report.added)


@pytest.mark.parametrize("kind", ["stablelm", "gpt_neox"])
@pytest.mark.parametrize("parallel", [True, False])
def test_both_values_of_the_switch_for_parallel_attention(kind, parallel):
    model, plain = (tiny_model(kind, use_parallel_residual=parallel) for _ in range(2))
    report = convert(model)
    assert agree(model, plain)
    assert len(report.sites) == (5 if parallel else 9)


def test_without_the_exact_scale_the_norms_eps_shows():
    """A conversion that only averages gets the eps of a norm wrong, against the mean of many small sources."""
    exact, mean, plain = (tiny_model("llama", rms_norm_eps=1e-5) for _ in range(3))
    convert(exact, "attnres-full")
    report = convert(mean, "attnres-full", exact=False)
    assert not report.equal_at_start
    assert verify(exact, plain, tokens()).kl < 1e-10
    assert verify(mean, plain, tokens()).kl > 1e-6


def test_the_report_lists_every_site():
    sites = convert(tiny_model("llama"), "attnres-block", block=4).sites
    read = "sublayer 3 reads through post_attention_layernorm, times 2"
    assert sites[3] == f"model.layers.1.mlp: {read}"
    assert sites[-1] == "model.norm: final read, times 3"
    assert len(sites) == 9


def test_gradients_of_shared_weights_equal_the_plain_models():
    model, plain = converted("attnres-block:block=2", "gemma2", amount=0.0), tiny_model("gemma2")
    training(model)
    training(plain)
    parameters = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameters[name].grad, parameter.grad, rtol=1e-3, atol=1e-6)
    assert any(
        parameters[name].grad.abs().max() > 0 for name in parameters if name.endswith(".query")
    )


def refused(match: str, model: nn.Module, *args, **kwargs) -> None:
    before, kinds = digest(model), classes(model)
    with pytest.raises(UserError, match=match):
        convert(model, *args, **kwargs)
    assert digest(model) == before
    assert classes(model) == kinds


def test_refusals_name_what_is_wrong_and_change_nothing():
    """One of each kind: an architecture, a value, a model, a layout, a residual that does not fit, a state."""
    refused("'rwkv' cannot be converted: its layers hand on a recurrent state", tiny_model("rwkv"))
    pair = T5Model(T5Config(num_layers=1, d_model=8, d_ff=8, d_kv=4))
    refused("'t5' cannot be converted: it is not a decoder", pair)
    refused("must lie between 1 and 8, got 99", tiny_model("llama"), block=99)
    refused("takes a transformers model; a Linear holds none", nn.Linear(2, 2))
    layout = Layout(mlp=("feed_forward",))
    refused("has none of the modules feed_forward", tiny_model("llama"), layout=layout)
    refused("runs both at once", tiny_model("cohere"), "denseformer")
    refused("Phi3Attention has no 'q_proj'", tiny_model("phi3"), "muddformer")
    refused("already converted, to 'attnres-block:block=3'", converted())
    shared = tiny_model("llama")
    shared.model.layers[1] = shared.model.layers[0]
    refused("LlamaModel runs a layer more than once", shared)
    with pytest.raises(UserError, match="is not a model that headwater"):
        revert(tiny_model("llama"))
    with pytest.raises(UserError, match=r"'lama2'; the nearest .* is 'llama'. .* pass layout="):
        layout_of("lama2", ["lama2"])


def test_what_ranks_share_already_is_refused():
    """Each rank would have trained a residual of its own, without a word."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        refused("as a DistributedDataParallel", DistributedDataParallel(tiny_model("llama")))
        model = tiny_model("gpt2")
        fully_shard(model.transformer.h[0], mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UserError, match=r"as a FSDPGPT2Block, .* convert it first"):
            convert(model)
    finally:
        dist.destroy_process_group()


def test_a_plain_class_that_read_a_converted_folder_is_refused(tmp_path):
    """Its config says converted, its weights were trained so, and what it computes is neither."""
    converted("attnres-block").save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    refused("converted, to 'attnres-block:block=2'", loaded, "attnres-full")


def test_layerdrop_is_refused_and_without_it_a_model_converts_saves_and_loads(tmp_path):
    model = tiny_model("opt", layerdrop=0.1)
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match=r"at random .*layerdrop=0.1.* layerdrop=0.0"):
        convert(model)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", layerdrop=0.0)
    convert(model)
    model.save_pretrained(tmp_path / "converted")
    assert load(tmp_path / "converted").model.decoder.layerdrop == 0


def test_models_that_share_a_config_do_not_share_a_conversion():
    first = tiny_model("llama")
    second = type(first)(first.config).eval()
    convert(first)
    assert second.config.model_type == "llama"
    assert not hasattr(second.config, "headwater")
    assert type(second.model.layers[0]).forward is not type(first.model.layers[0]).forward


def test_the_page_has_the_tables_of_the_results():
    """Else: python -m benchmarks.architectures, or with --tables alone."""
    assert MARKS.search(PAGE.read_text(encoding="utf-8"))[0] == tables()


def test_the_results_are_of_this_table():
    """Every causal language model is exact or refused with a reason, and those that are exact are the table's."""
    results = json.loads(RESULTS.read_text())
    rows = results["types"]
    if results["transformers"] != transformers.__version__:
        pytest.skip(f"the results are of transformers {results['transformers']}")
    assert set(rows) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    exact = {name for name, row in rows.items() if row["status"] == "exact"}
    assert len(exact) >= 110
    assert exact - set(TEXT_OF) == {name for _, names in ROWS for name in names.split()}
    others = {name for name, row in rows.items() if row["status"] == "refused"}
    assert others == set(rows) - exact
    assert others <= set(REFUSED)
