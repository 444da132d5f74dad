"""Converted transformers models can be looked into as our own decoder can."""

import json
import re

import pytest
import torch
from tinyhf import stir, tiny_model, tokens

import headwater
from headwater.cli import main
from headwater.errors import UserError
from headwater.hf.formats.folder import fast_tokenizer, write_model
from headwater.train.data.tokenizer import ByteTokenizer

WITHIN = {"atol": 1e-5, "rtol": 0}


def direct(model, ids):
    """Depth weights and logits by the public way of a converted model."""
    with torch.no_grad():
        outputs = model(ids, output_depth_weights=True)
    return outputs.depth_weights, outputs.logits


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
    found = headwater.inspect(model, ids, top=4)
    assert found.notes == ()
    weights, logits = direct(model, ids)
    assert len(found.kinds) == len(weights) - 1
    for i, expected in enumerate(weights):
        torch.testing.assert_close(found.mixing[i, : i + 1], expected[:, 0, :, 0], **WITHIN)
    top = logits[0].softmax(-1).topk(4)  # the last read says what the model says
    torch.testing.assert_close(found.reads.probabilities[-1], top.values, **WITHIN)
    assert torch.equal(found.reads.ids[-1], top.indices)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    torch.testing.assert_close(found.loss, loss, **WITHIN)
    assert found.removed.loss.abs().max() > 1e-3
    sources = len(found.kinds) + 1
    last = [found.pairs.index((sources - 1, source)) for source in (sources - 1,)]
    # The newest source is seen by the head alone: away there is away everywhere.
    torch.testing.assert_close(found.removed_at.loss[last], found.removed.loss[-1:], **WITHIN)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_experts_of_a_converted_model_are_those_that_it_runs(kind):
    model, ids = tiny_model(kind, num_hidden_layers=2), tokens(1, 6)
    headwater.convert(model, "attnres-full")
    stir(model)
    found = headwater.inspect(model, ids, removals="none")
    ran = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(lambda _, inputs: ran.append(inputs))
    with torch.no_grad():
        model(ids)
    assert [k for i, k in enumerate(found.kinds) if i in found.experts] == ["moe"] * len(ran)
    assert list(found.experts)[-1] == 3
    for one, (_, chosen, weights) in zip(found.experts.values(), ran, strict=True):
        expected, order = weights.sort(-1, descending=True)
        assert torch.equal(one.ids, chosen.gather(-1, order))
        torch.testing.assert_close(one.probabilities, expected, **WITHIN)


def test_a_plain_model_is_refused_with_advice():
    with pytest.raises(UserError, match="convert it first"):
        headwater.inspect(tiny_model("llama", num_hidden_layers=1), tokens(1, 4))


def test_a_model_that_does_more_after_its_norm_than_is_known_is_refused_by_how_much():
    model, ids = tiny_model("llama", num_hidden_layers=1), tokens(1, 4)
    headwater.convert(model, "attnres-full", check=False)

    def shift(_module, _inputs, outputs):
        outputs.logits = outputs.logits + 0.005

    model.register_forward_hook(shift)
    with pytest.raises(UserError, match=r"they are 0.005 apart.* headwater.mixing"):
        headwater.inspect(model, ids, removals="none")


def test_half_precision_can_be_looked_at():
    model = tiny_model("llama", num_hidden_layers=2).to(torch.bfloat16)
    headwater.convert(model, "attnres-block:block=2")
    found = headwater.inspect(model, tokens(1, 6))
    torch.testing.assert_close(
        found.mixing[-1], torch.full((5, 6), 1 / 3), atol=5e-3, rtol=0
    )  # bf16 weights


def test_the_command_reads_a_converted_folder_and_refuses_a_plain_one(tmp_path, capsys):
    plain = tiny_model("llama", num_hidden_layers=1, vocab_size=257)
    tokenizer = fast_tokenizer(ByteTokenizer().to_json(), 64)
    write_model(plain, tokenizer, tmp_path / "plain")
    headwater.convert(plain, "attnres-full")
    write_model(plain, tokenizer, tmp_path / "converted")
    page = tmp_path / "inspect.html"
    assert (
        main(["inspect", str(tmp_path / "converted"), "--prompt", "a river", "--out", str(page)])
        == 0
    )
    assert "Converted and not trained" in page.read_text()
    assert (
        main(["inspect", str(tmp_path / "plain"), "--prompt", "a river", "--out", str(page)]) == 1
    )
    assert "headwater convert" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["matrix", "report"])
def test_reports_and_matrices_take_a_converted_folder_and_a_prompt(command, tmp_path, capsys):
    """Beside each other, named by their folders; what the page draws is what the model says of itself."""
    tokenizer, expected = fast_tokenizer(ByteTokenizer().to_json(), 64), {}
    for name, residual in (("full", "attnres-full"), ("block", "attnres-block:block=2")):
        model = tiny_model("llama", num_hidden_layers=2, vocab_size=257)
        headwater.convert(model, residual, check=False)
        stir(model)
        write_model(model, tokenizer, tmp_path / name)
        ids = torch.tensor([tokenizer("a river")["input_ids"]])
        expected[name] = [weights.mean(dim=(1, 2, 3)) for weights in direct(model.eval(), ids)[0]]
    page = tmp_path / "page.html"
    folders = [str(tmp_path / name) for name in expected]
    assert main([command, *folders, "--prompt", "a river", "--out", str(page)]) == 0
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text()).group(1))
    drawn = {group["label"]: group["depth"]["frames"][-1]["mixing"] for group in data["groups"]}
    assert drawn.keys() == expected.keys()
    rows = [drawn["full"][r * (r + 1) // 2 : (r + 1) * (r + 2) // 2] for r in range(5)]
    for row, weights in zip(rows, expected["full"], strict=True):
        shown = torch.tensor(row, dtype=torch.float32)  # to as many digits as the page keeps
        torch.testing.assert_close(
            shown, weights, rtol=0, atol=6e-4 if command == "report" else 6e-5
        )
    assert "one forward pass over a prompt of 7 tokens" in page.read_text()
    assert "<dt>Model</dt>" in page.read_text()
    assert "<dt>Corpus</dt>" not in page.read_text()  # it has none
    capsys.readouterr()
    headwater.revert(model)
    write_model(model, tokenizer, tmp_path / "plain")
    assert main([command, str(tmp_path / "plain")]) == 1
    assert "headwater convert" in capsys.readouterr().err
