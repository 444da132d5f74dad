"""Kill -9 at random moments, Ctrl-C and SIGTERM: real processes, real signals, and the same weights in the end."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Printing, fork_server, start
from ranks import enter, free_port
from tinyrun import checkpoint_of, fingerprint, flags, saved_steps, tiny

from headwater.cli import main
from headwater.runs.settings import Config
from headwater.train.checkpoint.folder import checkpoints, damage
from headwater.train.data.dataset import prepare
from headwater.train.loop import train
from headwater.train.monitor.interrupts import PARENT, Interruption


class Processes:
    """A run on one process or several, from a fork server that has imported torch once for all of them."""

    def __init__(self, config: Config, world: int) -> None:
        self.config, self.world = config, world
        self.context = fork_server()

    def start(self, out: Path, *, resume: bool) -> None:
        if self.world == 1:
            jobs = [(train, (self.config, out))]
        else:
            port = free_port()
            jobs = [
                (enter, (rank, self.world, port, train, (self.config, out)))
                for rank in range(self.world)
            ]
        self.all = [
            self.context.Process(target=Printing(job), args=args, kwargs={"resume": resume})
            for job, args in jobs
        ]
        for process in self.all:
            process.start()

    def finish(self) -> None:
        for process in self.all:
            process.join(120)
        assert [process.exitcode for process in self.all] == [0] * self.world

    def kill(self, after: float, choose: random.Random) -> bool:
        """One of them first, the others a moment later, as torchrun does; False if the run had ended before."""
        first = choose.choice(self.all)
        first.join(after)
        first.kill()
        first.join()
        for process in self.all:
            process.join(choose.uniform(0, 0.2))
            process.kill()
            process.join()
        return first.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("world", "kills"), [(1, 5), (2, 2)])
def test_kill_nine_at_random_moments(tmp_path, request, world, kills, async_save):
    """Each of the runs is killed once, anywhere between its start and its last step, and then resumed to its end. Every
    step is saved, so that most moments fall into a save."""
    asked = request.config.getoption("--kills")
    kills = asked or kills
    often = {"eval_every": 7, "depth_every": 5, "save_every": 1, "keep": 2}
    steps = 12 if asked else 8
    config = tiny(tmp_path, steps=steps, **often, async_save=async_save, hang_timeout=60)
    run = Processes(config, world)
    # Which else the first run would do, and take longer than those that are killed
    prepare(config.data)
    began = time.monotonic()
    run.start(tmp_path / "whole", resume=False)
    run.finish()
    length = time.monotonic() - began
    expected = fingerprint(tmp_path / "whole")

    choose = random.Random()
    reached, cut = [], 0
    for kill in range(kills):
        out = tmp_path / f"killed{kill}"
        while True:
            run.start(out, resume=False)
            # One in each part of the run
            delay = choose.uniform(kill, kill + 1) / kills * 0.95 * length
            if run.kill(delay, choose):
                break
            length *= 0.95  # the machine became faster: this run had ended already, so another one is killed earlier
            out = out.with_name(f"{out.name}x")
        saved = checkpoints(out / "checkpoints")
        assert all(damage(folder) is None for folder in saved), f"killed after {delay:.3f} s"
        reached.append(int(saved[-1].name.removeprefix("step-")) if saved else 0)
        # The step that was being saved is lost; beside the next step, also that one.
        assert last_logged(out) - reached[-1] <= 1 + async_save, f"killed after {delay:.3f} s"
        cut += bool(list((out / "checkpoints").glob(".tmp-*")))
        # Else it was killed before there was anything to resume
        run.start(out, resume=(out / "config.json").exists())
        run.finish()
        assert fingerprint(out) == expected, f"killed after {delay:.3f} s at step {reached[-1]}"
        shutil.rmtree(out)
    print(f"{kills} runs went on from a committed step ({cut} saves were cut): {sorted(reached)}")
    assert len(set(reached)) > min(5, kills // 3), f"not spread over the run: {reached}"


def last_logged(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(tmp_path, signum):
    often = dict.fromkeys(("steps", "save_every", "eval_every", "depth_every"), 20_000)
    config, out = tiny(tmp_path, **often), tmp_path / "a run"
    prepare(config.data)
    process = start(tmp_path, "-m", "headwater", *flags(config, out))
    wait_for_steps(out, process.is_alive)
    os.kill(process.pid, signum)
    process.join(60)
    message = (tmp_path / "stderr").read_text()
    assert process.exitcode == 128 + signum
    assert "Traceback" not in message
    assert message.startswith(f"headwater: stopped by {signum.name} after step ")
    assert f"headwater train --out '{out}' --resume" in message
    assert len(message.strip().splitlines()) == 1
    (step,) = saved_steps(out)
    assert damage(checkpoint_of(out, step)) is None
    assert fingerprint(out)["metrics"][-1]["step"] == step

    again = fork_server().Process(
        target=Printing(main), args=(["train", "--out", str(out), "--resume"],)
    )
    again.start()
    try:
        wait_for_steps(out, again.is_alive, beyond=step)
    finally:
        again.kill()
        again.join()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_a_request(signum):
    def before(signum, frame): ...

    inherited = signal.signal(signum, before)  # under nohup it would be to ignore SIGHUP
    try:
        with Interruption() as interruption:
            assert interruption.signum == 0
            os.kill(os.getpid(), signum)
            assert interruption.signum == signum
            assert signal.getsignal(signum) == before, "a second one would not end the run"
    finally:
        signal.signal(signum, inherited)
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
    assert "stopped because what started it is gone after" in str(
        interruption.error("step 3", "headwater train")
    )
    monkeypatch.delenv(PARENT)
    assert Interruption().signum == 0, "a run that nobody watches may outlive its shell"


def wait_for_steps(out: Path, alive: Callable[[], bool], beyond: int = 0) -> None:
    metrics = out / "metrics.jsonl"
    for _ in range(1200):
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if len(lines) > beyond + 3:
            return
        assert alive(), "the run ended before it was interrupted"
        time.sleep(0.05)
    pytest.fail("the run did not take a step in a minute")
