"""Checkpoint folders converted and reverted from the command line: linked, whole or not at all, however large."""

import json
import os
import subprocess
import sys

import pytest
import torch
from processes import python
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tinyhf import stir, tiny_model, tokens
from tinyrun import tiny
from transformers import AutoModelForCausalLM

from headwater.cli import main
from headwater.errors import UserError
from headwater.hf import Layout, convert, load_delta, save_delta, verify
from headwater.hf.formats import convert as folders
from headwater.hf.formats.folder import load as load_folder
from headwater.hf.formats.folder import load_with_tokenizer
from headwater.hf.formats.shards import ADDED
from headwater.train import load_run, train


@pytest.fixture
def plain(tmp_path):
    model = tiny_model("llama").bfloat16()
    model.save_pretrained(tmp_path / "plain", max_shard_size="40KB")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    (tmp_path / "plain" / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    return tmp_path / "plain"


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


@pytest.mark.parametrize("flags", [[], ["--check", "no"]])
def test_convert_links_and_revert_takes_it_back(plain, tmp_path, capsys, flags):
    out, back = tmp_path / "the out", tmp_path / "back"
    assert (
        main(
            [
                "convert",
                str(plain),
                "--out",
                str(out),
                "--residual",
                "attnres-block:block=2",
                *flags,
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert ("NOT CHECKED" in printed) == bool(flags)
    assert (
        "tokens in bfloat16, some decoded from a cache: hidden states off by" in printed
    ) != bool(flags)
    assert printed.endswith(
        f"{out}: the converted model. To compare: headwater verify {plain} '{out}'\n"
    )
    shards = sorted(plain.glob("*.safetensors"))
    assert len(shards) == 2
    assert all((out / f"plain-{shard.name}").samefile(shard) for shard in shards)
    assert set(load_file(out / ADDED)) == {
        f"model.residual.reads.{i}.{part}" for i in range(1, 9) for part in PARTS
    }
    assert verify(load(out), load(plain), tokens()).equal
    assert load(out).dtype == torch.bfloat16
    assert (out / "tokenizer.json").is_file()
    note = (out / "README.md").read_text()
    assert note.startswith("---\nlicense: mit\n---\n# A model\n")
    assert "import headwater.hf" in note
    assert (
        json.loads((out / "config.json").read_text())["headwater"]["loads_after"]
        == "import headwater.hf"
    )
    assert main(["revert", str(out), "--out", str(back)]) == 0
    assert torch.equal(load(back)(tokens()).logits, load(plain)(tokens()).logits)
    assert json.loads((back / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (back / "README.md").read_text().strip() == (plain / "README.md").read_text().strip()


PARTS = ("query", "key_weight")
HOME = dict(os.environ)


def test_saving_into_a_converted_folder_leaves_the_plain_one_alone(plain, tmp_path):
    out, back = tmp_path / "out", tmp_path / "back"
    load(plain).save_pretrained(tmp_path / "one")
    plain = tmp_path / "one"  # a single file, of the name that saving writes to
    before = load(plain)(tokens()).logits
    folders.convert_folder(plain, out)
    model = load(out)
    stir(model)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1)
    model.save_pretrained(out)
    assert torch.equal(load(plain)(tokens()).logits, before)
    assert torch.equal(load(out)(tokens()).logits, model(tokens()).logits)
    folders.revert_folder(out, back)  # where the added tensors stand among the others
    assert not any(
        "residual" in name for file in back.glob("*.safetensors") for name in load_file(file)
    )
    headwater_free = load(back)
    assert torch.equal(headwater_free.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_dtype_and_layout_flags(plain, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", str(plain), "--out", str(out), "--dtype", "float32"]) == 0
    assert load(out).dtype == torch.float32
    assert main(["verify", str(plain), str(out), "--dtype", "float32", "--tokens", "8"]) == 0
    vault = tmp_path / "vault"
    tiny_model("vaultgemma").save_pretrained(vault)
    layout = '{"mlp_norm": "pre_feedforward_layernorm"}'
    assert main(["convert", str(vault), "--out", str(tmp_path / "v"), "--layout", layout]) == 0
    assert verify(load(tmp_path / "v"), load(vault), tokens()).equal
    capsys.readouterr()
    for given, message in (
        ('{"mlp": ["feed"]}', "does not fit"),
        ('{"mlps": 1}', "a layout has no field mlps"),
        ("nowhere.json", "a layout is JSON or a file of it"),
        ("{", "a layout is JSON or a file of it"),
    ):
        assert main(["convert", str(vault), "--out", str(tmp_path / "w"), "--layout", given]) == 1
        assert message in capsys.readouterr().err


def test_what_was_said_of_a_model_does_not_go_along(plain, tmp_path):
    """Neither pages and scores of another model, nor the code of a residual that is gone."""
    (plain / "eval.json").write_text("{}")
    folders.convert_folder(plain, tmp_path / "out", remote_code=True)
    assert not (tmp_path / "out" / "eval.json").exists()
    for name in ("eval.json", "matrix.html", "report.html"):
        (tmp_path / "out" / name).write_text("of the converted model")
    folders.revert_folder(tmp_path / "out", tmp_path / "back")
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert not names & {"eval.json", "matrix.html", "report.html", "modeling_headwater.py"}
    assert {"README.md", "config.json", "tokenizer.json"} < names


def test_an_interrupted_convert_leaves_nothing(plain, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(folders, "copy_companions", interrupt)
    with pytest.raises(KeyboardInterrupt):
        folders.convert_folder(plain, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path, monkeypatch, capsys):
    train(tiny(tmp_path, steps=2), tmp_path / "run")

    def full(self, folder):
        (folder / "config.json").write_text("{}")
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    assert main(["convert", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 1
    assert f"No space left on device: {tmp_path / 'out'}\n" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_no_checkpoint_is_one_message(plain, tmp_path, capsys):
    def refused(message: str, *words: str) -> None:
        assert main([*words, "--out", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
        assert not (tmp_path / "out").exists()

    bert = tmp_path / "bert"
    tiny_model("bert").save_pretrained(bert)
    refused("'bert' cannot be converted: it is not a decoder", "convert", str(bert))
    (bert / "config.json").write_text(
        '{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}'
    )
    refused("'t5' cannot be converted: it is not a decoder", "convert", str(bert))
    refused("hf download NAME --local-dir FOLDER", "convert", "meta-llama/Llama-3.2-1B")
    refused("is not a checkpoint that headwater has converted", "revert", str(plain))
    (bert / "config.json").write_text("[1]")
    refused("must hold an object, and holds a list", "convert", str(bert))
    (bert / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    refused("transformers cannot read", "convert", str(bert))
    converted = tmp_path / "converted"
    folders.convert_folder(plain, converted)
    refused(
        "is converted already, to 'attnres-block:block=2': headwater revert",
        "convert",
        str(converted),
    )
    (plain / next(plain.glob("model-00002*")).name).unlink()
    refused("lists files that are not there: model-00002", "convert", str(plain), "--check", "no")


def test_garbage_instead_of_a_delta_file(tmp_path):
    path = tmp_path / "delta.safetensors"
    for content in (b"", b"garbage", b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is not a delta file of headwater"):
            load_delta(tiny_model("llama"), path)
    for about in ("{", "[]", '{"residual": "ddl"}'):
        save_file({"a": torch.zeros(1)}, path, metadata={"headwater": about})
        with pytest.raises(UserError, match="the field 'headwater' of its header"):
            load_delta(tiny_model("llama"), path)
    with pytest.raises(UserError, match="is not a delta file"):
        load_delta(tiny_model("llama"), tmp_path / "none")


BIG = """
import json, resource, sys, time
from pathlib import Path
from headwater.hf.formats.convert import convert_folder
begin = time.process_time()
report = convert_folder(Path("plain"), Path("out"))
seconds, gib = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"seconds": seconds, "gib": gib, "report": str(report)}))
"""


def test_a_70b_shape_converts_without_being_loaded(tmp_path):
    """Sparse files of 140 GB. Seconds are of the processor: other tests run beside this one."""
    from transformers import LlamaConfig

    width, inner, words = 8192, 28672, 128256
    shape = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 80,
        "vocab_size": words,
    }
    config = LlamaConfig(
        **shape, num_attention_heads=64, num_key_value_heads=8, architectures=["LlamaForCausalLM"]
    )
    layer = {f"self_attn.{name}_proj": (width if name in "qo" else 1024, width) for name in "qkvo"}
    layer |= {
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    layer |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    sizes = {
        f"model.layers.{i}.{name}.weight": size for i in range(80) for name, size in layer.items()
    }
    sizes |= {
        "model.embed_tokens.weight": (words, width),
        "lm_head.weight": (words, width),
        "model.norm.weight": (width,),
    }
    plain = tmp_path / "plain"
    config.save_pretrained(plain)
    listed = {}
    for number, names in enumerate([list(sizes)[i : i + 100] for i in range(0, len(sizes), 100)]):
        file = plain / f"model-{number}.safetensors"
        header, end = {}, 0
        for name in names:
            begin, end = end, end + 2 * torch.Size(sizes[name]).numel()
            header[name] = {"dtype": "BF16", "shape": sizes[name], "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with file.open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
        listed |= dict.fromkeys(names, file.name)
    (plain / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    found = json.loads(python("-c", BIG, cwd=tmp_path))
    assert found["seconds"] < 10
    assert found["gib"] < 2
    assert "NOT CHECKED: it is on the meta device" in found["report"]
    added = load_file(tmp_path / "out" / ADDED)
    assert len(added) == 320
    assert all(
        tensor.dtype == torch.bfloat16 and tensor.shape == (8192,) for tensor in added.values()
    )


def test_the_layout_of_a_folder_is_known_where_it_is_the_tables(plain, tmp_path):
    folders.convert_folder(plain, tmp_path / "out", layout=Layout())
    assert "layout" in json.loads((tmp_path / "out" / "config.json").read_text())["headwater"]
    again = load(tmp_path / "out")
    reference = load(plain)
    convert(reference)
    assert torch.equal(again(tokens()).logits, reference(tokens()).logits)


REMOTE = """
import builtins, gc, importlib.abc, os, sys
gc.disable()  # nothing that is imported is garbage
class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "headwater":
            raise ImportError("headwater is not installed here")
sys.meta_path.insert(0, Without())
import torch, transformers
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
from safetensors.torch import load_file, save_file
rows = load_file("tokens.safetensors")["tokens"]
for name in sys.argv[1:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
    with torch.no_grad():
        long = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
        found = {"logits": model(rows).logits, "words": model.generate(rows, **long)}
        body = transformers.AutoModel.from_pretrained(name, trust_remote_code=True).eval()
        for module in body.modules():
            if "FinalNorm" in [kind.__name__ for kind in type(module).__mro__]:
                module.__class__ = type(module).__mro__[2]  # a plain norm, as vLLM puts its own there
        found["hidden"] = body(rows).last_hidden_state
        model.config.num_hidden_layers = 2
        save_file(found | {"early": model(rows, use_cache=False).logits}, f"{name}/found.safetensors")
os._exit(0)  # taking all that is imported apart takes a second
"""


def test_remote_code_loads_without_headwater(tmp_path):
    """Pre-norm, norms on both sides, branches side by side, two MLPs with a multiplier, layers that return a pair."""
    types = ("llama", "gemma2", "gpt_neox", "granitemoehybrid", "bloom")
    expected = {}
    for name in types:
        tiny_model(name).save_pretrained(tmp_path / f"{name}-plain")
        out = tmp_path / name
        words = [
            "convert",
            str(tmp_path / f"{name}-plain"),
            "--out",
            str(out),
            "--residual",
            "attnres-block:block=3",
        ]
        assert main([*words, "--remote-code"]) == 0
        model = load(out)  # here headwater's own classes load it
        stir(model)
        save_file(
            {key: p.detach() for key, p in model.named_parameters() if "residual." in key},
            out / ADDED,
        )
        expected[name] = model.eval()
    save_file({"tokens": tokens()}, tmp_path / "tokens.safetensors")
    subprocess.run(
        [sys.executable, "-c", REMOTE, *types],
        cwd=tmp_path,
        check=True,
        env=HOME | {"HF_HOME": str(tmp_path)},
    )
    long = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
    for name, model in expected.items():
        found = load_file(tmp_path / name / "found.safetensors")
        with torch.no_grad():
            torch.testing.assert_close(
                found["logits"], model(tokens()).logits, rtol=1e-4, atol=1e-5
            )
            hidden = model.base_model(tokens()).last_hidden_state
            torch.testing.assert_close(found["hidden"], hidden, rtol=1e-4, atol=1e-5)
        assert torch.equal(found["words"], model.generate(tokens(), **long))
        model.config.num_hidden_layers = (
            2  # as assisted decoding's drafts do; Llama and Gemma stop then
        )
        with torch.no_grad():
            torch.testing.assert_close(
                found["early"], model(tokens(), use_cache=False).logits, rtol=1e-4, atol=1e-5
            )


def test_remote_code_is_added_to_what_was_converted_before_and_trained(plain, tmp_path, capsys):
    """Saved by transformers, as after a training: no modeling file, and one file of weights."""
    model = load(plain)
    convert(model, "attnres-block:block=3")
    stir(model)
    model.save_pretrained(tmp_path / "trained")
    words = ["convert", str(tmp_path / "trained"), "--out", str(tmp_path / "out"), "--remote-code"]
    assert main(words) == 0
    assert "trust_remote_code=True loads it without headwater" in capsys.readouterr().out
    save_file({"tokens": tokens()}, tmp_path / "tokens.safetensors")
    subprocess.run(
        [sys.executable, "-c", REMOTE, "out"],
        cwd=tmp_path,
        check=True,
        env=HOME | {"HF_HOME": str(tmp_path)},
    )
    with torch.no_grad():
        expected = model.eval()(tokens()).logits
    torch.testing.assert_close(
        load_file(tmp_path / "out" / "found.safetensors")["logits"], expected
    )
    assert (
        main([*words[:3], str(tmp_path / "other"), "--remote-code", "--residual", "attnres-full"])
        == 1
    )
    assert "is converted already, to 'attnres-block:block=3'" in capsys.readouterr().err


def test_a_misspelt_residual_is_told_before_anything_is_loaded(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "load", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(UserError, match="unknown residual 'attnres-blok'"):
        folders.convert_folder(plain, tmp_path / "out", "attnres-blok")
    with pytest.raises(
        UserError, match="unknown residual ''"
    ):  # of a script whose variable is empty
        folders.convert_folder(plain, tmp_path / "out", "")


def test_remote_code_refuses_what_its_file_does_not_compute(plain, tmp_path):
    for residual, message in (
        ("ddl", "remote_code knows attnres-block"),
        ("attnres-block:heads=2", "not 'attnres"),
    ):
        with pytest.raises(UserError, match=message):
            folders.convert_folder(plain, tmp_path / "out", residual, remote_code=True)
    assert not (tmp_path / "out").exists()


def flip(path, byte):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_of_weights_or_tokenizer_is_refused(plain, tmp_path):
    """In whatever headwater wrote, and reads again: exports, conversions, what was linked from them, delta files."""
    train(tiny(tmp_path, residual="standard", steps=2), tmp_path / "run")
    for words in (
        ["export", "run", "--out", "own"],
        ["convert", "run", "--out", "theirs"],
        ["convert", "plain", "--out", "converted"],
        ["convert", "theirs", "--out", "linked"],
    ):
        out, folder = tmp_path / words[-1], tmp_path / words[1]
        assert main([words[0], str(folder), "--out", str(out)]) == 0
    for name, file in (
        ("own", "model.safetensors"),
        ("own", "tokenizer.json"),
        ("theirs", "model.safetensors"),
        ("theirs", "tokenizer.json"),
        ("converted", ADDED),
        ("converted", "tokenizer.json"),
        ("linked", "plain-model.safetensors"),
    ):
        read = load_run if name == "own" else load_folder
        path = tmp_path / name / file
        read(tmp_path / name)
        flip(path, -1)
        with pytest.raises(UserError, match=f"{file} is not what was written"):
            read(tmp_path / name)
        flip(path, -1)


def test_no_flipped_bit_of_a_delta_file_passes(tmp_path):
    model, path = tiny_model("llama"), tmp_path / "delta.safetensors"
    convert(model, "attnres-block:block=2")
    stir(model)
    save_delta(model, path)
    expected = model(tokens()).logits
    for byte in range(
        0, path.stat().st_size, 41
    ):  # in the header's numbers, its settings, the tensors
        flip(path, byte)
        other = tiny_model("llama")
        try:
            load_delta(other, path)
        except UserError:
            pass
        else:
            assert torch.equal(other(tokens()).logits, expected)
        flip(path, byte)


def test_an_index_leads_nowhere_else(plain, tmp_path):
    folders.convert_folder(plain, tmp_path / "out")
    victim = tmp_path / "victim.safetensors"
    save_file({"a": torch.ones(2)}, victim)
    index = tmp_path / "out" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["model.residual.reads.1.query"] = "../victim.safetensors"
    index.write_text(json.dumps(listed))
    before = victim.read_bytes()
    with pytest.raises(UserError, match="which is not a file of this folder"):
        folders.revert_folder(tmp_path / "out", tmp_path / "back")
    assert victim.read_bytes() == before


def test_a_tokenizer_that_asks_to_run_code_is_refused(plain, tmp_path, monkeypatch):
    (plain / "code.py").write_text("open('ran', 'w')\nclass T: ...\n")
    asks = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["code.T", None]}}
    (plain / "tokenizer_config.json").write_text(json.dumps(asks))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_with_tokenizer(plain)
    assert not (tmp_path / "ran").exists()
