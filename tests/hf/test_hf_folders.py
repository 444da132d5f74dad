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
from tinyhf import agree, converted, greedy, load, logits, same, stir, tiny_model, tokens
from tinyrun import tiny
from transformers import LlamaConfig

from headwater.errors import UserError
from headwater.hf import Layout, load_delta, save_delta
from headwater.hf.formats import convert as folders
from headwater.hf.formats.folder import load as load_folder
from headwater.hf.formats.folder import load_with_tokenizer
from headwater.hf.formats.shards import ADDED
from headwater.train import load_run, train

HOME = dict(os.environ)


@pytest.fixture
def plain(tmp_path):
    folder = tmp_path / "plain"
    tiny_model("llama").bfloat16().save_pretrained(folder, max_shard_size="40KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    return folder


@pytest.mark.parametrize("flags", [[], ["--check", "no"]])
def test_convert_links_and_revert_takes_it_back(plain, tmp_path, command, flags):
    out, back = tmp_path / "the out", tmp_path / "back"
    spec = "attnres-block:block=2"
    printed = command("convert", plain, "--out", out, "--residual", spec, *flags)
    assert ("NOT CHECKED" in printed) == bool(flags)
    assert ("tokens in bfloat16, some decoded from a cache" in printed) != bool(flags)
    assert printed.endswith(f"To compare: headwater verify {plain} '{out}'\n")
    shards = sorted(plain.glob("*.safetensors"))
    assert len(shards) == 2
    assert all((out / f"plain-{shard.name}").samefile(shard) for shard in shards)
    reads = [f"model.residual.reads.{i}" for i in range(1, 9)]
    added = {f"{read}.{part}" for read in reads for part in ("query", "key_weight")}
    assert set(load_file(out / ADDED)) == added
    assert agree(load(out), load(plain))
    assert load(out).dtype == torch.bfloat16
    other = load(plain)
    load_delta(other, out / ADDED)  # what was added is a delta file
    assert same(other, load(out))
    readmes = [(folder / "README.md").read_text() for folder in (plain, out)]
    assert readmes[1].startswith(readmes[0])
    assert "import headwater.hf" in readmes[1]
    about = json.loads((out / "config.json").read_text())["headwater"]
    assert about["loads_after"] == "import headwater.hf"
    command("revert", out, "--out", back)
    assert same(load(back), load(plain))
    assert json.loads((back / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (back / "README.md").read_text().strip() == readmes[0].strip()


def test_saving_into_a_converted_folder_leaves_the_plain_one_alone(plain, tmp_path):
    one, out, back = tmp_path / "one", tmp_path / "out", tmp_path / "back"
    load(plain).save_pretrained(one)  # a single file, of the name that saving writes to
    before = logits(load(one))
    folders.convert_folder(one, out)
    model = load(out)
    stir(model)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1)
    model.save_pretrained(out)
    assert torch.equal(logits(load(one)), before)
    assert same(load(out), model)
    folders.revert_folder(out, back)  # where the added tensors stand among the others
    names = {name for file in back.glob("*.safetensors") for name in load_file(file)}
    assert not any("residual" in name for name in names)
    assert torch.equal(load(back).model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_dtype_and_layout_flags(plain, tmp_path, command):
    out, vault = tmp_path / "out", tmp_path / "vault"
    command("convert", plain, "--out", out, "--dtype", "float32")
    assert load(out).dtype == torch.float32
    command("verify", plain, out, "--dtype", "float32", "--tokens", "8")
    tiny_model("vaultgemma").save_pretrained(vault)
    layout = '{"mlp_norm": "pre_feedforward_layernorm"}'
    command("convert", vault, "--out", tmp_path / "v", "--layout", layout)
    assert agree(load(tmp_path / "v"), load(vault))
    for text, message in (
        ('{"mlp": ["feed"]}', "does not fit"),
        ('{"mlps": 1}', "a layout is JSON or a file of it"),
        ("nowhere.json", "a layout is JSON or a file of it"),
    ):
        error = command("convert", vault, "--out", tmp_path / "w", "--layout", text, code=1)
        assert message in error


def test_what_is_about_another_model_does_not_go_along(plain, tmp_path):
    """Neither pages and scores of another model, nor the code of a residual that is gone."""
    about = {"eval.json", "report.html"}
    (plain / "eval.json").write_text("{}")
    out, back = tmp_path / "out", tmp_path / "back"
    folders.convert_folder(plain, out, remote_code=True)
    assert not (out / "eval.json").exists()
    for name in about:
        (out / name).write_text("of the converted model")
    folders.revert_folder(out, back)
    names = {path.name for path in back.iterdir()}
    assert not names & {*about, "modeling_headwater.py"}
    assert {"README.md", "config.json", "tokenizer.json"} < names


def test_an_interrupted_convert_leaves_nothing(plain, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(folders, "copy_companions", interrupt)
    with pytest.raises(KeyboardInterrupt):
        folders.convert_folder(plain, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path, monkeypatch, command):
    train(tiny(tmp_path, steps=2), tmp_path / "run")

    def full(self, folder):
        (folder / "config.json").write_text("{}")
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    error = command("convert", tmp_path / "run", "--out", tmp_path / "out", code=1)
    assert f"No space left on device: {tmp_path / 'out'}\n" in error
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_no_checkpoint_is_one_message(plain, tmp_path, command):
    out, bert, twice = tmp_path / "out", tmp_path / "bert", tmp_path / "converted"

    def refused(message, *words):
        assert message in command(*words, "--out", out, code=1)
        assert not out.exists()

    tiny_model("bert").save_pretrained(bert)
    refused("'bert' cannot be converted: it is not a decoder", "convert", bert)
    refused("hf download NAME --local-dir FOLDER", "convert", "meta-llama/Llama-3.2-1B")
    refused("not a model that headwater.convert has converted", "revert", plain)
    for text, message in (
        ("{", "is damaged"),
        ('{"model_type": "llama", "hidden_size": "many"}', "cannot load"),
    ):
        (bert / "config.json").write_text(text)
        refused(message, "convert", bert)
    folders.convert_folder(plain, twice)
    refused("already converted, to 'attnres-block:block=2'", "convert", twice)
    next(plain.glob("model-00002*")).unlink()
    refused("No such file or directory: ", "convert", plain, "--check", "no")
    with pytest.raises(UserError, match="unknown residual 'attnres-blok'"):
        folders.convert_folder(plain, out, "attnres-blok")


def test_what_is_no_delta_file_is_refused(tmp_path):
    path = tmp_path / "delta.safetensors"
    path.write_bytes(b"garbage")
    with pytest.raises(UserError, match="is not a delta file of headwater"):
        load_delta(tiny_model("llama"), path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="is not a delta file of headwater"):
        load_delta(tiny_model("llama"), path)


BIG = """
import json, resource, time
from pathlib import Path
from headwater.hf.formats.convert import convert_folder
begin = time.process_time()
report = convert_folder(Path("plain"), Path("out"))
seconds, gib = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"seconds": seconds, "gib": gib, "report": str(report)}))
"""


def write_sparse(folder, sizes):
    """Files of weights that take no room on the disk, a hundred tensors each, with their index."""
    files, names = {}, list(sizes)
    for number in range(0, len(names), 100):
        file = folder / f"model-{number}.safetensors"
        header, end = {}, 0
        for name in names[number : number + 100]:
            begin, end = end, end + 2 * torch.Size(sizes[name]).numel()
            header[name] = {"dtype": "BF16", "shape": sizes[name], "data_offsets": [begin, end]}
            files[name] = file.name
        text = json.dumps(header).encode()
        with file.open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_a_70b_shape_converts_without_being_loaded(tmp_path):
    """Sparse files of 140 GB. Seconds are of the processor: other tests run beside this one."""
    width, inner, words = 8192, 28672, 128256
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80}
    shape = {"hidden_size": width, "intermediate_size": inner, "vocab_size": words}
    config = LlamaConfig(**heads, **shape, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "plain")
    layer = {f"self_attn.{name}_proj": (width if name in "qo" else 1024, width) for name in "qkvo"}
    layer |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, width))
    layer |= {"mlp.down_proj": (width, inner)}
    layer |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (width,))
    parts = {f"layers.{i}.{name}": size for i in range(80) for name, size in layer.items()}
    parts |= {"embed_tokens": (words, width), "norm": (width,)}
    sizes = {f"model.{name}.weight": size for name, size in parts.items()}
    write_sparse(tmp_path / "plain", sizes | {"lm_head.weight": (words, width)})
    measured = json.loads(python("-c", BIG, cwd=tmp_path))
    assert measured["seconds"] < 10
    assert measured["gib"] < 2
    assert "NOT CHECKED: it is on the meta device" in measured["report"]
    added = load_file(tmp_path / "out" / ADDED)
    assert len(added) == 320
    assert {(tensor.dtype, tensor.shape) for tensor in added.values()} == {
        (torch.bfloat16, (8192,))
    }


def test_the_layout_of_a_folder_is_known_where_it_is_the_tables(plain, tmp_path):
    folders.convert_folder(plain, tmp_path / "out", layout=Layout())
    assert "layout" in json.loads((tmp_path / "out" / "config.json").read_text())["headwater"]
    assert agree(load(tmp_path / "out"), load(plain))


REMOTE = """
import gc, importlib.abc, os, sys
gc.disable()  # nothing that is imported is garbage
class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "headwater":
            raise ImportError("headwater is not installed here")
sys.meta_path.insert(0, Without())
import torch, transformers
from safetensors.torch import load_file, save_file
rows = load_file("tokens.safetensors")["tokens"]
for name in sys.argv[1:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
    with torch.no_grad():
        long = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
        results = {"logits": model(rows).logits, "words": model.generate(rows, **long)}
        body = transformers.AutoModel.from_pretrained(name, trust_remote_code=True).eval()
        for module in body.modules():
            if "FinalNorm" in [kind.__name__ for kind in type(module).__mro__]:
                module.__class__ = type(module).__mro__[2]  # a plain norm, as vLLM puts its own there
        results["hidden"] = body(rows).last_hidden_state
        model.config.num_hidden_layers = 2
        save_file(results | {"early": model(rows, use_cache=False).logits}, f"{name}/results.safetensors")
os._exit(0)  # taking all that is imported apart takes a second
"""


def test_remote_code_loads_without_headwater(tmp_path, command):
    """Pre-norm, norms on both sides, branches side by side, two MLPs with a multiplier, layers that return a pair; and
    a model that was converted and trained before, and saved by transformers."""
    models = {}
    for name in ("llama", "gemma2", "gpt_neox", "granitemoehybrid", "bloom"):
        source, out = tmp_path / f"{name}-plain", tmp_path / name
        tiny_model(name).save_pretrained(source)
        words = ["convert", source, "--out", out, "--residual", "attnres-block:block=3"]
        command(*words, "--remote-code")
        model = load(out)  # here headwater's own classes load it
        stir(model)
        save_delta(model, out / ADDED)
        models[name] = model.eval()
    trained, out = tmp_path / "saved", tmp_path / "trained"
    models["trained"] = converted()
    models["trained"].save_pretrained(trained)
    words = ["convert", trained, "--out", out, "--remote-code"]
    assert "trust_remote_code=True loads it without headwater" in command(*words)
    save_file({"tokens": tokens()}, tmp_path / "tokens.safetensors")
    words = [sys.executable, "-c", REMOTE, *models]
    subprocess.run(words, cwd=tmp_path, check=True, env=HOME | {"HF_HOME": str(tmp_path)})
    near = {"rtol": 1e-4, "atol": 1e-5}
    for name, model in models.items():
        results = load_file(tmp_path / name / "results.safetensors")
        torch.testing.assert_close(results["logits"], logits(model), **near)
        with torch.no_grad():
            hidden = model.base_model(tokens()).last_hidden_state
        torch.testing.assert_close(results["hidden"], hidden, **near)
        assert torch.equal(results["words"], greedy(model, tokens(), 6))
        # As assisted decoding's drafts do; Llama and Gemma stop then.
        model.config.num_hidden_layers = 2
        with torch.no_grad():
            early = model(tokens(), use_cache=False).logits
        torch.testing.assert_close(results["early"], early, **near)


@pytest.mark.parametrize("residual", ["ddl", "attnres-block:heads=2"])
def test_remote_code_refuses_what_its_file_does_not_compute(residual, plain, tmp_path):
    with pytest.raises(UserError, match=f"this is '{residual}"):
        folders.convert_folder(plain, tmp_path / "out", residual, remote_code=True)
    assert not (tmp_path / "out").exists()


def flip(path, byte):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_of_weights_or_tokenizer_is_refused(plain, tmp_path, command):
    """Check whatever headwater wrote, and reads again: exports, conversions, what was linked from them."""
    train(tiny(tmp_path, residual="standard", steps=2), tmp_path / "run")
    command("export", tmp_path / "run", "--out", tmp_path / "own")
    for source, out in (("run", "theirs"), ("plain", "converted"), ("theirs", "linked")):
        command("convert", tmp_path / source, "--out", tmp_path / out)
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
    model, path = converted("attnres-block:block=2"), tmp_path / "delta.safetensors"
    save_delta(model, path)
    # In the header's numbers, its settings, the tensors
    for byte in range(0, path.stat().st_size, 41):
        flip(path, byte)
        other = tiny_model("llama")
        try:
            load_delta(other, path)
        except UserError:
            pass
        else:
            assert same(other, model)
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
    with pytest.raises(FileNotFoundError):
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
