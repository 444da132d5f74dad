"""Converted transformers models can be looked into as our own decoder can."""

import json
import re

import pytest
import torch
from tinyhf import converted, logits, stir, tiny_model, tokens

import headwater
from headwater.errors import UserError
from headwater.hf.formats.folder import fast_tokenizer, write_model
from headwater.train.data.tokenizer import ByteTokenizer

WITHIN = {"atol": 1e-5, "rtol": 0}


HEADS = {  # what stands between the final norm and the logits
    "llama": {},
    "gemma2": {},
    "granite": {},
    "cohere": {},
    "inkling_text": {"vocab_size": 80, "unpadded_vocab_size": 70},
    "modernbert-decoder": {},
    "recurrent_gemma": {"logits_soft_cap": 0.5},
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_converted_model_is_read_as_it_computes(kind):
    model, ids = tiny_model(kind, num_hidden_layers=2, **HEADS[kind]), tokens(1, 6)
    headwater.convert(model, "attnres-full")
    (note,) = headwater.inspect(model, ids, removals="none").notes
    assert note.startswith("Converted and not trained")
    stir(model)
    look = headwater.inspect(model, ids, top=4)
    assert look.notes == ()
    with torch.no_grad():
        out = model(ids, output_depth_weights=True)
    assert len(look.kinds) == len(out.depth_weights) - 1
    for i, expected in enumerate(out.depth_weights):
        torch.testing.assert_close(look.mixing[i, : i + 1], expected[:, 0, :, 0], **WITHIN)
    top = out.logits[0].softmax(-1).topk(4)  # the last read says what the model says
    torch.testing.assert_close(look.reads.probabilities[-1], top.values, **WITHIN)
    assert torch.equal(look.reads.ids[-1], top.indices)
    loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:], reduction="none")
    torch.testing.assert_close(look.loss, loss, **WITHIN)
    assert look.removed.loss.abs().max() > 1e-3
    # The newest source is seen by the head alone: away there is away everywhere.
    newest = look.pairs.index((len(look.kinds), len(look.kinds)))
    torch.testing.assert_close(look.removed_at.loss[newest], look.removed.loss[-1], **WITHIN)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_experts_of_a_converted_model_are_those_that_it_runs(kind):
    model, ids = converted("attnres-full", kind, num_hidden_layers=2), tokens(1, 6)
    look = headwater.inspect(model, ids, removals="none")
    calls = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            experts = layer.mlp.experts
            experts.register_forward_pre_hook(lambda _, inputs: calls.append(inputs))
    logits(model, ids)
    assert [k for i, k in enumerate(look.kinds) if i in look.experts] == ["moe"] * len(calls)
    assert list(look.experts)[-1] == 3
    for look_at, (_, chosen, weights) in zip(look.experts.values(), calls, strict=True):
        expected, order = weights.sort(-1, descending=True)
        assert torch.equal(look_at.ids, chosen.gather(-1, order))
        torch.testing.assert_close(look_at.probabilities, expected, **WITHIN)


def test_what_cannot_be_read_as_it_computes_is_refused():
    with pytest.raises(UserError, match="convert it first"):
        headwater.inspect(tiny_model("llama", num_hidden_layers=1), tokens(1, 4))
    model = converted("attnres-full", num_hidden_layers=1)

    def shift(_module, _inputs, outputs):
        outputs.logits = outputs.logits + 0.005

    model.register_forward_hook(shift)
    with pytest.raises(UserError, match=r"differ by 0\.005"):
        headwater.inspect(model, tokens(1, 4), removals="none")


def test_half_precision_can_be_looked_at():
    model = tiny_model("llama", num_hidden_layers=2).to(torch.bfloat16)
    headwater.convert(model, "attnres-block:block=2")
    look = headwater.inspect(model, tokens(1, 6))
    # bf16 weights
    torch.testing.assert_close(look.mixing[-1], torch.full((5, 6), 1 / 3), atol=5e-3, rtol=0)


TOKENIZER = fast_tokenizer(ByteTokenizer().to_json(), 64)


@pytest.fixture
def folder(tmp_path):
    """Writes a converted model, or a plain one, with its tokenizer."""

    def write(name, residual=None, layers=2, amount=0.5):
        model = tiny_model("llama", num_hidden_layers=layers, vocab_size=257)
        if residual is not None:
            headwater.convert(model, residual, check=False)
            stir(model, amount)
        write_model(model, TOKENIZER, tmp_path / name)
        return model.eval()

    return write


def test_the_command_reads_a_converted_folder_and_refuses_a_plain_one(folder, tmp_path, command):
    folder("plain")
    folder("converted", "attnres-full", amount=0.0)
    page = tmp_path / "inspect.html"
    command("inspect", tmp_path / "converted", "--prompt", "a river", "--out", page)
    assert "Converted and not trained" in page.read_text()
    error = command("inspect", tmp_path / "plain", "--prompt", "a river", "--out", page, code=1)
    assert "headwater convert" in error


def test_a_report_takes_converted_folders_and_a_prompt(folder, tmp_path, command):
    """Beside each other, named by their folders; what the page draws is what the model says of itself."""
    model = folder("full", "attnres-full")
    folder("block", "attnres-block:block=2")
    folder("plain")
    page, ids = tmp_path / "page.html", torch.tensor([TOKENIZER("a river")["input_ids"]])
    folders = [tmp_path / "full", tmp_path / "block"]
    command("report", *folders, "--prompt", "a river", "--out", page)
    text = page.read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text).group(1))
    maps = {group["label"]: group["depth"]["frames"][-1]["mixing"] for group in data["groups"]}
    assert maps.keys() == {"full", "block"}
    with torch.no_grad():
        depth_weights = model(ids, output_depth_weights=True).depth_weights
    expected = torch.cat([weights.mean(dim=(1, 2, 3)) for weights in depth_weights])
    # To as many digits as the page keeps
    values = torch.tensor(maps["full"][: len(expected)], dtype=torch.float32)
    torch.testing.assert_close(values, expected, rtol=0, atol=6e-4)
    assert "one forward pass over a prompt of 7 tokens" in text
    assert "<dt>Model</dt>" in text
    assert "<dt>Corpus</dt>" not in text  # it has none
    assert "headwater convert" in command("report", tmp_path / "plain", code=1)
