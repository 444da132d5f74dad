"""Runs as processes of their own: how they are started, and what ends them."""

import json
import os
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from processes import start
from tinyrun import saved_steps, tiny

from headwater.errors import UserError
from headwater.runs.launch import read_launch
from headwater.train.data.dataset import prepare
from headwater.train.files import locked
from headwater.train.jobs import Job, launch, record_launch
from headwater.train.monitor.interrupts import PARENT


@pytest.fixture
def job(tmp_path) -> Job:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    return Job(label="a run", folder=folder, config=tiny(tmp_path))


@pytest.fixture
def processes(monkeypatch) -> list:
    """Commands and environments of the processes that would have been started."""
    calls = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: calls.append((command, options["env"]))
    )
    return calls


def test_a_run_is_resumed_only_where_one_began_and_knows_its_parent(job, processes):
    launch(job, 1)
    (job.folder / "config.json").write_text("{}")
    launch(job, 1)
    assert ["--resume" in command for command, _ in processes] == [False, True]
    assert processes[0][1][PARENT] == str(os.getpid())


def test_runs_share_the_cores(job, processes, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setenv("OMP_NUM_THREADS", "as it was")
    for jobs in (1, 2, 5, 30):
        launch(job, jobs)
    threads = [environment["OMP_NUM_THREADS"] for _, environment in processes]
    assert threads == ["as it was", "6", "2", "1"]


def test_a_run_records_how_many_ran_beside_it(job):
    for jobs, most in ((1, 1), (2, 2), (1, 2), (3, 3)):  # attempts of one run
        record_launch(job, jobs)
        assert read_launch(job.folder).side_by_side == most
    (job.folder / "launch.json").unlink()
    (job.folder / "config.json").write_text("{}")  # it began without a comparison
    record_launch(job, 1)
    assert read_launch(job.folder).side_by_side is None


@pytest.fixture
def long_comparison(tmp_path):
    """A process of `headwater compare` whose run would take minutes, and the folder of the run, once it is under
    way."""
    often = dict.fromkeys(("steps", "eval_every", "depth_every", "save_every"), 20_000)
    config, out = tiny(tmp_path, residual="standard", **often), tmp_path / "my compare"
    prepare(config.data)
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    flags = ["--config", tmp_path / "config.json", "--residuals", "standard", "--seeds", "0"]
    process = start(tmp_path, "-m", "headwater", "compare", "--out", out, *flags, "--jobs", "2")

    def under_way() -> list[Path]:
        return [path for path in out.glob("runs/*/metrics.jsonl") if path.stat().st_size > 500]

    wait_until(under_way)
    yield process, under_way()[0].parent
    process.kill()
    process.join()


@pytest.mark.slow
def test_ctrl_c_asks_every_run_to_save_and_end(tmp_path, long_comparison):
    process, run = long_comparison
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    message = (tmp_path / "stderr").read_text()
    assert process.exitcode == 130
    assert message.startswith("headwater: stopped by SIGINT after 0 of 1 runs")
    assert f"headwater compare --out '{tmp_path / 'my compare'}' --resume" in message
    assert saved_steps(run)
    assert "stopped by SIGTERM" in (run / "log.txt").read_text()


@pytest.mark.slow
def test_orphans_save_and_end(long_comparison):
    process, run = long_comparison
    with pytest.raises(UserError, match=r"working in .*standard-seed0"), locked(run):
        pass
    process.kill()
    words = "stopped because what started it is gone after step"
    wait_until(lambda: words in (run / "log.txt").read_text())
    assert saved_steps(run)


def wait_until(condition, seconds: float = 60) -> None:
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it did not happen in time")
