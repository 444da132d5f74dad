"""A notebook, really executed: progress without control characters, the stop button, a run that is looked at."""

import re
import sys
import textwrap
import threading
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tinyrun import tiny

from headwater.train import train

CELLS = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("error", UserWarning)
sys.path.insert(0, {tests!r})
from dataclasses import replace
from pathlib import Path
from tinyrun import fingerprint, tiny
import headwater
from headwater.errors import Interrupted
from headwater.train import load_run, train
root = Path({root!r})
config = tiny(root, residual="attnres-full", steps=40, save_every=40, eval_every=20, depth_every=40)
---
print(train(config, root / "whole").steps)
---
def press_stop():
    metrics = root / "cut" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
threading.Thread(target=press_stop).start()
try:
    train(config, root / "cut")
except Interrupted as error:
    print(error)
assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
---
train(config, root / "cut", resume=True, progress=False)
assert fingerprint(root / "cut") == fingerprint(root / "whole")
---
run = load_run(root / "cut")
import torch
with headwater.record(run.model.residual) as trace, torch.no_grad():
    run.model(torch.tensor([run.tokenizer.encode("river").tolist()]))
print(run.config.model.residual, tuple(headwater.mixing(run.model.residual, trace.sources).shape))
"""


@pytest.mark.slow
def test_a_notebook_trains_stops_goes_on_and_looks_at_the_run(tmp_path):
    pytest.importorskip("ipykernel", reason="the extra headwater[dev] is not installed")
    source = CELLS.format(tests=str(Path(__file__).parent.parent), root=str(tmp_path))
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in source.split("---\n")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=120).execute()  # an error in a cell is raised here
    _, whole, cut, again, look = (cell.outputs for cell in notebook.cells)
    assert not [
        text
        for cell in notebook.cells
        for text in texts(cell.outputs)
        if re.search(r"[\r\x1b]", text)
    ]
    assert re.match(r"text: files 40, .* held out\n$", texts(whole)[0])
    assert texts(whole)[1].startswith("training 40/40  loss "), "the line is renewed in place"
    assert [text for text in texts(whole) if text.startswith("step ")] == [
        text
        for text in texts(whole)
        if re.match(r"step (20|40): validation \d\.\d{4} bits per byte\n$", text)
    ]
    assert texts(whole)[-1] == "40\n"
    assert re.match(
        r"stopped by SIGINT after step \d+ of 40; everything so far is saved\.", texts(cut)[-1]
    )
    assert "resume=True" in texts(cut)[-1]
    assert texts(again) == [], "progress=False"
    assert texts(look)[-1].startswith("attnres-full (5, 5, 1, 5")


def texts(outputs) -> list[str]:
    return [
        output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
        for output in outputs
    ]


def test_a_run_in_a_thread_of_its_own(tmp_path):
    """Python refuses handlers of signals there."""
    results = []
    thread = threading.Thread(
        target=lambda: results.append(train(tiny(tmp_path), tmp_path / "run"))
    )
    thread.start()
    thread.join()
    assert [result.steps for result in results] == [12]


def test_nothing_is_printed_where_nobody_looks(tmp_path, monkeypatch, capsys):
    config = tiny(tmp_path)
    train(config, tmp_path / "first", progress=False)
    assert capsys.readouterr().out == ""
    train(config, tmp_path / "quiet", progress=False)
    assert capsys.readouterr() == ("", ""), "its text is there"
    monkeypatch.setattr(sys, "stdout", None)  # as where a program has no console
    assert train(tiny(tmp_path), tmp_path / "nowhere").steps == 12
