"""Models of transformers that were released with a learned residual: opened, they compute what they did, and can be
looked into."""

import copy

import pytest
import torch
from tinyhf import greedy, load_elsewhere, logits, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import headwater
from headwater.errors import UserError
from headwater.hf import RELEASES, open_residual, revert
from headwater.hf.convert.install import conversion_of
from headwater.hf.convert.registration import own_config
from headwater.hf.formats.folder import fast_tokenizer, load, write_model
from headwater.hf.same_function import relative_distance
from headwater.residuals import mixing, record
from headwater.train.data.tokenizer import ByteTokenizer

INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
INKLING2 = {"vocab_size": 80, "unpadded_vocab_size": 70, "sliding_window_size": 8, "d_rel": 4}
INKLING2 |= {"rel_extent": 16, "log_scaling_n_floor": 4}
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
DEEPSEEK = {
    **INDEXER,
    "compress_rates": RATES,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
}
LINEAR = ["linear_attention", "indexed_attention", "linear_attention"]
GLM = {**INDEXER, "index_kpool": 2, "num_key_value_heads": 4, "head_dim": 0}
GLM |= {"qk_rope_head_dim": 0, "linear_head_dim": 8, "linear_num_heads": 4}
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
VISION |= {"out_hidden_size": 32, "projection_intermediate_size": 16}
QWEN = {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
QWEN |= {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
QWEN |= {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
QWEN |= {"indexer_budget": 4, "indexer_compress_ratio": 2, "layer_types": LINEAR}
NGRAMS = {"ple_layer_ids": [1, 3], "ple_embed_dim": 16, "heads_per_ngram": 2}
NGRAMS |= {"ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8}
# Two shapes of each; eps that would show if they were forgotten.
SHAPES = {
    "inkling2_text": (
        {
            **INKLING2,
            "n_layers_per_attn_res_block": 2,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        },
        {
            **INKLING2,
            "hidden_size": 48,
            "n_layers_per_attn_res_block": 6,
            "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"],
        },
    ),
    "deepseek_v4": (
        {
            **DEEPSEEK,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "hc_eps": 0.01,
            "mlp_layer_types": ["hash_moe", "moe", "hash_moe"],
        },
        {**DEEPSEEK, "hidden_size": 48, "mlp_layer_types": ["moe", "moe"]},
    ),
    "hy_v4": (
        {**INDEXER, "num_key_value_heads": 4, "hc_mult": 3, "hc_magnitude": 1.5, "hc_eps": 0.01},
        {**INDEXER, "num_key_value_heads": 4, "hidden_size": 48, "num_hidden_layers": 3},
    ),
    "glm5_next_text": (
        {
            **GLM,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "hc_eps": 0.01,
            "layer_types": LINEAR,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        {**GLM, "layer_types": LINEAR[:2], "mlp_layer_types": ["sparse", "sparse"]},
    ),
    "qwen4_exp_text": (
        {**QWEN, "hc_count": 3, "hc_lowrank": 5, "rms_norm_eps": 0.1},
        {**QWEN, **NGRAMS, "hidden_size": 48, "hc_lowrank": 4},
    ),
}
CASES = [pytest.param(kind, shape, id=f"{kind}-{shape}") for kind in SHAPES for shape in (0, 1)]
ROWS = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(1))


def released(kind, shape=0, **sizes):
    """A small model whose every weight is away from where it starts."""
    if kind not in CONFIG_MAPPING_NAMES:
        pytest.skip("transformers has it from 5.23 on")
    settings = SHAPES[kind][shape] | sizes
    for name in ("layer_types", "mlp_layer_types"):
        if name in settings:
            settings["num_hidden_layers"] = len(settings[name])
    torch.manual_seed(shape)
    model = built(tiny_config(kind, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # which experts a token of the vocabulary has
                buffer.random_(0, 4)
            if name.endswith("correction_bias"):
                buffer.normal_(std=0.1)
    return model


def built(config):
    # GLM-5.3 has its language model inside of one with images.
    if config.model_type != "glm5_next_text":
        return AutoModelForCausalLM.from_config(config)
    marks = ("image_token", "image_start_token", "image_end_token")
    marks += ("video_token", "video_start_token", "video_end_token")
    ids = {f"{mark}_id": 60 + i for i, mark in enumerate(marks)}
    whole = own_config("glm5_next")(text_config=config, vision_config=VISION, **ids)
    return AutoModelForMultimodalLM.from_config(whole)


def residual_of(model):
    return conversion_of(model)[0].depth.residual


def gradients(model):
    model(ROWS, labels=ROWS).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_an_opened_model_computes_what_it_did_and_so_do_its_gradients(kind, shape):
    model = released(kind, shape)
    expected, tokens = logits(model, ROWS), greedy(model, ROWS, 32)
    desired = gradients(copy.deepcopy(model))
    before = copy.deepcopy(model.state_dict())
    report = open_residual(model)
    assert report.difference < 1e-5
    assert report.residual == residual_of(model).spec
    assert (logits(model, ROWS) - expected).abs().max() < 1e-6 * expected.abs().max()
    assert torch.equal(greedy(model, ROWS, 32), tokens)

    revert(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    # Reverted, transformers' own modules have what stands in the residual: here its gradients.
    open_residual(model, check=False)
    rest = gradients(model)
    with torch.no_grad():
        for parameter in residual_of(model).parameters():
            parameter.copy_(parameter.grad)
    revert(model)
    for name, parameter in model.named_parameters():
        gradient = rest.get(name, parameter.detach())
        # An indexer chooses, and learns nothing by it; there is no image.
        if desired[name] is None:
            assert ".indexer." in name or "visual" in name
            assert gradient is None
            continue
        scale = float(desired[name].abs().max())
        assert (gradient - desired[name]).abs().max() <= 1e-4 * scale + 1e-8, name


@pytest.mark.parametrize("kind", SHAPES)
def test_in_bf16_it_is_no_further_from_fp32_than_twice_theirs(kind, tmp_path):
    """Loaded from shards, saved and loaded again by headwater's own type."""
    released(kind).bfloat16().save_pretrained(tmp_path / "bf16", max_shard_size="50KB")
    assert len([*(tmp_path / "bf16").glob("*.safetensors")]) > 1
    truth = logits(load(tmp_path / "bf16", "float32"), ROWS)
    theirs, model = load(tmp_path / "bf16"), load(tmp_path / "bf16")
    open_residual(model)
    ours = logits(model, ROWS)
    # A token may go to another expert by rounding.
    distances = [
        relative_distance(x.flatten(0, 1).float(), truth.flatten(0, 1)).median()
        for x in (ours, logits(theirs, ROWS))
    ]
    assert 0 < distances[0] <= 2 * distances[1]

    model.save_pretrained(tmp_path / "opened")
    again = load(tmp_path / "opened")
    assert type(again).__name__ == f"Headwater{type(theirs).__name__}"
    assert torch.equal(logits(again, ROWS), ours)
    revert(again)
    torch.testing.assert_close(again.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("auto", ["AutoModelForCausalLM", "AutoModelForMultimodalLM"])
def test_a_new_process_loads_opened_models(auto, tmp_path):
    expected = {}
    for kind in SHAPES:
        if (kind == "glm5_next_text") == (auto == "AutoModelForMultimodalLM"):
            model = released(kind)
            open_residual(model, check=False)
            model.save_pretrained(tmp_path / kind)
            expected[kind] = logits(model, ROWS)
    loaded = load_elsewhere(tmp_path, {"input_ids": ROWS}, dict.fromkeys(expected), auto)
    for kind, values in expected.items():
        torch.testing.assert_close(loaded[kind]["logits"], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", SHAPES)
def test_what_it_reads_can_be_looked_at(kind):
    model = released(kind)
    with pytest.raises(UserError, match="open_residual"):
        headwater.inspect(model, ROWS[:1])
    with pytest.raises(UserError, match=r"headwater\.hf\.open_residual opens it"):
        headwater.convert(model, "attnres-block")
    open_residual(model, check=False)
    residual = residual_of(model)
    with torch.no_grad(), record(residual) as trace:
        model(ROWS)
    # The mixing matrix, applied to the sources, gives the reads; of gated ones it is an average.
    matrix = mixing(residual, trace.sources)
    assert residual.mixes == ("channel" if kind == "qwen4_exp_text" else "scalar")
    for weights, read in zip(matrix, trace.reads, strict=True):
        whole = sum(w[..., None] * v for w, v in zip(weights, trace.sources, strict=True))
        query = read[0] if isinstance(read, tuple) else read
        if residual.mixes == "scalar":
            near = 1e-4 * float(query.abs().max())
            torch.testing.assert_close(whole, query, rtol=1e-4, atol=near)
    look = headwater.inspect(model, ROWS[:1, :8], removals="pairs")
    assert look.notes == ()
    assert look.removed_at.loss.abs().max() > 1e-3
    torch.testing.assert_close(look.mixing, matrix_of(model, ROWS[:1, :8]), rtol=1e-4, atol=1e-5)


def matrix_of(model, rows):
    with torch.no_grad(), record(residual_of(model)) as trace:
        model(rows)
    return mixing(residual_of(model), trace.sources)[:, :, 0]


@pytest.mark.parametrize("kind", ["inkling2_text", "deepseek_v4"])
def test_commands_open_a_folder_and_revert_an_opened_one(kind, tmp_path, command):
    sizes = {"vocab_size": 257}
    if kind == "inkling2_text":
        sizes["unpadded_vocab_size"] = 257
    model, tokenizer = released(kind, 1, **sizes), fast_tokenizer(ByteTokenizer().to_json(), 64)
    write_model(model, tokenizer, tmp_path / "folder")
    page = tmp_path / "page.html"
    shown = {"inspect": RELEASES[kind].residual, "report": "over a prompt of 7 tokens"}
    for name, text in shown.items():
        command(name, tmp_path / "folder", "--prompt", "a river", "--out", page)
        assert text in page.read_text()
    error = command("convert", tmp_path / "folder", "--out", tmp_path / "other", code=1)
    assert "open_residual" in error
    expected = model.state_dict()
    open_residual(model, check=False)
    write_model(model, tokenizer, tmp_path / "opened")
    command("revert", tmp_path / "opened", "--out", tmp_path / "again")
    torch.testing.assert_close(load(tmp_path / "again").state_dict(), expected, rtol=0, atol=0)


def test_n_grams_that_are_added_between_sublayers_are_not_hidden():
    model = released("qwen4_exp_text", 1)
    assert str(open_residual(model)).count("after ple has added to all streams") == 2
    with pytest.raises(UserError, match="must add something to its streams in between"):
        headwater.inspect(model, ROWS[:1])


def test_a_plain_model_has_nothing_to_open():
    with pytest.raises(UserError, match="has the plain residual"):
        open_residual(tiny_model("llama"))
