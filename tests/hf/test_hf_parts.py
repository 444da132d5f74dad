"""Models with a language model inside: vision-language models and classifiers, converted and saved as a whole."""

import pytest
import torch
from tinyhf import VOCAB, load_elsewhere, stir, tiny_config, tiny_model, tokens
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    CLIPVisionConfig,
    LlavaConfig,
    Qwen2VLConfig,
)

from headwater.hf import convert, revert
from headwater.hf.convert.depth import DepthState

IMAGE = 5  # a token that stands for a patch


def rows_with_image(count):
    rows = tokens().masked_fill(tokens() == IMAGE, 6)
    rows[:, 1 : 1 + count] = IMAGE
    return rows


def llava():
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        text_config=tiny_config("llama"),
        image_token_id=IMAGE,
    )
    return config, {"input_ids": rows_with_image(4), "pixel_values": torch.randn(2, 3, 8, 8)}


def qwen2_vl():
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = tiny_config("qwen2").to_dict() | {"model_type": "qwen2_vl_text", "rope_parameters": rope}
    config = Qwen2VLConfig(
        vision_config={**vision, "spatial_merge_size": 2}, text_config=text, image_token_id=IMAGE
    )
    rows = rows_with_image(2)
    return config, {
        "input_ids": rows,
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 2, 4]] * 2),
        "mm_token_type_ids": (rows == IMAGE).int(),
    }


@torch.no_grad()
def loads_in_a_new_process(model, inputs, auto, folder):
    model.save_pretrained(folder / "model")
    loaded = load_elsewhere(folder, inputs, {"model": None}, auto)["model"]["logits"]
    # Not to the bit: after a product in bf16, torch takes another library for fp32 on some machines, per process.
    torch.testing.assert_close(loaded, model(**inputs).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [llava, qwen2_vl])
def test_the_text_part_of_a_vision_language_model(build, tmp_path):
    torch.manual_seed(0)
    config, inputs = build()
    model = AutoModelForImageTextToText.from_config(config).eval()
    before = model.config
    with torch.no_grad():
        plain = model(**inputs).logits
        report = convert(model)
        assert report.difference < 1e-5
        assert report.sites[0].startswith("model.language_model.layers.0.self_attn: sublayer 0")
        torch.testing.assert_close(model(**inputs).logits, plain, rtol=1e-4, atol=1e-5)
        stir(model)
        out = model(**inputs, output_depth_weights=True)
    assert not torch.allclose(out.logits, plain, atol=1e-3)
    assert len(out.depth_weights) == 9
    assert model.config.text_config is model.model.language_model.config
    loads_in_a_new_process(model, inputs, "AutoModelForImageTextToText", tmp_path)
    revert(model)
    assert model.config is before
    assert torch.equal(model(**inputs).logits, plain)


def test_a_stream_that_is_changed_between_layers_is_named():
    """Qwen3-VL does so with image features; else its code fails somewhere."""
    with pytest.raises(AttributeError, match="this model changes its stream there"):
        DepthState((torch.zeros(1),), 0).device  # noqa: B018


def test_a_classifier_loads_again(tmp_path):
    model = AutoModelForSequenceClassification.from_config(tiny_config("qwen3")).eval()
    convert(model)
    stir(model)
    auto = "AutoModelForSequenceClassification"
    loads_in_a_new_process(model, {"input_ids": tokens()}, auto, tmp_path)


def language_model():
    return tiny_model("llama")


def vision_language_model():
    return AutoModelForImageTextToText.from_config(llava()[0])


@pytest.mark.parametrize("build", [language_model, vision_language_model])
def test_a_vocabulary_that_was_resized_stays_so_when_the_model_is_reverted(build):
    model = build()
    before = model.config
    convert(model)
    model.resize_token_embeddings(VOCAB + 9)
    revert(model)
    assert model.config.get_text_config().vocab_size == VOCAB + 9
    assert model.get_input_embeddings().weight.shape[0] == VOCAB + 9
    assert before.get_text_config().vocab_size == VOCAB  # other models may share it
    assert not hasattr(model.config, "headwater")
    configs = [getattr(module, "config", None) for module in model.modules()]
    assert not any(config and config.model_type.startswith("headwater") for config in configs)
