"""`headwater serve-check` says of each server whether it takes a folder, from the folder's config."""

import json

import pytest

from headwater.cli import main

CONVERTED = {"model_type": "headwater_llama", "headwater": {"residual": "attnres-block:block=2"}}
CLASSIFIER = {"AutoModelForSequenceClassification": "modeling_headwater.Classifier"}
# config.json, and what is said of transformers and of vLLM
FOLDERS = {
    "with a modeling file": (
        {**CONVERTED, "auto_map": {"AutoModel": "modeling_headwater.Model"}},
        "yes, with trust_remote_code=True",
        "yes, without pipeline parallelism: vllm serve {folder} --trust-remote-code",
    ),
    "without one": (
        CONVERTED,
        "yes, where headwater is installed",
        "no: the folder has no modeling file. Write one: headwater convert {folder} --out OUT --remote-code",
    ),
    "a classifier": (
        {**CONVERTED, "auto_map": CLASSIFIER},
        "yes, with trust_remote_code=True",
        "no: its transformers backend takes language models, and this is a classifier",
    ),
    "plain": (
        {"model_type": "llama"},
        "yes, if it knows 'llama': the residual is the plain one",
        "yes, if it knows 'llama': the residual is the plain one",
    ),
    "Kimi Linear": (
        {"model_type": "kimi_linear", "attn_res_block_size": 4},
        "no: its Kimi Linear has no Attention Residuals",
        "yes, by its own class, on a GPU: vllm serve {folder} --trust-remote-code",
    ),
    "headwater's decoder": (
        {"model_type": "headwater-decoder"},
        "yes, where headwater is installed",
        "no: it does not know headwater's own decoder",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_each_server_has_an_answer(name, tmp_path, capsys):
    config, transformers, vllm = FOLDERS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["serve-check", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    answers = dict(line.split(maxsplit=1) for line in lines)
    assert answers["transformers"] == transformers
    assert answers["vLLM"] == vllm.format(folder=tmp_path)
    assert answers.keys() == {"transformers", "vLLM", "SGLang", "llama.cpp"}


def test_a_run_is_no_checkpoint(tmp_path, capsys):
    assert main(["serve-check", str(tmp_path)]) == 1
    assert "Write one: headwater convert" in capsys.readouterr().err
