"""`headwater eval` through the real lm-evaluation-harness, on a task made here: nothing is downloaded."""

import json
import math
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import yaml
from outside import without_plugins, write_package
from tinyhf import tiny_model
from tinyrun import tiny

from headwater.cli import main
from headwater.hf.evaluate import evaluate
from headwater.residuals import import_plugins
from headwater.train.checkpoint.folder import load_model
from headwater.train.loop import train

lm_eval = pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
pytest.importorskip("lm_eval.models.huggingface", reason="the extra `eval` is not installed")

QUESTIONS = [
    {"text": "river 3 runs from its", "answer": " headwater", "wrong": " zzzzzzzzzz"},
    {"text": "river 7 runs from its headwater to", "answer": " the sea", "wrong": " qqqqqqq"},
    {"text": "river 9 runs", "answer": " from", "wrong": " ~~~~"},
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with two tasks on one local file: a choice of two answers, and the perplexity of the right one."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "rivers.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "target_delimiter": "",
    }
    choice = {
        "task": "rivers",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{[answer, wrong]}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    perplexity = {
        "task": "rivers_perplexity",
        "output_type": "loglikelihood",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "perplexity"}],
    }
    absent = {
        **perplexity,
        "task": "absent",
        "dataset_path": "nobody/nothing",
        "dataset_kwargs": None,
    }
    for task in (choice, perplexity, absent):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**common, **task}))
    return folder


@pytest.fixture(autouse=True)
def machine_is_not_described(request, monkeypatch):
    """lm-eval asks pip, git and others about the machine, for results that headwater leaves out; once will do."""
    if request.function is not test_code_that_a_model_writes_is_run_only_when_asked:
        monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(tiny(folder), folder / "out")
    return folder / "out"


@torch.no_grad()
def log_likelihood(model, tokenizer, text, answer):
    """By hand, with headwater's own decoder and tokenizer."""
    prompt, rest = tokenizer.encode(text).tolist(), tokenizer.encode(answer).tolist()
    room = model.config.context + 1  # the last token is only predicted
    row = (prompt + rest)[-room:]
    scores = model(torch.tensor([row[:-1]]))[0].float().log_softmax(-1)
    return sum(float(scores[len(row) - 1 - len(rest) + i, token]) for i, token in enumerate(rest))


def test_runs_checkpoints_and_converted_folders_score_what_the_decoder_says(
    run, tasks, tmp_path, capsys
):
    model, tokenizer = load_model(run)
    right = [log_likelihood(model, tokenizer, row["text"], row["answer"]) for row in QUESTIONS]
    wrong = [log_likelihood(model, tokenizer, row["text"], row["wrong"]) for row in QUESTIONS]
    accuracy = sum(one > other for one, other in zip(right, wrong, strict=True)) / len(QUESTIONS)
    perplexity = math.exp(-sum(right) / len(right))
    checkpoint = sorted((run / "checkpoints").iterdir())[-1]
    assert main(["convert", str(run), "--out", str(tmp_path / "exported")]) == 0
    capsys.readouterr()
    words = ["convert", str(run), "--residual", "mhc", "--out", str(tmp_path / "other")]
    assert main(words) == 1
    assert "was trained with 'attnres-block:block=2'" in capsys.readouterr().err
    for folder in (run, checkpoint, tmp_path / "exported"):
        out = tmp_path / f"{folder.name}.json"
        command = [
            "eval",
            str(folder),
            "--tasks",
            "rivers,rivers_perplexity",
            "--include-path",
            str(tasks),
        ]
        assert main([*command, "--out", str(out), "--batch-size", "2"]) == 0
        assert "|rivers" in capsys.readouterr().out
        written = json.loads(out.read_text())
        assert written["residual"] == "attnres-block:block=2"
        assert written["results"]["rivers"]["acc,none"] == accuracy
        assert written["results"]["rivers_perplexity"]["perplexity,none"] == pytest.approx(
            perplexity, rel=1e-4
        )
        assert written["n-samples"]["rivers"]["effective"] == len(QUESTIONS)


def test_options_reach_the_harness(tasks, monkeypatch):
    given, made = {}, {}

    def scored(model, **options):
        given.update(options)
        return {"results": {}}

    monkeypatch.setattr(lm_eval, "simple_evaluate", scored)
    monkeypatch.setattr(lm_eval.models.huggingface, "HFLM", lambda **options: made.update(options))
    model = tiny_model("llama")
    evaluate(model, "tokenizer", ["rivers"], include_path=tasks, fewshot=2, limit=7, batch_size=3)
    assert {
        name: given[name] for name in ("tasks", "num_fewshot", "limit", "confirm_run_unsafe_code")
    } == {
        "tasks": ["rivers"],
        "num_fewshot": 2,
        "limit": 7,
        "confirm_run_unsafe_code": False,
    }
    assert (made["pretrained"], made["tokenizer"], made["batch_size"]) == (model, "tokenizer", 3)


def own_tasks_only(monkeypatch):
    """Reading lm-eval's own thousands of tasks takes many seconds, and none of them is wanted here."""
    import lm_eval.tasks

    manager = lm_eval.tasks.TaskManager
    monkeypatch.setattr(
        lm_eval.tasks, "TaskManager", lambda include_path, **_: manager(None, include_path, False)
    )


def test_an_arm_with_short_attention_is_exported_and_scored(tasks, tmp_path, capsys, monkeypatch):
    """transformers has no such model, so the decoder itself is what it loads."""
    own_tasks_only(monkeypatch)
    config = tiny(tmp_path, residual="ddl", steps=1)
    train(replace(config, model=replace(config.model, shortswa=4)), tmp_path / "run")
    model, tokenizer = load_model(tmp_path / "run")
    right = [log_likelihood(model, tokenizer, row["text"], row["answer"]) for row in QUESTIONS]
    assert main(["convert", str(tmp_path / "run"), "--out", str(tmp_path / "exported")]) == 0
    for folder in ("run", "exported"):
        out = tmp_path / "eval.json"
        command = [
            "eval",
            str(tmp_path / folder),
            "--tasks",
            "rivers_perplexity",
            "--include-path",
            str(tasks),
        ]
        assert main([*command, "--out", str(out), "--batch-size", "2"]) == 0
        written = json.loads(out.read_text())
        assert written["residual"] == "ddl"
        perplexity = written["results"]["rivers_perplexity"]["perplexity,none"]
        assert perplexity == pytest.approx(math.exp(-sum(right) / len(right)), rel=1e-4)


def test_a_residual_of_one_s_own_is_converted_and_scored(tasks, tmp_path, capsys, monkeypatch):
    """From a package outside of the repository: a run, and a model of transformers; saved, it names its module."""
    own_tasks_only(monkeypatch)
    monkeypatch.chdir(write_package(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    plugin = ("--plugin", "brook")
    (tmp_path / "run").mkdir()
    score = [
        "--tasks",
        "rivers",
        "--include-path",
        str(tasks),
        "--out",
        str(tmp_path / "eval.json"),
    ]
    with without_plugins():
        import_plugins(["brook"])
        trained = tmp_path / "run" / "out"
        train(tiny(tmp_path / "run", residual="leaky:start=0.5", steps=1), trained)
    for words in (["convert", str(trained), "--out", "exported"], ["eval", str(trained), *score]):
        with without_plugins():
            assert main([*words, *plugin]) == 0
    for words in (
        ["eval", "exported", *score, *plugin],
        ["generate", str(trained), "--max-new-tokens", "1", *plugin],
    ):
        with without_plugins():
            assert main(words) == 0
    assert (
        json.loads((tmp_path / "eval.json").read_text())["residual"]
        == "leaky@brook.leaky:start=0.5"
    )
    plain = tiny_model("llama")
    plain.save_pretrained("plain")
    with without_plugins():
        assert (
            main(
                ["convert", "plain", "--residual", "leaky:start=1.0", "--out", "converted", *plugin]
            )
            == 0
        )
        assert main(["verify", "plain", "converted"]) == 0
    capsys.readouterr()
    with without_plugins():
        assert main(["verify", "plain", "converted"]) == 1
    assert (
        "registered by the module 'brook.leaky', which is not imported: add --plugin"
        in capsys.readouterr().err
    )


CODE = """
import os

def ran(doc, results):
    return {"acc": float(os.environ["HF_ALLOW_CODE_EVAL"])}
"""


def test_code_that_a_model_writes_is_run_only_when_asked(run, tmp_path, capsys, monkeypatch, tasks):
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    text = (tasks / "rivers.yaml").read_text()
    unsafe = "unsafe_code: true\nprocess_results: !function check.ran\ntag: risky\n"
    (tmp_path / "unsafe.yaml").write_text(text.replace("task: rivers", "task: unsafe") + unsafe)
    (tmp_path / "group.yaml").write_text("group: both\ntask:\n- unsafe\n")
    (tmp_path / "check.py").write_text(CODE)
    own_tasks_only(monkeypatch)
    command = [
        "eval",
        str(run),
        "--include-path",
        str(tmp_path),
        "--out",
        str(tmp_path / "eval.json"),
        "--tasks",
    ]
    for name in ("unsafe", "both", "risky"):
        assert main([*command, name]) == 1
        message = capsys.readouterr().err
        assert "scored by running the code that the model writes" in message
        assert "--unsafe-code" in message
    assert main([*command, "unsafe", "--unsafe-code"]) == 0
    assert json.loads((tmp_path / "eval.json").read_text())["results"]["unsafe"]["acc,none"] == 1.0
    assert "HF_ALLOW_CODE_EVAL" not in os.environ


def test_what_cannot_be_scored_is_refused_in_one_message(run, tasks, tmp_path, capsys, monkeypatch):
    def refused(*words):
        assert main(["eval", *map(str, words)]) == 1
        return capsys.readouterr().err

    own_tasks_only(monkeypatch)
    monkeypatch.setattr(
        huggingface_hub.utils._http, "time", SimpleNamespace(sleep=lambda _: None)
    )  # between attempts
    include = ("--include-path", tasks)
    assert "lm-eval has no task riverz" in refused(run, "--tasks", "riverz", *include)
    assert "no checkpoint in" in refused(tmp_path, "--tasks", "rivers", *include)
    assert "the data of absent cannot be fetched" in refused(run, "--tasks", "absent", *include)
    assert "none, which is not a folder" in refused(
        tmp_path / "none", "--tasks", "rivers", *include
    )
    assert "names no task" in refused(run, "--tasks", ",")
    assert "--device must be a device" in refused(run, "--tasks", "rivers", "--device", "tpu")
    tiny_model("llama").save_pretrained(tmp_path / "bare")
    assert "holds no tokenizer" in refused(tmp_path / "bare", "--tasks", "rivers", *include)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'headwater[eval]'" in refused(run, "--tasks", "rivers")
