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


PERPLEXITY = {
    "output_type": "loglikelihood",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "perplexity"}],
}
TASKS = {  # a choice of two answers, the perplexity of the right one, and one whose data nobody has
    "rivers": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{[answer, wrong]}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "rivers_perplexity": PERPLEXITY,
    "absent": {**PERPLEXITY, "dataset_path": "nobody/nothing", "dataset_kwargs": None},
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with tasks on one local file."""
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
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**common, **task, "task": name}))
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
def log_likelihoods(model, tokenizer, answers):
    """Score by hand, with headwater's own decoder and tokenizer."""
    sums = []
    for question in QUESTIONS:
        prompt = tokenizer.encode(question["text"]).tolist()
        rest = tokenizer.encode(question[answers]).tolist()
        room = model.config.context + 1  # the last token is only predicted
        row = (prompt + rest)[-room:]
        scores = model(torch.tensor([row[:-1]]))[0].float().log_softmax(-1)[-len(rest) :]
        sums.append(sum(float(score[token]) for score, token in zip(scores, rest, strict=True)))
    return sums


@pytest.fixture
def score(tasks, tmp_path, command):
    """Scores a checkpoint, and returns what was written."""

    def run(folder, names, *flags, code=0):
        out = tmp_path / "eval.json"
        words = ["eval", folder, "--tasks", names, "--include-path", tasks, "--out", out, *flags]
        printed = command(*words, code=code)
        return printed if code else json.loads(out.read_text())

    return run


@pytest.fixture
def tasks_alone(monkeypatch):
    """Reading lm-eval's own thousands of tasks takes many seconds, and none of them is wanted here."""
    import lm_eval.tasks

    manager = lm_eval.tasks.TaskManager
    monkeypatch.setattr(
        lm_eval.tasks, "TaskManager", lambda include_path, **_: manager(None, include_path, False)
    )


def test_runs_checkpoints_and_converted_folders_score_what_the_decoder_says(
    run, score, tmp_path, command
):
    model, tokenizer = load_model(run)
    right, wrong = (log_likelihoods(model, tokenizer, name) for name in ("answer", "wrong"))
    accuracy = sum(one > other for one, other in zip(right, wrong, strict=True)) / len(QUESTIONS)
    perplexity = math.exp(-sum(right) / len(right))
    checkpoint = sorted((run / "checkpoints").iterdir())[-1]
    exported, other = tmp_path / "exported", tmp_path / "other"
    command("convert", run, "--out", exported)
    error = command("convert", run, "--residual", "mhc", "--out", other, code=1)
    assert "was trained with 'attnres-block:block=2'" in error
    for folder in (run, checkpoint, exported):
        written = score(folder, "rivers,rivers_perplexity", "--batch-size", "2")
        results = written["results"]
        assert written["residual"] == "attnres-block:block=2"
        assert results["rivers"]["acc,none"] == accuracy
        measured = results["rivers_perplexity"]["perplexity,none"]
        assert measured == pytest.approx(perplexity, rel=1e-4)
        assert written["n-samples"]["rivers"]["effective"] == len(QUESTIONS)


def test_options_reach_the_harness(tasks, monkeypatch):
    options, harness = {}, {}

    def scored(model, **given):
        options.update(given)
        return {"results": {}}

    monkeypatch.setattr(lm_eval, "simple_evaluate", scored)
    monkeypatch.setattr(lm_eval.models.huggingface, "HFLM", lambda **given: harness.update(given))
    model = tiny_model("llama")
    evaluate(model, "tokenizer", ["rivers"], include_path=tasks, fewshot=2, limit=7, batch_size=3)
    expected = {"tasks": ["rivers"], "num_fewshot": 2, "limit": 7, "confirm_run_unsafe_code": False}
    assert {name: options[name] for name in expected} == expected
    expected = {"pretrained": model, "tokenizer": "tokenizer", "batch_size": 3}
    assert {name: harness[name] for name in expected} == expected


@pytest.mark.usefixtures("tasks_alone")
def test_an_arm_with_short_attention_is_exported_and_scored(score, tmp_path, command):
    """transformers has no such model, so the decoder itself is what it loads."""
    run, exported = tmp_path / "run", tmp_path / "exported"
    config = tiny(tmp_path, residual="ddl", steps=1)
    train(replace(config, model=replace(config.model, shortswa=4)), run)
    right = log_likelihoods(*load_model(run), "answer")
    command("convert", run, "--out", exported)
    for folder in (run, exported):
        written = score(folder, "rivers_perplexity", "--batch-size", "2")
        assert written["residual"] == "ddl"
        perplexity = written["results"]["rivers_perplexity"]["perplexity,none"]
        assert perplexity == pytest.approx(math.exp(-sum(right) / len(right)), rel=1e-4)


@pytest.mark.usefixtures("tasks_alone")
def test_a_residual_of_one_s_own_is_converted_and_scored(score, tmp_path, command, monkeypatch):
    """From a package outside of the repository: a run, and a model of transformers; saved, it names its module."""
    monkeypatch.chdir(write_package(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    plugin = ("--plugin", "brook")
    trained = tmp_path / "run" / "out"
    trained.parent.mkdir()

    def alone(call, *words, **options):
        with without_plugins():
            return call(*words, **options)

    with without_plugins():
        import_plugins(["brook"])
        train(tiny(trained.parent, residual="leaky:start=0.5", steps=1), trained)
    alone(command, "convert", trained, "--out", "exported", *plugin)
    alone(command, "generate", trained, "--max-new-tokens", "1", *plugin)
    for folder in (trained, "exported"):
        written = alone(score, folder, "rivers", *plugin)
        assert written["residual"] == "leaky@brook.leaky:start=0.5"
    tiny_model("llama").save_pretrained("plain")
    words = ["convert", "plain", "--residual", "leaky:start=1.0", "--out", "converted", *plugin]
    with without_plugins():
        command(*words)
        command("verify", "plain", "converted")
    error = alone(command, "verify", "plain", "converted", code=1)
    assert "registered by the module 'brook.leaky', which is not imported" in error


CODE = """
import os

def ran(doc, results):
    return {"acc": float(os.environ["HF_ALLOW_CODE_EVAL"])}
"""


@pytest.mark.usefixtures("tasks_alone")
def test_code_that_a_model_writes_is_run_only_when_asked(
    run, tmp_path, command, monkeypatch, tasks
):
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    text = (tasks / "rivers.yaml").read_text()
    unsafe = "unsafe_code: true\nprocess_results: !function check.ran\ntag: risky\n"
    (tmp_path / "unsafe.yaml").write_text(text.replace("task: rivers", "task: unsafe") + unsafe)
    (tmp_path / "group.yaml").write_text("group: both\ntask:\n- unsafe\n")
    (tmp_path / "check.py").write_text(CODE)
    out = tmp_path / "eval.json"
    words = ["eval", run, "--include-path", tmp_path, "--out", out, "--tasks"]
    for name in ("unsafe", "both", "risky"):
        assert "--unsafe-code" in command(*words, name, code=1)
    command(*words, "unsafe", "--unsafe-code")
    assert json.loads(out.read_text())["results"]["unsafe"]["acc,none"] == 1.0
    assert "HF_ALLOW_CODE_EVAL" not in os.environ


@pytest.mark.usefixtures("tasks_alone")
def test_what_cannot_be_scored_is_refused_in_one_message(run, score, tmp_path, monkeypatch):
    # Between attempts
    monkeypatch.setattr(huggingface_hub.utils._http, "time", SimpleNamespace(sleep=lambda _: None))
    tiny_model("llama").save_pretrained(tmp_path / "bare")
    for folder, names, message in (
        (run, "riverz", "lm-eval has no task riverz"),
        (run, "absent", "the data of absent cannot be fetched"),
        (tmp_path, "rivers", "no checkpoint in"),
        (tmp_path / "bare", "rivers", "holds no tokenizer"),
    ):
        assert message in score(folder, names, code=1)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'headwater[eval]'" in score(run, "rivers", code=1)
