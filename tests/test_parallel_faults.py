"""What goes wrong on one rank is met by all: a bad number, a signal, a killed worker, a rank that hangs."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import spawn
from tinyrun import flags, tiny

from headwater.errors import UserError
from headwater.models import Decoder
from headwater.train import checkpoint, loop
from headwater.train.config import Config, ParallelSettings
from headwater.train.contents import read_all
from headwater.train.loop import train

pytestmark = pytest.mark.faults  # they kill and hang real workers by the clock: `make test-faults`

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def settings(folder: Path, **changes) -> Config:
    config = tiny(folder, **{"batch_size": 4, "save_every": 1, "steps": 6, "depth_every": 99, **changes})
    return replace(config, parallel=ParallelSettings(hang_timeout=60))


def bad_number(config: Config, folder: Path, skip: bool) -> None:
    """Rank 1 alone sees a loss that is not a number, at its fourth step. One run a process, as under torchrun."""
    real, calls = loop.token_losses, []

    def token_losses(run, forward, windows):
        calls.append(torch.is_grad_enabled())
        bad = os.environ["RANK"] == "1" and torch.is_grad_enabled() and sum(calls) == 4
        return real(run, forward, windows) * (math.nan if bad else 1.0)

    loop.token_losses = token_losses
    if skip:
        assert train(replace(config, train=replace(config.train, skip_nonfinite=1)), folder / "skips")["steps"] == 6
        return
    with pytest.raises(
        UserError, match=r"not finite at step 4 .*last good checkpoint is .*step-00000003.*nonfinite-step-4"
    ):
        train(config, folder / "stops")


@pytest.mark.slow
def test_a_bad_number_on_one_rank_stops_or_skips_on_all(tmp_path):
    spawn(2, bad_number, settings(tmp_path), tmp_path, False)
    spawn(2, bad_number, settings(tmp_path), tmp_path, True)
    cause = json.loads((tmp_path / "stops" / "nonfinite-step-4.json").read_text())
    assert cause["batch"] == {"seed": 0, "step": 3, "size": 4}
    assert [math.isnan(float(loss)) for loss in cause["loss_by_rank"]] == [False, True]
    assert all(math.isnan(float(norm)) for norm in cause["grad_norm_by_sublayer"])
    saved = checkpoint.checkpoints(tmp_path / "stops" / "checkpoints")
    assert saved[-1].name == "step-00000003"

    third, fourth, fifth = (tmp_path / "skips" / "checkpoints" / f"step-0000000{n}" for n in (3, 4, 5))
    before, after, last = (read_all(step, "model") for step in (third if third.exists() else saved[-1], fourth, fifth))
    assert all(torch.equal(value, after[name]) for name, value in before.items())  # left untouched
    assert not all(torch.equal(value, last[name]) for name, value in after.items())
    model: Decoder = checkpoint.load_model(tmp_path / "skips")[0]
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    records = [json.loads(line) for line in (tmp_path / "skips" / "metrics.jsonl").read_text().splitlines()]
    assert [r["loss"] is None for r in records if r["kind"] == "train"] == [False, False, False, True, False, False]


def start(config: Config, out: Path, *options: str) -> subprocess.Popen:
    command = [*TORCHRUN, *options, "-m", "headwater.cli", *flags(config, out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)


def wait_for_step(out: Path, process: subprocess.Popen, step: int) -> None:
    for _ in range(1200):
        if any(folder.name >= f"step-{step:08d}" for folder in checkpoint.checkpoints(out / "checkpoints")):
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    pytest.fail(f"step {step} was not saved in a minute")


def workers(process: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the workers through /proc")
def test_a_killed_worker_is_started_again_and_the_run_goes_on(tmp_path):
    out = tmp_path / "run"
    process = start(settings(tmp_path, steps=40), out, "--max-restarts", "1")
    wait_for_step(out, process, 3)
    os.kill(workers(process)[-1], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert json.loads((out / "summary.json").read_text())["steps"] == 40
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 41))


@pytest.mark.slow
def test_sigterm_commits_and_ends_within_thirty_seconds(tmp_path):
    out = tmp_path / "run"
    process = start(settings(tmp_path, steps=20_000, save_every=20_000, eval_every=20_000, log_every=1), out)
    for _ in range(1200):
        if (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_text().splitlines()) > 3:
            break
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    began = time.monotonic()
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert "stopped by SIGTERM after step" in errors
    (saved,) = checkpoint.checkpoints(out / "checkpoints")
    assert checkpoint.damage(saved) is None
    assert saved.name > "step-00000003"


HANGS = """
import os, sys, time
from headwater.train import loop
from headwater.cli import main

real = loop.accumulate
def accumulate(run, number):
    while number == 3 and os.environ["RANK"] == "1":
        time.sleep(1)
    return real(run, number)
loop.accumulate = accumulate
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_with_every_stack(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    command = [*TORCHRUN, str(script), *flags(settings(tmp_path), tmp_path / "run"), "--hang-timeout", "6"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode != 0
    assert result.stderr.count("Timeout (0:00:06)!") == 2
    assert "in accumulate" in result.stderr
    assert "hangs.py" in result.stderr
