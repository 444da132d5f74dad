"""torchtitan's own trainer with headwater's residuals: the same losses under every layout. `make test-engines`."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch
from launch import assert_close, losses_of, run_all

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed here: make test-engines", allow_module_level=True)

RUNS = Path(__file__).with_name("titan_runs.py")
# One pass: a CPU chooses by the size of a micro-batch, and the two schedules round differently.
BLOCK = "attnres-block:block=2,schedule=one-pass"
RESIDUALS = (BLOCK, "mhc", "denseformer")
RATE = 8e-4  # torchtitan's own
# At such a rate Adam amplifies the rounding of sums in another order, which fp64 hardly has.
EXACT = {"residual": BLOCK, "rate": RATE, "dtype": "float64"}
LAYOUTS = {
    "FSDP2": {},
    "1F1B": {"pipeline": "1F1B"},
    "Interleaved1F1B": {"pipeline": "Interleaved1F1B"},
    "tensor": {"tensor": True},
}
# Tensors that reach the four stages of an interleaved pipeline, and those that a state there has.
HOPS = {
    BLOCK: [[0, 0], [2, 2], [2, 4], [2, 6]],
    "mhc": [[0, 0], [1, 1], [1, 1], [1, 1]],
    "denseformer": [[0, 0], [2, 2], [2, 4], [2, 6]],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, list[float]]:
    """Losses of one process: torchtitan's plain model, then headwater's residuals in it."""
    runs: dict[str, dict] = {"plain": {}, "standard": {"residual": "standard"}}
    for residual in RESIDUALS:
        runs[residual] = {"residual": residual}
    runs["exact"] = EXACT
    runs["short"] = {"residual": BLOCK, "steps": 5}
    runs["full"] = {"residual": BLOCK, "checkpointing": "full", "steps": 5}
    runs["selective"] = {"residual": BLOCK, "checkpointing": "selective", "steps": 5}
    runs["compiled"] = {"residual": BLOCK, "compile": True, "steps": 5}
    runs["adamw"] = {"residual": BLOCK, "adamw": True, "steps": 5}
    for family in ("qwen3", "deepseek_v3"):
        runs[f"{family} plain"] = {"family": family, "steps": 3}
        runs[f"{family} standard"] = {"family": family, "residual": "standard", "steps": 3}
        runs[f"{family} block"] = {"family": family, "residual": BLOCK, "steps": 3}
    results = run_all(RUNS, 1, list(runs.values()))
    return {name: losses_of(ranks) for name, ranks in zip(runs, results, strict=True)}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[tuple[str, str], list[dict]]:
    """What two processes say under each layout."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    runs: dict[tuple[str, str], dict] = {}
    for residual in RESIDUALS:
        for name, layout in LAYOUTS.items():
            runs[residual, name] = {"residual": residual, **layout}
    runs[BLOCK, "Interleaved1F1B"]["folder"] = folder
    for name in ("FSDP2", "1F1B"):
        runs["exact", name] = {**EXACT, **LAYOUTS[name]}
    results = run_all(RUNS, 2, list(runs.values()))
    return dict(zip(runs, results, strict=True))


@pytest.mark.parametrize("family", ["", "qwen3 ", "deepseek_v3 "])
def test_the_plain_residual_is_torchtitans_own_model(alone, family):
    assert_close(alone[f"{family}standard"], alone[f"{family}plain"], 5e-6)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_a_residual_changes_the_model(alone, family):
    assert alone[f"{family} block"][0] != pytest.approx(alone[f"{family} plain"][0], abs=1e-3)


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_do_what_one_does(alone, pairs, residual, layout):
    limit = 2e-5 if layout == "tensor" else 1e-5
    assert_close(losses_of(pairs[residual, layout]), alone[residual], limit)


@pytest.mark.parametrize("layout", ["FSDP2", "1F1B"])
def test_without_rounding_a_layout_changes_nothing_at_a_high_rate(alone, pairs, layout):
    assert_close(losses_of(pairs["exact", layout]), alone["exact"], 1e-6)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_rank_is_sent_what_it_lacks(pairs, residual):
    first, second = pairs[residual, "Interleaved1F1B"]
    arrived = [first["hops"][0], second["hops"][0], first["hops"][1], second["hops"][1]]
    assert arrived == HOPS[residual]


@pytest.mark.parametrize("mode", ["full", "selective", "compiled"])
def test_recomputed_and_compiled_blocks_do_the_same(alone, mode):
    assert_close(alone[mode], alone["short"], 1e-5)


def test_queries_learn_at_a_rate_of_their_own(alone):
    assert alone["adamw"][0] == alone["short"][0]
    assert alone["adamw"] != alone["short"]


def test_a_pipelines_checkpoint_resumes_on_one_process(alone, pairs):
    folder = pairs[BLOCK, "Interleaved1F1B"][0]["folder"]
    [ranks] = run_all(RUNS, 1, [{"residual": BLOCK, "folder": folder, "load_step": 10}])
    assert_close(losses_of(ranks), alone[BLOCK][10:], 1e-5)


def spec_without_scaling(residual: str):
    """The debug model, with positions as headwater's decoder has them."""
    from torchtitan.models import llama3

    from headwater.integrations.torchtitan import with_residual

    spec = llama3.model_registry("debugmodel")
    for layer in spec.model.layers:
        rope = dataclasses.replace(layer.attention.rope, scaling="none", max_seq_len=64)
        layer.attention.rope = rope
    return with_residual(spec, residual)


@pytest.fixture
def trained():
    """A model with queries that are not zero, and its spec."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    spec = spec_without_scaling("attnres-block:block=2")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = spec.model.build()
    with torch.no_grad():
        model.init_weights()
        for parameter in model.residual.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return spec, model.eval()


def test_weights_load_into_transformers_and_into_our_decoder(trained):
    from transformers import LlamaConfig, LlamaForCausalLM

    import headwater
    from headwater.hf import convert
    from headwater.hf.formats.names import write_names

    spec, model = trained
    config, mlp = spec.model, model.layers["0"].feed_forward.w1.weight.shape[0]
    adapter = spec.state_dict_adapter(config, None)
    weights = adapter.to_hf(model.state_dict())
    tokens = torch.arange(12).view(2, 6)
    expected = model(tokens)

    shape = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": mlp}
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    llama = LlamaForCausalLM(
        LlamaConfig(
            **shape,
            num_hidden_layers=6,
            num_attention_heads=16,
            num_key_value_heads=16,
            rms_norm_eps=1e-5,
            rope_parameters=rope,
        )
    )
    convert(llama, config.residual, exact=False)
    llama.load_state_dict(weights)
    torch.testing.assert_close(llama.eval()(tokens).logits, expected, rtol=1e-4, atol=1e-4)

    decoder = headwater.Decoder(
        headwater.ModelConfig(
            vocab_size=2048,
            dim=256,
            layers=6,
            heads=16,
            kv_heads=16,
            mlp_dim=mlp,
            context=64,
            norm_eps=1e-5,
            rope_theta=500000.0,
            residual=config.residual,
            tie_embeddings=False,
        )
    )
    native = {}
    for name, tensor in decoder.weights().items():
        [foreign] = write_names({name: tensor}, decoder.config)
        native[name] = weights[foreign]
    decoder.load_weights(native)
    torch.testing.assert_close(decoder(tokens), expected, rtol=1e-4, atol=1e-4)

    again = adapter.from_hf(weights)
    assert again.keys() == model.state_dict().keys()
    torch.testing.assert_close(again, dict(model.state_dict()))


@pytest.mark.parametrize(
    ("residual", "message"),
    [("muddformer", "three inputs"), ("deepnorm", "scales the weights"), ("nothing", "unknown")],
)
def test_a_residual_that_does_not_fit_is_refused(residual, message):
    with pytest.raises(ValueError, match=message):
        spec_without_scaling(residual)


def test_a_model_of_another_family_is_refused():
    from torchtitan.models import gpt_oss

    from headwater.integrations.torchtitan import with_residual

    with pytest.raises(ValueError, match="Llama3, Qwen3, DeepSeekV3; got a GptOssModel"):
        with_residual(gpt_oss.model_registry("debugmodel"), "mhc")


def test_a_release_that_was_not_tested_is_named(monkeypatch):
    from headwater.integrations import torchtitan

    monkeypatch.setattr(torchtitan, "TESTED", "0.2.2")
    with pytest.warns(UserWarning, match=r"tested with torchtitan 0\.2\.2, and this is 0\.3\.0"):
        spec_without_scaling("mhc")
