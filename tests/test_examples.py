"""Every example runs as it stands, shortened where it trains, and is short enough to be read."""

import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import Forked
from ranks import torchrun

import headwater.train
from headwater.residuals import registry

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run an example in an empty folder, and return what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    # What an example registers ends with it
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    (tmp_path / "text.txt").write_text("a river runs from its headwater to the sea. " * 400)

    def start(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return start


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_it_is_short(path):
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.slow
def test_own_transformer_learns_to_copy(run):
    last = re.findall(r"repeated half (\S+)", run("own_transformer.py"))[-1]
    assert float(last) < 0.5


@pytest.mark.parametrize("residual", registry.names())
def test_own_transformer_takes_any_residual(residual):
    network = runpy.run_path(str(EXAMPLES / "own_transformer.py"))["Transformer"](residual)
    assert network(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, 16)


@pytest.mark.slow
def test_fine_tune_llama(run):
    shown = run("fine_tune_llama.py")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", shown)]
    assert losses[-1] < losses[0] - 0.3
    assert "saved and loaded: the same logits" in shown


def test_new_residual_runs(run):
    assert "embedding-skip:start=0.5" in run("new_residual.py")


@pytest.mark.slow
def test_compare_residuals(run, monkeypatch):
    real = headwater.train.compare
    short = {"steps": 2, "eval_every": 2, "eval_windows": 2}

    def compare(config, out, **options):
        return real(
            replace(config, train=replace(config.train, **short)), out, **options | {"seeds": [0]}
        )

    monkeypatch.setattr(headwater.train, "compare", compare)
    monkeypatch.setattr("headwater.train.jobs.subprocess.Popen", Forked)
    shown = run("compare_residuals.py", "text.txt")
    assert "denseformer: " in shown
    assert Path("runs/compared/report.html").exists()


@pytest.mark.slow
def test_the_notebook_looks_inside(run, monkeypatch, capsys, tmp_path):
    """Its cells, one after another, as a kernel runs them; the text is a short one, and there are fewer steps."""
    cells = json.loads((EXAMPLES / "look_inside.ipynb").read_text())["cells"]
    shown = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not [cell for cell in cells if cell.get("outputs")]
    assert sum(cell.count("\n") + 1 for cell in shown) < 60
    real = headwater.train.train
    text = headwater.train.DataSettings(source=("text.txt",), validation=0.2)

    def train(config, out):
        return real(
            replace(config, data=text, train=replace(config.train, steps=5, eval_windows=2)), out
        )

    monkeypatch.setattr(headwater.train, "train", train)
    space: dict = {}
    for cell in shown:
        exec(compile(cell, "look_inside.ipynb", "exec"), space)
    assert space["inspection"]._repr_html_().startswith("<iframe")
    assert capsys.readouterr().out.count("without it") == 9
    assert (tmp_path / "look-inside.html").stat().st_size > 10_000


@pytest.mark.slow
def test_two_processes_give_what_one_gives(run, tmp_path):
    alone = run("two_processes.py", "text.txt")
    log = tmp_path / "log.txt"
    agent = torchrun(
        log, "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "two_processes.py"), "text.txt"
    )
    agent.join(120)
    assert agent.exitcode == 0, log.read_text()
    (first,), (second,) = (
        re.findall(r"^(\S+) bits per byte, runs", text, re.M) for text in (alone, log.read_text())
    )
    assert float(first) == pytest.approx(float(second), abs=2e-4)
