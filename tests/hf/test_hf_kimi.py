"""Our Kimi Linear beside transformers' with the same weights: logits, gradients, cached decoding; files both ways."""

import inspect
import json
import re
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from tinykimi import KIMI
from tinymodels import model_of
from transformers import AutoModelForCausalLM

from headwater.errors import UserError
from headwater.hf import export
from headwater.hf.formats.kimi import (
    kimi_config,
    kimi_settings,
    load_kimi,
    read_kimi,
    save_kimi,
    write_kimi,
)
from headwater.models import Decoder, ModelConfig

modeling = pytest.importorskip(
    "transformers.models.kimi_linear.modeling_kimi_linear",
    reason="transformers has it from 5.22 on",
)

SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(autouse=True)
def plain_functions(monkeypatch):
    """fla's kernels take their place where it is installed, with or without a GPU."""
    names = (
        "chunk_kimi_delta_attention",
        "recurrent_kimi_delta_attention",
        "causal_conv1d_fn",
        "causal_conv1d_update",
    )
    for name in names:
        monkeypatch.setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))


def theirs_and_ours(**changes):
    """With the same weights, moved off their start, and a bias that decides between experts."""
    torch.manual_seed(0)
    theirs = modeling.KimiLinearForCausalLM(
        modeling.KimiLinearConfig(**{**SHAPE, **changes})
    ).eval()
    with torch.no_grad():
        for name, value in theirs.state_dict().items():
            if "e_score" in name or value.dim() == 1 or "A_log" in name:
                value.add_(0.2 * torch.randn(value.shape))
            else:
                value.add_(0.3 * torch.randn(value.shape) / value.shape[-1] ** 0.5)
    settings = kimi_settings(theirs.config.to_dict())
    ours = Decoder(ModelConfig.from_dict(settings)).eval()
    ours.load_weights(read_kimi(theirs.state_dict(), settings))
    return theirs, ours


def assert_near(found, expected, name="logits"):
    """Within 1e-5 of the largest, or of one."""
    error, scale = (found - expected).abs().max().item(), max(1.0, expected.abs().max().item())
    assert error <= 1e-5 * scale, f"{name}: off by {error} of {scale}"


def tokens_of(length, batch=2):
    return torch.randint(0, 48, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("eps", [1e-5, 3e-2])
def test_logits_and_gradients_are_transformers_s(eps):
    theirs, ours = theirs_and_ours(rms_norm_eps=eps)
    assert ours.config.kinds == ("kda", "mlp", "kda", "moe", "kda", "moe", "mla", "moe")
    tokens = tokens_of(70)
    expected, logits = theirs(tokens).logits, ours(tokens)
    assert_near(logits, expected)
    along = torch.randn_like(logits)
    (expected * along).mean().backward()
    (logits * along).mean().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    found = write_kimi(
        {**ours.weights(), **{n: p.grad for n, p in ours.named_parameters()}}, ours.config.to_dict()
    )
    assert len(gradients) > 60
    for name, gradient in gradients.items():
        assert_near(found[name], gradient, name)


@torch.no_grad()
def test_64_tokens_from_a_cache_at_once_and_in_pieces():
    theirs, ours = theirs_and_ours()
    prompt, greedy = tokens_of(9), tokens_of(9)
    cache, their_cache, unread = ours.new_cache(len(prompt)), None, prompt
    for _ in range(64):  # both decode; each step is compared
        out = theirs(unread, past_key_values=their_cache, use_cache=True)
        their_cache = out.past_key_values
        logits = ours(unread, cache)
        assert_near(logits, out.logits)
        unread = logits[:, -1:].argmax(-1)
        greedy = torch.cat((greedy, unread), 1)
    expected = theirs(greedy).logits
    assert_near(ours(greedy), expected)
    cache, bounds = ours.new_cache(len(prompt)), [0, 20, 21, 40, 48, 73]
    pieces = [ours(greedy[:, a:b], cache) for a, b in pairwise(bounds)]
    assert_near(torch.cat(pieces, 1), expected)


@pytest.mark.parametrize("released", [False, True])
def test_files_both_ways(tmp_path, released):
    theirs, ours = theirs_and_ours()
    tokens = tokens_of(20)
    save_kimi(ours, tmp_path, released=released)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert ("model.layers.1.block_sparse_moe.experts.5.w3.weight" in names) == released
    assert ("model.layers.0.self_attn.q_conv1d.weight" in names) == released
    assert ("model.layers.0.self_attn.A_log" in names) == released
    again = load_kimi(tmp_path).eval()
    assert torch.equal(again(tokens), ours(tokens))
    loaded = modeling.KimiLinearForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(tokens).logits, theirs(tokens).logits, atol=1e-6, rtol=1e-6
        )
    theirs.save_pretrained(tmp_path / "theirs")
    assert torch.equal(load_kimi(tmp_path / "theirs").eval()(tokens), ours(tokens))


def test_with_attention_residuals_it_begins_as_the_checkpoint_s_model(tmp_path):
    _, ours = theirs_and_ours()
    save_kimi(ours, tmp_path)
    read = load_kimi(tmp_path, residual="attnres-block:block=3").eval()
    assert read.residual.block == 3
    scale = (read(tokens_of(20)) - ours(tokens_of(20))).abs().max()
    assert (
        0 < scale < 2e-2
    )  # queries are zero: the plain residual, but for what eps does to a smaller stream


VLLM = {  # the parameters of vLLM 0.32's KimiLinearForCausalLM, by the kind of what holds them
    "": "embed_tokens.weight norm.weight output_attn_res_norm.weight output_attn_res_proj.weight",
    "layer": """input_layernorm.weight post_attention_layernorm.weight self_attention_res_norm.weight
        self_attention_res_proj.weight mlp_res_norm.weight mlp_res_proj.weight""",
    "kda": """self_attn.in_proj_qkvgfab.weight self_attn.conv1d.weight self_attn.A_log self_attn.dt_bias
        self_attn.f_b_proj.weight self_attn.g_a_proj.weight self_attn.g_b_proj.weight self_attn.o_norm.weight
        self_attn.o_proj.weight""",
    "mla": """self_attn.q_proj.weight self_attn.kv_a_proj_with_mqa.weight self_attn.kv_a_layernorm.weight
        self_attn.kv_b_proj.weight self_attn.o_proj.weight""",
    "mlp": "mlp.gate_up_proj.weight mlp.down_proj.weight",
    "moe": """block_sparse_moe.gate.weight block_sparse_moe.gate.e_score_correction_bias
        block_sparse_moe.experts.w13_weight block_sparse_moe.experts.w2_weight
        block_sparse_moe.shared_experts.gate_up_proj.weight
        block_sparse_moe.shared_experts.down_proj.weight""",
}
LOADS = (  # what its loader puts where, of each kind of layer
    ("kda", r"self_attn\.(q|k|v|b|f_a)_proj", "self_attn.in_proj_qkvgfab"),
    ("kda", r"[qkv]_conv1d", "conv1d"),
    ("", r"experts\.\d+\.w[13]\.weight", "experts.w13_weight"),
    ("", r"experts\.\d+\.w2\.weight", "experts.w2_weight"),
    ("", r"(gate|up)_proj", "gate_up_proj"),
)


def vllm_parameters(kinds):
    names = {"lm_head.weight", *(f"model.{name}" for name in VLLM[""].split())}
    for i in range(len(kinds) // 2):
        for kind in ("layer", *kinds[2 * i : 2 * i + 2]):
            names |= {f"model.layers.{i}.{name}" for name in VLLM[kind].split()}
    return names


def loaded_by_vllm(names, kinds):
    loaded = set()
    for name in names:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        mixer = kinds[2 * int(layer[1])] if layer else None
        for kind, pattern, parameter in LOADS:
            if kind in ("", mixer):
                name = re.sub(pattern, parameter, name)
        loaded.add(name)
    return loaded


def released_model(residual, **settings):
    return model_of(residual, scatter=True, **{**KIMI, "norm_eps": 1e-5, **settings}).eval()


def test_vllm_finds_all_parameters_and_its_config_in_a_released_folder(tmp_path):
    model = released_model("attnres-block:block=4,eps=1e-5")
    save_kimi(model, tmp_path, released=True)
    names = set(load_file(tmp_path / "model.safetensors"))
    expected = vllm_parameters(model.config.kinds)
    assert len(expected) == 81
    assert loaded_by_vllm(names, model.config.kinds) == expected
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["attn_res_block_size"] == 2
    assert config["linear_attn_config"]["kda_layers"] == [1, 2, 3]
    assert config["linear_attn_config"]["full_attn_layers"] == [4]
    assert (config["first_k_dense_replace"], config["mla_use_nope"]) == (1, True)
    released = {name for name in config if name not in ("layer_types", "mlp_layer_types")}
    released = {name: config[name] for name in released if not name.startswith("linear_num")}
    assert kimi_settings(released) == kimi_settings(config)
    again = load_kimi(tmp_path).eval()
    assert torch.equal(again(tokens_of(12)), model(tokens_of(12)))
    fresh = load_kimi(tmp_path, residual="attnres-full").eval()
    assert not any(read.query.any() for read in fresh.residual.reads.values())


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        ("attnres-block:block=4", "residual eps 1e-06 beside norm_eps 1e-05"),
        ("attnres-block:block=3,eps=1e-5", "blocks of 3 sublayers"),
        ("attnres-block:block=4,eps=1e-5,heads=2", "heads=2"),
        ("mhc", "residual 'mhc"),
    ],
)
def test_a_residual_that_vllm_has_not_is_not_saved_for_it(residual, message, tmp_path):
    with pytest.raises(UserError, match=message):
        save_kimi(released_model(residual), tmp_path, released=True)


def test_the_published_config():
    full = [4, 8, 12, 16, 20, 24, 27]
    linear = {
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
        "full_attn_layers": full,
    }
    linear["kda_layers"] = [i for i in range(1, 28) if i not in full]
    config = {
        "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "num_hidden_layers": 27,
        "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 9216, "moe_intermediate_size": 1024,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "rms_norm_eps": 1e-5, "linear_attn_config": linear,
        "model_max_length": 1048576, "moe_router_activation_func": "sigmoid", "mla_use_nope": True,
    }  # fmt: skip
    ours, named = ModelConfig.from_dict(kimi_settings(config)), ModelConfig.named("kimi-linear-48b")
    assert ours.kinds == named.kinds
    assert ours.context == 1048576  # no tables of positions grow with it
    with torch.device("meta"):
        shapes = [{n: p.shape for n, p in Decoder(c).named_parameters()} for c in (ours, named)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mla_use_output_gate": True}, "mla_use_output_gate must be False"),
        ({"linear_attn_config": {"use_full_rank_gate": True}}, "as Kimi K3"),
        ({"model_type": "llama"}, "model_type must be 'kimi_linear', got 'llama'"),
        ({"q_lora_rank": 8}, "q_lora_rank must be None"),
        ({"n_group": 2}, "n_group must be 1"),
        ({"layer_types": ["linear_attention"] * 3}, "for each of 4 layers"),
        ({"layer_types": None}, "the config names no layers"),
        (
            {
                "layer_types": None,
                "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [3]},
            },
            "from 1 to 4",
        ),
        ({"mlp_layer_types": ["dense"]}, "dense or sparse for each of 4 layers"),
    ],
)
def test_a_config_that_does_not_fit_is_named(change, message):
    with pytest.raises(UserError, match=re.escape(message)):
        kimi_settings({"model_type": "kimi_linear", **SHAPE, **change})


def test_a_checkpoint_with_the_wrong_layer_list_is_named(tmp_path):
    _, ours = theirs_and_ours()
    save_kimi(ours, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kinds = ["full_attention"] + ["linear_attention"] * 3
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": kinds}))
    with pytest.raises(
        UserError, match=r"not those of the layers named: missing .*layers.0.*layers: mla:kda\*3"
    ):
        load_kimi(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "linear_head_dim": 8}))
    with pytest.raises(
        UserError, match=r"query.weight is \(16, 32\) in the model and \(32, 32\) in the file"
    ):
        load_kimi(tmp_path)
    with pytest.raises(UserError, match=r"must hold config\.json and"):
        load_kimi(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "kda:attention"}, "layers other than kda and mla"),
        ({"kda_gate": "bounded"}, "kda_gate 'bounded'"),
        ({"residual": "attnres-full"}, "residual 'attnres-full'"),
        ({}, "kda_norm_eps 1e-05 beside norm_eps 1e-08"),
    ],
)
def test_a_decoder_that_is_no_kimi_linear_is_not_saved_as_one(settings, message):
    model = model_of("standard", **KIMI)
    with pytest.raises(UserError, match=message):
        kimi_config({**model.config.to_dict(), **settings})


def test_a_run_of_any_pattern_is_exported_as_the_decoder_itself(tmp_path):
    """Its routers' biases included, which from_pretrained must not begin anew."""
    model = model_of("attnres-block", scatter=True, **KIMI).eval()
    for i in (3, 5, 7):
        model.sublayers[i].body.router.bias.copy_(torch.linspace(-0.3, 0.3, 4))
    export(model.config.to_dict(), model.weights()).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = tokens_of(12)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens))


def test_a_dense_layer_in_the_middle_is_kept():
    theirs, ours = theirs_and_ours(mlp_layer_types=["sparse", "dense", "sparse", "dense"])
    assert ours.config.pattern == "kda+moe:kda+mlp:kda+moe:mla+mlp"
    assert kimi_config(ours.config.to_dict())["mlp_layer_types"] == theirs.config.mlp_layer_types
