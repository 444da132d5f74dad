"""Our Kimi Linear beside transformers' with the same weights: logits, gradients, cached decoding; files both ways."""

import inspect
import json
import re
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from tinyhf import load
from tinykimi import KIMI
from tinymodels import model_of

from headwater.errors import UserError
from headwater.hf import export
from headwater.hf.formats.kimi import kimi_config, kimi_settings, load_kimi, save_kimi
from headwater.hf.formats.names import read_names, write_names
from headwater.models import Decoder, ModelConfig

modeling = pytest.importorskip(
    "transformers.models.kimi_linear.modeling_kimi_linear",
    reason="transformers has it from 5.22 on",
)

SHAPE = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 12, "num_experts": 6, "num_experts_per_token": 2, "linear_num_heads": 2,
    "linear_head_dim": 16, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def plain_functions(monkeypatch):
    """fla's kernels take their place where it is installed, with or without a GPU."""
    for name in (
        "chunk_kimi_delta_attention",
        "recurrent_kimi_delta_attention",
        "causal_conv1d_fn",
        "causal_conv1d_update",
    ):
        monkeypatch.setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))


def original_and_decoder(**changes):
    """Two models of the same weights, off their start, and with a bias that decides between experts."""
    torch.manual_seed(0)
    config = modeling.KimiLinearConfig(**{**SHAPE, **changes})
    original = modeling.KimiLinearForCausalLM(config).eval()
    with torch.no_grad():
        for name, value in original.state_dict().items():
            vector = "e_score" in name or value.dim() == 1 or "A_log" in name
            value.add_(torch.randn(value.shape) * (0.2 if vector else 0.3 / value.shape[-1] ** 0.5))
    decoder = Decoder(ModelConfig.from_dict(kimi_settings(original.config.to_dict()))).eval()
    decoder.load_weights(read_names(original.state_dict(), decoder.config))
    return original, decoder


def assert_near(values, expected, name="logits"):
    """Within 1e-5 of the largest, or of one."""
    error, scale = (values - expected).abs().max().item(), max(1.0, expected.abs().max().item())
    assert error <= 1e-5 * scale, f"{name}: off by {error} of {scale}"


def tokens_of(length, batch=2):
    return torch.randint(0, 48, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("eps", [1e-5, 3e-2])
def test_logits_and_gradients_are_transformers_s(eps):
    original, decoder = original_and_decoder(rms_norm_eps=eps)
    assert decoder.config.kinds == ("kda", "mlp", "kda", "moe", "kda", "moe", "mla", "moe")
    expected, logits = original(tokens_of(70)).logits, decoder(tokens_of(70))
    assert_near(logits, expected)
    along = torch.randn_like(logits)
    (expected * along).mean().backward()
    (logits * along).mean().backward()
    parameters = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    decoder_there = write_names({**decoder.weights(), **parameters}, decoder.config)
    gradients = {name: parameter.grad for name, parameter in original.named_parameters()}
    assert len(gradients) > 60
    for name, gradient in gradients.items():
        assert_near(decoder_there[name], gradient, name)


@torch.no_grad()
def test_64_tokens_from_a_cache_at_once_and_in_pieces():
    original, decoder = original_and_decoder()
    prompt, greedy = tokens_of(9), tokens_of(9)
    cache, original_cache, unread = decoder.new_cache(len(prompt)), None, prompt
    for _ in range(64):  # both decode; each step is compared
        out = original(unread, past_key_values=original_cache, use_cache=True)
        original_cache = out.past_key_values
        logits = decoder(unread, cache)
        assert_near(logits, out.logits)
        unread = logits[:, -1:].argmax(-1)
        greedy = torch.cat((greedy, unread), 1)
    expected = original(greedy).logits
    assert_near(decoder(greedy), expected)
    cache, bounds = decoder.new_cache(len(prompt)), [0, 20, 21, 40, 48, 73]
    pieces = [decoder(greedy[:, a:b], cache) for a, b in pairwise(bounds)]
    assert_near(torch.cat(pieces, 1), expected)


@torch.no_grad()
@pytest.mark.parametrize("released", [False, True])
def test_files_both_ways(tmp_path, released):
    original, decoder = original_and_decoder()
    expected = decoder(tokens_of(20))
    save_kimi(decoder, tmp_path, released=released)
    names = set(load_file(tmp_path / "model.safetensors"))
    for name in (
        "1.block_sparse_moe.experts.5.w3.weight",
        "0.self_attn.q_conv1d.weight",
        "0.self_attn.A_log",
    ):
        assert (f"model.layers.{name}" in names) == released
    assert torch.equal(load_kimi(tmp_path).eval()(tokens_of(20)), expected)
    loaded = modeling.KimiLinearForCausalLM.from_pretrained(tmp_path).eval()(tokens_of(20)).logits
    torch.testing.assert_close(loaded, original(tokens_of(20)).logits, atol=1e-6, rtol=1e-6)
    original.save_pretrained(tmp_path / "original")
    assert torch.equal(load_kimi(tmp_path / "original").eval()(tokens_of(20)), expected)
    # Queries are zero: the plain residual, but for what eps does to a smaller stream.
    read = load_kimi(tmp_path, residual="attnres-block:block=3").eval()
    assert read.residual.block == 3
    assert 0 < (read(tokens_of(20)) - expected).abs().max() < 2e-2


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
    linear = config["linear_attn_config"]
    assert (linear["kda_layers"], linear["full_attn_layers"]) == ([1, 2, 3], [4])
    assert (config["first_k_dense_replace"], config["mla_use_nope"]) == (1, True)
    transformers_own = [
        name for name in config if name.startswith(("linear_num", "layer_types", "mlp_layer"))
    ]
    released = {name: config[name] for name in config if name not in transformers_own}
    assert kimi_settings(released) == kimi_settings(config)
    again = load_kimi(tmp_path).eval()
    assert torch.equal(again(tokens_of(12)), model(tokens_of(12)))
    fresh = load_kimi(tmp_path, residual="attnres-full").eval()
    assert not any(read.query.any() for read in fresh.residual.reads.values())


@pytest.mark.parametrize(
    "residual",
    [
        "attnres-block:block=4",
        "attnres-block:block=3,eps=1e-5",
        "attnres-block:block=4,eps=1e-5,heads=2",
        "mhc",
    ],
)
def test_a_residual_that_vllm_has_not_is_not_saved_for_it(residual, tmp_path):
    with pytest.raises(UserError, match="a released Kimi Linear has no residual"):
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
    decoder, published = (
        ModelConfig.from_dict(kimi_settings(config)),
        ModelConfig.named("kimi-linear-48b"),
    )
    assert decoder.kinds == published.kinds
    assert decoder.context == 1048576  # no tables of positions grow with it
    with torch.device("meta"):
        shapes = [
            {n: p.shape for n, p in Decoder(c).named_parameters()} for c in (decoder, published)
        ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"mla_use_output_gate": True}, "mla_use_output_gate"),
        ({"linear_attn_config": {"use_full_rank_gate": True}}, "linear_use_full_rank_gate"),
        ({"model_type": "llama"}, "model_type"),
        ({"q_lora_rank": 8}, "q_lora_rank"),
        ({"n_group": 2}, "n_group"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
    ],
)
def test_a_config_that_the_decoder_does_not_compute_is_named(change, name):
    with pytest.raises(UserError, match=f"{name} must be .* in a Kimi Linear"):
        kimi_settings({"model_type": "kimi_linear", **SHAPE, **change})


def test_a_checkpoint_with_another_layer_list_or_width_is_refused(tmp_path):
    _, decoder = original_and_decoder()
    save_kimi(decoder, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kinds = ["full_attention"] + ["linear_attention"] * 3
    for change, message in (
        ({"layer_types": kinds}, r"not those of the layers mla:kda\*3: missing .*layers.0"),
        ({"linear_head_dim": 8}, r"query.weight is \(16, 32\) in the model and \(32, 32\)"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match=message):
            load_kimi(tmp_path)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"pattern": "kda:attention"}, "pattern"),
        ({"kda_gate": "bounded"}, "kda_gate"),
        ({"residual": "attnres-full"}, "residual"),
        ({"shared_experts": 0, "kda_norm_eps": 1e-8}, "shared_experts"),
        ({}, "kda_norm_eps"),
    ],
)
def test_a_decoder_that_is_no_kimi_linear_is_not_saved_as_one(settings, name):
    model = model_of("standard", **KIMI)
    with pytest.raises(UserError, match=f"a decoder with {name} '"):
        kimi_config({**model.config.to_dict(), **settings})


@torch.no_grad()
def test_a_run_of_any_pattern_is_exported_as_the_decoder_itself(tmp_path):
    """Its routers' biases included, which from_pretrained must not begin anew."""
    model = model_of("attnres-block", scatter=True, **KIMI).eval()
    for i in (3, 5, 7):
        model.sublayers[i].body.router.bias.copy_(torch.linspace(-0.3, 0.3, 4))
    export(model.config.to_dict(), model.weights()).save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path).eval()(tokens_of(12)).logits, model(tokens_of(12)))


def test_a_dense_layer_in_the_middle_is_kept():
    original, decoder = original_and_decoder(mlp_layer_types=["sparse", "dense", "sparse", "dense"])
    assert decoder.config.pattern == "kda+moe:kda+mlp:kda+moe:mla+mlp"
    assert (
        kimi_config(decoder.config.to_dict())["mlp_layer_types"] == original.config.mlp_layer_types
    )
