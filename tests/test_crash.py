"""Kill -9 at random moments, Ctrl-C and SIGTERM: real processes, real signals, and the same weights in the end."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tinyrun import fingerprint, flags, tiny

from headwater.train.checkpoint import checkpoints, damage
from headwater.train.interrupt import PARENT, Interruption
from headwater.train.loop import train

KILLS = 20


def start(context, config, out: Path, *, resume: bool):
    process = context.Process(target=train, args=(config, out), kwargs={"resume": resume})
    process.start()
    return process


def finish(process) -> None:
    process.join(120)
    assert process.exitcode == 0


@pytest.mark.slow
def test_kill_nine_at_random_moments(tmp_path):
    """Each of the runs is killed once, anywhere between its start and its last step, and then resumed to its end.

    A fork server that has imported torch gives every run a process of its own without paying for the import each time.
    Saving after every second step lets some of the moments fall into a save.
    """
    config = tiny(tmp_path, steps=30, save_every=2, eval_every=10, depth_every=15, keep=2)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headwater.train.loop", "torch._dynamo"])
    finish(start(context, config, tmp_path / "warm", resume=False))
    began = time.monotonic()
    finish(start(context, config, tmp_path / "whole", resume=False))
    length = time.monotonic() - began
    expected = fingerprint(tmp_path / "whole")
    assert expected == fingerprint(tmp_path / "warm")

    moments = random.Random()
    reached = []
    for kill in range(KILLS):
        out = tmp_path / f"killed{kill}"
        while True:
            process = start(context, config, out, resume=out.exists())
            delay = moments.uniform(0, 0.9 * length)
            process.join(delay)
            process.kill()
            process.join()
            if process.exitcode == -signal.SIGKILL:
                break
            length *= 0.9  # the machine became faster: this run had ended already, so another one is killed earlier
            out = out.with_name(f"{out.name}x")
        saved = checkpoints(out / "checkpoints")
        assert all(damage(folder) is None for folder in saved), f"killed after {delay:.3f} s"
        reached.append(saved[-1].name if saved else "none")
        finish(start(context, config, out, resume=True))
        assert fingerprint(out) == expected, f"killed after {delay:.3f} s at {reached[-1]}"
    assert len(set(reached)) > 5, f"the moments were not spread over the run: {reached}"


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(tmp_path, signum):
    config = tiny(tmp_path, steps=20_000, save_every=20_000, eval_every=20_000, depth_every=20_000)
    out = tmp_path / "run"
    command = [sys.executable, "-m", "headwater.cli", *flags(config, out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    wait_for_steps(out, process)
    os.kill(process.pid, signum)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert "Traceback" not in message
    assert message.startswith(f"headwater: stopped by {signum.name} after step ")
    assert f"headwater train --out {out} --resume" in message
    assert len(message.strip().splitlines()) == 1
    (saved,) = checkpoints(out / "checkpoints")
    assert damage(saved) is None
    step = int(saved.name.removeprefix("step-"))
    assert fingerprint(out)["metrics"][-1]["step"] == step

    again = subprocess.Popen([sys.executable, "-m", "headwater.cli", "train", "--out", str(out), "--resume"])
    try:
        wait_for_steps(out, again, beyond=step)
    finally:
        again.kill()
        again.wait()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_a_request(signum):
    before = signal.getsignal(signum)
    with Interruption() as interruption:
        assert interruption.signum == 0
        os.kill(os.getpid(), signum)
        assert interruption.signum == signum
        assert signal.getsignal(signum) == before, "a second one would not end the run"
    error = interruption.error("step 3 of 9", "headwater train")
    assert error.exit_code == 128 + signum
    assert str(error).startswith(f"stopped by {signum.name} after step 3 of 9")


def test_nohup_is_honoured():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interruption.signum == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_orphan_asks_itself_to_stop(monkeypatch):
    monkeypatch.setenv(PARENT, str(os.getppid()))
    with Interruption() as interruption:
        assert interruption.signum == 0
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert interruption.signum == signal.SIGHUP
    assert "stopped because what started it is gone after" in str(interruption.error("step 3", "headwater train"))
    monkeypatch.delenv(PARENT)
    assert Interruption().signum == 0, "a run that nobody watches may outlive its shell"


def wait_for_steps(out: Path, process: subprocess.Popen, beyond: int = 0) -> None:
    metrics = out / "metrics.jsonl"
    for _ in range(1200):
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if len(lines) > beyond + 3:
            return
        assert process.poll() is None, "the run ended before it was interrupted"
        time.sleep(0.05)
    pytest.fail("the run did not take a step in a minute")
