"""A comparison runs every pair once, keeps what is finished, and reports means with their spread."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
from rich.console import Console
from tinyrun import fingerprint, tiny

from headwater.errors import UserError
from headwater.residuals import names
from headwater.train import compare as module
from headwater.train import loop
from headwater.train.compare import Job, compare, draw, expand, slug, spread, tabulate
from headwater.train.folder import write_json
from headwater.train.loop import train


def summary(bits: float, **others) -> dict:
    base = {"loss": bits, "seconds": 2.0, "peak_memory_bytes": 2**20, "parameters": 1000, "residual_parameters": 10}
    return {"bits_per_byte": bits, **base, "flops_per_token": 6000, "tokens": 64, **others}


def text_of(table) -> str:
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_rows_have_mean_spread_and_paired_difference(tmp_path):
    values = {("standard", 0): 3.0, ("standard", 1): 4.0, ("attnres-full", 0): 2.5, ("attnres-full", 1): 3.7}
    jobs = [Job(residual, seed, tmp_path / slug(residual, seed)) for residual, seed in values]
    jobs.append(Job("attnres-full", 2, tmp_path / "unfinished"))
    for job, value in zip(jobs, values.values()):
        job.folder.mkdir()
        write_json(job.folder / "summary.json", summary(value))
    rows = tabulate(jobs, ["standard", "attnres-full", "attnres-block"])
    assert [row["residual"] for row in rows] == ["standard", "attnres-full"]
    assert rows[0]["bits_per_byte"] == pytest.approx({"mean": 3.5, "spread": 0.5**0.5})
    assert rows[1]["difference"] == pytest.approx({"mean": -0.4, "spread": 0.02**0.5})
    assert rows[1]["seeds"] == [0, 1]
    shown = text_of(draw(rows, tiny(tmp_path)))
    assert "3.5000 ± 0.7071" in shown
    assert "-0.4000 ± 0.1414" in shown
    assert "attnres-full" in shown
    assert spread([2.0]) == {"mean": 2.0, "spread": None}


def test_all_means_every_registered_name(tmp_path):
    config = tiny(tmp_path)
    everything = expand(["all"], config)
    assert everything[0] == "standard"
    assert sorted(everything) == sorted(names())
    with pytest.raises(UserError, match=r"unknown residual 'standrad'.*standard"):
        expand(["standrad"], config)
    with pytest.raises(UserError, match="does not fit: "):
        expand(["attnres-block:heads=3"], config)


def test_runs_of_one_seed_see_the_same_batches(tmp_path, monkeypatch):
    """What reaches the model is recorded, whatever the residual and whatever it draws at its start."""
    real = loop.token_losses

    def batches_of(residual: str) -> list:
        batches = []

        def token_losses(run, forward, windows):
            batches.append(windows.tolist())
            return real(run, forward, windows)

        monkeypatch.setattr(loop, "token_losses", token_losses)
        train(tiny(tmp_path, residual=residual, steps=4), tmp_path / slug(residual, 0))
        return batches

    assert batches_of("standard") == batches_of("attnres-full:query=projected")


@pytest.mark.slow
def test_compare_runs_resumes_and_survives_a_failing_run(tmp_path, monkeypatch):
    config = tiny(tmp_path, residual="standard")
    out = tmp_path / "compare"
    console = Console(file=(tmp_path / "shown.txt").open("w"), width=120)
    rows = compare(config, out, residuals=["standard", "attnres-full"], seeds=[0], jobs=2, console=console)
    assert [row["residual"] for row in rows] == ["standard", "attnres-full"]
    assert json.loads((out / "table.json").read_text()) == rows
    assert json.loads((out / "compare.json").read_text())["config"] == json.loads(json.dumps(asdict(config)))
    alone = train(replace(config, model=replace(config.model, residual="attnres-full")), tmp_path / "alone")
    assert rows[1]["loss"]["mean"] == alone["loss"]
    assert fingerprint(out / "runs" / "attnres-full-seed0") == fingerprint(tmp_path / "alone")

    with pytest.raises(UserError, match="already holds a comparison"):
        compare(config, out, residuals=["standard"], seeds=[0])
    with pytest.raises(UserError, match=r"another configuration:\n  train.batch_size: 4 there, 8 asked for"):
        compare(tiny(tmp_path, residual="standard", batch_size=8), out, residuals=["standard"], seeds=[0], resume=True)

    # One run is damaged and a new residual is added: the first fails alone, the second is run, the rest is kept.
    damaged = out / "runs" / "attnres-full-seed0"
    (damaged / "summary.json").unlink()
    (damaged / "checkpoints" / "step-00000012" / "model.safetensors").write_bytes(b"")
    kept = (out / "runs" / "standard-seed0" / "summary.json").stat().st_mtime_ns
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    with pytest.raises(UserError, match=r"1 of 3 runs failed:\n  attnres-full seed 0 .*step-00000012 is damaged"):
        compare(config, out, residuals=["attnres-block"], seeds=[0], jobs=2, resume=True, console=console)
    assert [row["residual"] for row in json.loads((out / "table.json").read_text())] == ["standard", "attnres-block"]
    assert (out / "runs" / "standard-seed0" / "summary.json").stat().st_mtime_ns == kept


@pytest.mark.slow
def test_ctrl_c_asks_every_run_to_save_and_end(tmp_path):
    config = tiny(tmp_path, residual="standard", steps=20_000, eval_every=20_000, depth_every=20_000, save_every=20_000)
    out = tmp_path / "compare"
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    flags = ["--config", str(tmp_path / "config.json"), "--residuals", "standard", "--seeds", "0", "--jobs", "2"]
    command = [sys.executable, "-m", "headwater.cli", "compare", "--out", str(out), *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    metrics = out / "runs" / "standard-seed0" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 500)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130
    assert message.startswith("headwater: stopped by SIGINT after 0 of 1 runs")
    assert len(message.strip().splitlines()) == 1
    assert list((out / "runs" / "standard-seed0" / "checkpoints").glob("step-*"))
    assert "stopped by SIGTERM" in (out / "runs" / "standard-seed0" / "log.txt").read_text()


def wait_until(condition, seconds: float = 60) -> None:
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it did not happen in time")
