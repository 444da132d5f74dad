"""Every example runs as it stands, shortened where it trains, and is short enough to be read."""

import copy
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
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
def test_the_notebook_prints_what_it_stores(tmp_path, monkeypatch):
    """Its cells run in a kernel; numbers may differ a little between machines."""
    pytest.importorskip("ipykernel", reason="the extra headwater[dev] is not installed")
    stored = nbformat.read(EXAMPLES / "first_look.ipynb", as_version=4)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    place = {"metadata": {"path": str(tmp_path)}}
    again = NotebookClient(copy.deepcopy(stored), timeout=120, resources=place).execute()
    number = re.compile(r"\d+(?:[.,]\d+)*")
    for before, after in zip(outputs_of(stored), outputs_of(again), strict=True):
        assert number.sub("#", before) == number.sub("#", after)
        values = [
            [float(word.replace(",", "")) for word in number.findall(text)]
            for text in (before, after)
        ]
        assert values[1] == pytest.approx(values[0], abs=0.05)
    assert (tmp_path / "first-look.html").stat().st_size > 100_000


def outputs_of(notebook: nbformat.NotebookNode) -> list[str]:
    """The text that its cells print; a picture is named by its axes."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert len(outputs) == 5
    return [
        output["text"]
        if "text" in output
        else " ".join(re.findall(r"the most: \S+ even shares", output["data"]["image/svg+xml"]))
        for output in outputs
    ]


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
