"""All ranks meet what goes wrong on one rank: a bad number, a signal, a killed worker, a rank that hangs."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
from ranks import free_port, spawn, torchrun
from tinyrun import changed, checkpoint_of, flags, logged, records, saved_steps, tiny, write_corpus

from headwater.errors import Interrupted, UserError
from headwater.models import Decoder
from headwater.runs.files import read_json
from headwater.runs.settings import Config
from headwater.train import loop, run
from headwater.train.checkpoint import folder as checkpoint
from headwater.train.distributed.parts import local
from headwater.train.distributed.ranks import Ranks, join
from headwater.train.loop import train

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ONE_MACHINE = ["--standalone", "--nproc-per-node", "2"]


def settings(folder: Path, **changes) -> Config:
    sizes = {"save_every": 1, "keep": 9, "steps": 6, "depth_every": 99, "hang_timeout": 60}
    return tiny(folder, **{**sizes, **changes})


def on_second_rank() -> bool:
    return os.environ["RANK"] == "1"


def faults_on_one_rank(config: Config, folder: Path) -> None:
    """Rank 1 alone has a loss that is not a number, or a spike, at its fourth step; rank 0 alone gets a signal, just
    after the ranks have asked each other for one."""
    join(config.parallel, torch.device("cpu"))  # once for all runs
    real = loop.token_losses

    def spoil(factor: float) -> None:
        calls = []

        def token_losses(run, forward, windows):
            calls.append(torch.is_grad_enabled())
            bad = on_second_rank() and torch.is_grad_enabled() and sum(calls) == 4
            return real(run, forward, windows) * (factor if bad else 1.0)

        loop.token_losses = token_losses

    spoil(math.nan)
    message = r"not finite at step 4 .*last good checkpoint is .*step-00000003.*nonfinite-step-4"
    with pytest.raises(UserError, match=message):
        train(config, folder / "stops")
    real_update = loop.update

    def update(run, number, loss):
        before = [local(parameter).clone() for parameter in run.model.parameters()]
        outcome = real_update(run, number, loss)
        after = [local(parameter) for parameter in run.model.parameters()]
        same = all(map(torch.equal, before, after))
        assert same == bool(run.skips.in_a_row)  # a step that is left out changes nothing
        return outcome

    loop.update = update
    spoil(math.nan)
    assert train(changed(config, skip_nonfinite=1), folder / "nonfinite").skipped_steps == 1
    spoil(100.0)
    spikes = changed(config, skip_spikes=1, spike_window=3, async_save=True)
    assert train(spikes, folder / "spike").skipped_steps == 1

    loop.token_losses, asked, compare = real, [], Ranks.max

    def highest(ranks, value):
        largest = compare(ranks, value)
        # The loop asks for signals; others wait for all ranks with it
        if sys._getframe(1).f_code.co_name == "train":
            asked.append(value)
            if ranks.main and len(asked) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
        return largest

    Ranks.max = highest
    with pytest.raises(Interrupted, match="stopped by SIGTERM after step 4 of 6"):
        train(changed(config, save_every=6), folder / "signal")
    Ranks.max = compare

    written = checkpoint.save

    def save(*arguments, **options):
        path = written(*arguments, **options)
        if on_second_rank():
            raise UserError("nobody else has noticed")
        return path

    checkpoint.save = save
    message = "nobody else" if on_second_rank() else "could not be written on another rank"
    for save_every in (1, 3):  # noticed by the next save, or by a step before it
        failing = changed(config, save_every=save_every, async_save=True)
        with pytest.raises(UserError, match=message):
            train(failing, folder / f"elsewhere-{save_every}")


def different_on_one_rank(config: Config, folder: Path) -> None:
    """Rank 1 is started with other settings, and with another text."""
    join(config.parallel, torch.device("cpu"))  # once for all runs
    other = folder / "other"
    if on_second_rank():
        other.mkdir()
        write_corpus(other)
        (other / "corpus" / "0.txt").write_text("another text " * 99)
        shutil.copytree(config.data.source[0], folder / "elsewhere")
    for message, change in {
        r"optim\.lr: 0\.003 on rank 0, 0\.5 on rank 1": {"lr": 0.5},
        r"parallel\.shard: 0 on rank 0, 1 on rank 1": {"shard": 1},
        r"corpus\.source_hash": {"source": (str(other / "corpus"),)},
    }.items():
        asked = changed(config, **change) if on_second_rank() else config
        with pytest.raises(UserError, match=message):
            train(asked, folder / "run")
    # Each rank may find the same text in another place.
    moved = {"source": (str(folder / "elsewhere"),), "cache": str(folder / "cache-2")}
    asked = changed(config, **moved) if on_second_rank() else config
    assert train(asked, folder / "same").steps == 6


def test_ranks_that_were_started_with_different_things_refuse_to_begin(tmp_path):
    spawn(2, different_on_one_rank, settings(tmp_path), tmp_path)


def slow_disk(config: Config, folder: Path) -> None:
    real = checkpoint.save

    def save(*arguments, **options):
        if on_second_rank():
            time.sleep(1.5 * config.parallel.hang_timeout)
        return real(*arguments, **options)

    checkpoint.save = save
    assert train(config, folder / "run").steps == 1


def test_a_save_may_take_longer_than_a_step(tmp_path):
    spawn(2, slow_disk, settings(tmp_path, steps=1, hang_timeout=4), tmp_path)


@pytest.mark.slow
def test_what_happens_to_one_rank_stops_or_skips_on_all(tmp_path):
    spawn(2, faults_on_one_rank, settings(tmp_path), tmp_path)
    cause = read_json(tmp_path / "stops" / "nonfinite-step-4.json")
    assert cause["batch"] == {"seed": 0, "step": 3, "size": 4}
    assert [math.isnan(float(loss)) for loss in cause["loss_by_rank"]] == [False, True]
    assert all(math.isnan(float(norm)) for norm in cause["grad_norm_by_sublayer"])
    assert saved_steps(tmp_path / "stops")[-1] == 3

    for reason in ("nonfinite", "spike"):
        run = tmp_path / reason
        assert saved_steps(run) == [1, 2, 3, 5, 6]
        model: Decoder = checkpoint.load_model(run)[0]
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        (skip,) = records(run, "skip")
        assert (skip["step"], skip["reason"]) == (4, reason)
        lost = [step for step, loss in enumerate(logged(run, "loss"), start=1) if loss is None]
        assert lost == ([4] if reason == "nonfinite" else [])
        first, second = read_json(run / f"{reason}-step-4.json")["loss_by_rank"]
        assert not float(second) <= 10 * float(first), "the second rank's share stands out"
    assert saved_steps(tmp_path / "signal") == [4]
    assert checkpoint.damage(checkpoint_of(tmp_path / "signal", 4)) is None


def start_slowly(config: Config, out: Path) -> None:
    """The main rank prepares the data for longer than a step may hang; machines have counted restarts differently."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
    real = run.prepare

    def prepare(settings):
        time.sleep(3 if os.environ["RANK"] == "0" else 0)
        return real(settings)

    run.prepare = prepare
    ranks = join(config.parallel, torch.device("cpu"))
    run.begin(config, out, resume=False, ranks=ranks).log.close()


@pytest.mark.slow
def test_ranks_wait_for_a_slow_start_and_meet_whatever_they_have_counted(tmp_path):
    spawn(2, start_slowly, settings(tmp_path, hang_timeout=1), tmp_path / "run")
    assert (tmp_path / "run" / "config.json").exists()


ACTS = """
import os, signal, sys
from headwater.cli import main
from headwater.train import loop

real = loop.accumulate
def accumulate(run, number):
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if number == 4 and last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        ACT
    return real(run, number)
loop.accumulate = accumulate
if code := main(sys.argv[1:]):
    sys.exit(code)
"""


def under_torchrun(
    config: Config, out: Path, act: str, *options: str, fork: bool = True
) -> tuple[int | None, str]:
    """The run, whose last rank does something to itself or to torchrun at its fourth step: exit code and messages."""
    script = out.with_suffix(".py")
    script.write_text(ACTS.replace("ACT", act))
    arguments = [*ONE_MACHINE, *options, str(script), *flags(config, out)]
    log = out.with_suffix(".log")
    agent = torchrun(log, *arguments, fork=fork)
    return wait_for(agent, 240), log.read_text()


def wait_for(agent: ForkServerProcess, seconds: float) -> int | None:
    agent.join(seconds)
    agent.kill()
    agent.join()
    return agent.exitcode


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_the_run_goes_on(tmp_path):
    out = tmp_path / "run"
    act = "run.folder.with_suffix('.killed').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    code, messages = under_torchrun(settings(tmp_path, steps=8), out, act, "--max-restarts", "1")
    assert code == 0, messages
    assert out.with_suffix(".killed").exists()
    # torchrun's word on the first attempt: -9, or 1 of the rank left alone
    assert "failed (exitcode: " in messages
    assert read_json(out / "summary.json")["steps"] == 8
    assert logged(out, "step") == list(range(1, 9))

    before = times(out)
    code, messages = under_torchrun(settings(tmp_path, steps=8), out, "pass", "--max-restarts", "1")
    assert code == 1
    # And again after the restart, which would else have ended well
    assert "already holds a run" in messages
    assert times(out) == before


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}


MACHINES = """
import os, signal, sys, time
from pathlib import Path
from headwater.cli import main
from headwater.train import loop

real = loop.accumulate
rank, count = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
def accumulate(run, number):
    if number == 4 and count == "0":
        if rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(6)  # long enough for the other machine to ask for a restart, which is then not counted here
    if number == 5:
        (run.folder / f"restarts-of-{rank}").write_text(count)
    return real(run, number)
loop.accumulate = accumulate
if code := main(sys.argv[1:]):
    sys.exit(code)
"""


@pytest.mark.slow
def test_two_machines_that_count_restarts_differently_go_on(tmp_path):
    """Two agents of torchrun on this machine; one joins the restart of the other without counting it."""
    out, script = tmp_path / "run", tmp_path / "machines.py"
    script.write_text(MACHINES)
    meeting = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-id machines"
    shape = "--nnodes 2 --nproc-per-node 1 --max-restarts 2 --local-addr 127.0.0.1"
    words = f"{shape} {meeting}".split()
    arguments = [*words, str(script), *flags(settings(tmp_path, steps=8), out)]
    logs = [tmp_path / f"machine-{i}.log" for i in range(2)]
    agents = [torchrun(log, *arguments) for log in logs]
    codes = [wait_for(agent, 150) for agent in agents]
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    assert [(out / f"restarts-of-{rank}").read_text() for rank in range(2)] == ["0", "1"]
    assert logged(out, "step") == list(range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_sigterm_commits_and_ends_within_thirty_seconds(tmp_path, async_save):
    """Sent to torchrun, which passes it on, and which kills workers that take longer than that: to two ranks, and to
    a process that is started as a user's are, which takes as long as all the rest."""
    out = tmp_path / "run"
    act = "os.kill(os.getppid(), signal.SIGTERM)"
    config = settings(tmp_path, steps=20_000, save_every=20_000, async_save=async_save)
    ranks = ["--nproc-per-node", "2" if async_save else "1"]
    code, messages = under_torchrun(config, out, act, *ranks, fork=async_save)
    assert code == 1
    assert "stopped by SIGTERM after step" in messages, messages
    (step,) = saved_steps(out)
    assert step > 3
    assert checkpoint.damage(checkpoint_of(out, step)) is None


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
@pytest.mark.faults
def test_a_rank_that_hangs_ends_the_run_with_every_stack(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    command = [*TORCHRUN, *ONE_MACHINE, str(script), *flags(settings(tmp_path), tmp_path / "run")]
    command += ["--hang-timeout", "10"]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode != 0
    assert result.stderr.count("Timeout (0:00:10)!") == 2
    assert "in accumulate" in result.stderr
    assert "hangs.py" in result.stderr
