"""`headwater generate` of a transformers folder prints what the model's own `generate` makes."""

import pytest
import torch
from tinyhf import stir, tiny_model
from tinymodels import model_of

import headwater
from headwater import cli
from headwater.errors import UserError
from headwater.hf.formats.decoder import export_decoder
from headwater.hf.formats.folder import fast_tokenizer, write_model
from headwater.runs.tables import printable

BYTES = fast_tokenizer('{"type": "bytes"}', 64)
NEW = 6


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A converted Llama and the folder it was written to."""
    model, folder = tiny_model("llama", vocab_size=257), tmp_path_factory.mktemp("llama")
    headwater.convert(model, "attnres-block", check=False)
    stir(model)
    write_model(model, BYTES, folder / "folder")
    return model, folder / "folder"


def continuation(model, prompt, **options):
    """The text that the model's own `generate` adds."""
    tokens = BYTES(prompt, return_tensors="pt")
    sizes = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    (row,) = model.generate(**tokens, **{**sizes, **options})
    return BYTES.decode(row, skip_special_tokens=True)[len(prompt) :]


def shown(capsys, folder, *flags):
    prompt = () if "--prompt" in flags else ("--prompt", "def ")
    cli.generate([str(folder), "--max-new-tokens", str(NEW), *prompt, *flags])
    return capsys.readouterr()


def test_greedy_texts_of_one_prompt_and_several(converted, capsys):
    model, folder = converted
    one, other = (continuation(model, prompt) for prompt in ("def ", "class A"))
    assert shown(capsys, folder, "--temperature", "0").out == printable(f"def {one}\n")
    both = shown(capsys, folder, "--prompt", "def ", "class A", "--temperature", "0")
    assert both.out == printable(f"[def ] {one}\n[class A] {other}\n")
    assert "12 tokens in " in both.err
    assert shown(capsys, folder, "--temperature", "0", "--stream").out == printable(f"def {one}\n")


def test_flags_reach_the_draw(converted, capsys):
    model, folder = converted
    draws = {"do_sample": True, "temperature": 2.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
    torch.manual_seed(3)
    text = continuation(model, "def ", **draws, repetition_penalty=1.5)
    words = "--temperature 2 --top-k 9 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.5 --seed 3"
    assert shown(capsys, folder, *words.split(), "--prefill-chunk", "2").out == printable(
        f"def {text}\n"
    )


def test_a_stop_word_ends_the_text_and_is_not_shown(converted, capsys):
    model, folder = converted
    text = continuation(model, "def ")
    cut = text.partition(text[2])[0]
    assert shown(capsys, folder, "--temperature", "0", "--stop", text[2]).out == printable(
        f"def {cut}\n"
    )


def test_an_exported_decoder_reads_everything_again(tmp_path, capsys):
    decoder = model_of("attnres-block", scatter=True, vocab_size=257)
    model = export_decoder(decoder.config, decoder.weights(), None)
    write_model(model, BYTES, tmp_path / "folder")
    (row,) = headwater.generate(decoder, [BYTES("def ")["input_ids"]], NEW, temperature=0.0)
    text = BYTES.decode(row, skip_special_tokens=True)
    assert shown(capsys, tmp_path / "folder", "--temperature", "0").out == printable(f"{text}\n")


def test_ranks_divide_runs_only(converted):
    with pytest.raises(UserError, match="--tensor divides the models of runs"):
        cli.generate([str(converted[1]), "--tensor", "2"])
