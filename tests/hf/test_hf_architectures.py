"""Every architecture in the table: converted, it computes what it did; reverted, it is what it was."""

import hashlib
import json

import pytest
import torch
import torch.distributed as dist
import transformers
from tinyhf import sample, stir, tiny_model, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaForCausalLM, T5Config, T5Model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.architectures import MARKS, PAGE, RESULTS, TEXT_OF, tables
from benchmarks.tinyhf import tiny_config
from headwater.errors import UserError
from headwater.hf import Layout, convert, revert, verify
from headwater.hf.convert.layouts import ROWS
from headwater.hf.convert.refusals import REFUSED, layout_of
from headwater.residuals import build, names


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha.update(name.encode() + tensor.numpy().tobytes())
    return sha.hexdigest()


def classes(model: nn.Module) -> list[tuple[str, type]]:
    return [(name, type(module)) for name, module in model.named_modules()]


def test_a_tiny_model_has_few_experts_by_whatever_name():
    """Of its 128, each stored by itself, saving and loading would take seconds."""
    assert tiny_config("qwen3_moe").num_experts == 4


@pytest.mark.parametrize("model_type", sample())
def test_converted_equals_plain_and_reverts(model_type):
    model, other = tiny_model(model_type), tiny_model(model_type)
    before, kinds, config = digest(model), classes(model), model.config
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    report = convert(model, "attnres-block", block=2)
    result = verify(model, other, tokens())
    assert report.equal_at_start
    assert result.equal, str(result)
    assert result.logit_difference < 1e-5
    assert set(dict(model.named_parameters())) - set(dict(other.named_parameters())) == set(
        report.added
    )
    stir(model)
    assert not torch.allclose(
        model(tokens()).logits, other(tokens()).logits, atol=1e-3
    )  # no silent no-op
    assert digest(other) == before
    revert(model)
    assert digest(model) == before
    assert classes(model) == kinds
    assert model.config is config
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes


@pytest.mark.parametrize("residual", names())
def test_the_whole_family_converts_and_says_how_it_starts(residual):
    model, plain = tiny_model("qwen3"), tiny_model("qwen3")
    report = convert(model, residual)
    assert verify(model, plain, tokens()).equal == report.equal_at_start
    assert ("does NOT compute the same" in str(report)) != report.equal_at_start
    stir(model, 0.1)
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    missing = [name for name in report.added if dict(model.named_parameters())[name].grad is None]
    assert loss.isfinite()
    assert not missing


@pytest.mark.parametrize("model_type", ["stablelm", "gpt_neox"])
def test_both_values_of_the_switch_for_parallel_attention(model_type):
    for parallel in (True, False):
        model = tiny_model(model_type, use_parallel_residual=parallel)
        report = convert(model)
        assert verify(model, tiny_model(model_type, use_parallel_residual=parallel), tokens()).equal
        assert len(report.sites) == (5 if parallel else 9)


def test_without_the_exact_scale_the_norms_eps_shows():
    """What conversions that only average get wrong: the eps of a norm against the mean of many small sources."""
    plain = tiny_model("llama", rms_norm_eps=1e-5)
    exact, mean = (tiny_model("llama", rms_norm_eps=1e-5) for _ in range(2))
    convert(exact, "attnres-full")
    report = convert(mean, "attnres-full", exact=False)
    assert not report.equal_at_start
    assert verify(exact, plain, tokens()).kl < 1e-10
    assert verify(mean, plain, tokens()).kl > 1e-6


def test_the_report_lists_every_site():
    report = convert(tiny_model("llama"), "attnres-block", block=4)
    assert (
        report.sites[3]
        == "model.layers.1.mlp: sublayer 3 reads through post_attention_layernorm, times 2"
    )
    assert report.sites[-1] == "model.norm: final read, times 3"
    assert len(report.sites) == 9


def test_gradients_of_shared_weights_equal_the_plain_models():
    model, plain = tiny_model("gemma2"), tiny_model("gemma2")
    convert(model, "attnres-block", block=2)
    for each in (model, plain):
        each(tokens(), labels=tokens()).loss.backward()
    ours = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-3, atol=1e-6)
    assert any(ours[name].grad.abs().max() > 0 for name in ours if name.endswith(".query"))


def refused(match: str, model: nn.Module, *args, **kwargs) -> None:
    before, kinds = digest(model), classes(model)
    with pytest.raises(UserError, match=match):
        convert(model, *args, **kwargs)
    assert digest(model) == before
    assert classes(model) == kinds


def test_refusals_name_what_is_wrong_and_change_nothing():
    refused("'rwkv' cannot be converted: its layers hand on a recurrent state", tiny_model("rwkv"))
    refused("'bert' cannot be converted: it is not a decoder", tiny_model("bert"))
    refused(
        "'t5' cannot be converted: it is not a decoder",
        T5Model(T5Config(num_layers=1, d_model=8, d_ff=8, d_kv=4)),
    )
    refused(
        "'doge' cannot be converted: its residual is not the plain one already", tiny_model("doge")
    )
    refused(
        "block counts sublayers and must lie between 1 and 8, got 99", tiny_model("llama"), block=99
    )
    refused("unknown residual 'attnres'", tiny_model("llama"), "attnres")
    built = build("attnres-block", dim=64, sublayers=8)
    refused(
        "is given by its name, such as 'attnres-block.*; got a AttentionResidual",
        tiny_model("llama"),
        built,
    )
    refused("has no option 'depth'", tiny_model("llama"), depth=3)
    refused("takes a transformers model; a Linear holds none", nn.Linear(2, 2))
    refused(
        "has none of the modules feed_forward",
        tiny_model("llama"),
        layout=Layout(mlp=("feed_forward",)),
    )
    refused("runs both at once", tiny_model("cohere"), "denseformer")
    refused("Phi3Attention has no 'q_proj'", tiny_model("phi3"), "muddformer")
    model = tiny_model("llama")
    convert(model)
    refused("already converted, to 'attnres-block:block=2'", model)
    shared = tiny_model("llama")
    shared.model.layers[1] = shared.model.layers[0]
    refused("LlamaModel runs a layer more than once", shared)
    with pytest.raises(UserError, match="is not a model that headwater"):
        revert(tiny_model("llama"))
    with pytest.raises(
        UserError, match=r"got a str: load one with .*\. For a folder there is .* headwater convert"
    ):
        convert("llama")
    with pytest.raises(UserError, match="this str is not a model that headwater"):
        revert("llama")
    with pytest.raises(
        UserError,
        match=r"no layout .* 'lama2'; the nearest that is known is 'llama'. .* pass layout=",
    ):
        layout_of("lama2", ["lama2"])


def test_what_ranks_share_already_is_refused():
    """Of several ranks each would have trained a residual of its own, without a word."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        refused(
            r"as a DistributedDataParallel, .* convert it first",
            DistributedDataParallel(tiny_model("llama")),
        )
        model = tiny_model("gpt2")
        fully_shard(model.transformer.h[0], mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UserError, match=r"as a FSDPGPT2Block, .* convert it first"):
            convert(model)
    finally:
        dist.destroy_process_group()


def test_a_plain_class_that_read_a_converted_folder_is_refused(tmp_path):
    """Its config says converted, its weights were trained so, and what it computes is neither."""
    model = tiny_model("llama")
    convert(model)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    refused(
        r"converted, to 'attnres-block:block=2', and .* load it with AutoModel",
        loaded,
        "attnres-full",
    )


def test_layerdrop_is_refused_and_without_it_a_model_converts_saves_and_loads(tmp_path):
    model = tiny_model("opt", layerdrop=0.1)
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(
        UserError,
        match=r"at random .*layerdrop=0.1.*: load it with from_pretrained.*, layerdrop=0.0",
    ):
        convert(model)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", layerdrop=0.0)
    convert(model)
    model.save_pretrained(tmp_path / "converted")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert again.model.decoder.layerdrop == 0


def test_models_that_share_a_config_do_not_share_a_conversion():
    first = tiny_model("llama")
    second = type(first)(first.config).eval()
    convert(first)
    assert second.config.model_type == "llama"
    assert not hasattr(second.config, "headwater")
    assert type(second.model.layers[0]).forward is not type(first.model.layers[0]).forward


def test_the_page_has_the_tables_of_the_results():
    """Else: python -m benchmarks.architectures, or with --tables alone."""
    found = MARKS.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == tables()


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
    refused = {name: row["why"] for name, row in rows.items() if row["status"] == "refused"}
    assert set(refused) == set(rows) - exact
    assert set(refused) <= set(REFUSED)
