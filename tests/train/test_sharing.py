"""Several processes on one GPU: NVIDIA's MPS is started for them and ended, and never stands in the way."""

import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from rich.console import Console

from headwater.train import jobs, sharing
from headwater.train.sharing import shared_gpu


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A control program that notes what it is told, and where."""

    def install(exit_code=0, words=""):
        program = tmp_path / "bin" / sharing.CONTROL
        program.parent.mkdir()
        program.write_text(
            f'#!/bin/sh\necho "$1 $(cat) $CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/told\necho "{words}" >&2\n'
            f"exit {exit_code}\n"
        )
        program.chmod(0o755)
        return tmp_path / "told"

    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sharing, "PLACES", (str(tmp_path / "elsewhere"),))
    monkeypatch.setattr(sharing, "RUNNING", str(tmp_path / "running"))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return install


def test_it_runs_while_the_processes_do(control):
    told = control()
    with shared_gpu(2, pytest.fail) as environment:
        folder = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.isdir(folder)
        assert told.read_text() == f"-d  {folder}\n"
    assert told.read_text().splitlines()[1] == f" quit {folder}"
    assert not os.path.exists(folder)


def test_it_ends_with_an_error_too(control):
    told = control()
    with pytest.raises(KeyboardInterrupt), shared_gpu(2, pytest.fail):
        raise KeyboardInterrupt
    assert "quit" in told.read_text()


def test_one_that_does_not_start_is_told_in_a_line(control):
    told = control(1, "no GPU that can")
    said = []
    with shared_gpu(2, said.append) as environment:
        assert environment == {}
    assert said == ["runs take turns on the GPU: NVIDIA's MPS does not start (no GPU that can)"]
    assert "quit" in told.read_text()  # it may have started late


@pytest.mark.parametrize(
    "case", ["one process", "no control", "told by the environment", "in the default place"]
)
def test_where_it_is_not_needed_nothing_happens(control, case, tmp_path, monkeypatch):
    told = tmp_path / "told" if case == "no control" else control()
    if case == "told by the environment":
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "somewhere")
    if case == "in the default place":
        (tmp_path / "running").mkdir()
    with shared_gpu(1 if case == "one process" else 2, pytest.fail) as environment:
        assert environment == {}
    assert not told.exists()


def test_runs_get_its_environment(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        subprocess, "Popen", lambda *_, env, **__: seen.update(env) or SimpleNamespace()
    )
    job = jobs.Job(label="a", folder=tmp_path / "run", arguments=(), steps=1)
    jobs.launch(job, 2, {"CUDA_MPS_PIPE_DIRECTORY": "here"})
    assert seen["CUDA_MPS_PIPE_DIRECTORY"] == "here"
    assert seen["OMP_NUM_THREADS"] == str(max(1, os.cpu_count() // 2))


PROCESS = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "began").write_text(str(time.time()))
time.sleep(0.6)
(folder / "recorded").write_text(str(time.time()))  # before the file that others wait for
(folder / "metrics.jsonl").write_text("{}")
time.sleep(1.5)
sys.exit(1)
"""


@pytest.mark.parametrize("shared", [True, False])
def test_runs_that_share_a_gpu_start_when_the_one_before_has_recorded_a_step(
    shared, tmp_path, monkeypatch
):
    runs = [jobs.Job(label=name, folder=tmp_path / name, arguments=(), steps=1) for name in "abc"]
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(jobs, "shared_gpu", lambda *_: nullcontext({"MPS": "on"} if shared else {}))
    monkeypatch.setattr(jobs, "launch", lambda job, *_: started(job.folder))
    assert (
        len(jobs.run_all(runs, 2, Console(quiet=True), go_on="")) == 3
    )  # all fail, and end none of the others
    a, b, c = (
        {name: float((job.folder / name).read_text()) for name in ("began", "recorded")}
        for job in runs
    )
    assert (b["began"] > a["recorded"]) is shared
    assert (
        b["began"] < a["recorded"] + 1.4 < c["began"]
    )  # beside the first, and the third only when that has ended


def test_of_four_that_share_a_gpu_two_may_be_starting(tmp_path, monkeypatch):
    runs = [jobs.Job(label=name, folder=tmp_path / name, arguments=(), steps=1) for name in "abcd"]
    starting = []

    def launch(job, *_):
        starting.append(
            1 + sum(run.folder.exists() and not (run.folder / "recorded").exists() for run in runs)
        )
        return started(job.folder)

    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(jobs, "shared_gpu", lambda *_: nullcontext({"MPS": "on"}))
    monkeypatch.setattr(jobs, "launch", launch)
    jobs.run_all(runs, 4, Console(quiet=True), go_on="")
    assert (len(starting), max(starting)) == (4, 2)


@pytest.fixture
def run_for(tmp_path, monkeypatch):
    """`run_all` by a clock of the test's: labels of the runs that were started, and of those that were cut off."""

    def run(seconds, runs, *, whole=True, before=0.0):
        """`runs`: work and seconds by label; `before`: seconds of their attempts before this one."""
        now, started, cut_off = [0.0], [], []
        listed = [
            jobs.Job(
                label=label, folder=tmp_path / f"{whole}-{label}", arguments=(), steps=1, work=work
            )
            for label, (work, _) in runs.items()
        ]

        def launch(job, *_):
            started.append(job.label)
            job.folder.mkdir()
            ends = now[0] + runs[job.label][1]
            return SimpleNamespace(returncode=0, poll=lambda: end(job) if now[0] >= ends else None)

        def end(job):
            (job.folder / "summary.json").touch()
            return 0

        clock = {"time": lambda: now[0], "monotonic": lambda: now[0]}
        clock["sleep"] = lambda seconds: now.__setitem__(0, now[0] + seconds)
        monkeypatch.setattr(jobs, "time", SimpleNamespace(**clock))
        monkeypatch.setattr(jobs, "launch", launch)
        monkeypatch.setattr(
            jobs.TrainResult, "read", lambda _: SimpleNamespace(seconds=before, bits_per_byte=1.0)
        )
        monkeypatch.setattr(
            jobs, "stop", lambda running: cut_off.extend(active.job.label for active in running)
        )
        jobs.run_all(listed, 1, Console(quiet=True), go_on="", seconds=seconds, whole=whole)
        return started, cut_off

    return run


def test_no_run_is_started_that_would_not_end_in_time(run_for):
    """Once it is known how long one takes: without `whole`, the next is started, and cut off."""
    runs = dict.fromkeys("abc", (1.0, 2.0))
    assert run_for(3.6, runs) == (["a"], [])
    assert run_for(3.6, runs, whole=False) == (["a", "b"], ["b"])


def test_a_short_run_is_started_where_a_long_one_would_not_end_in_time(run_for):
    short, long = (1.0, 1.0), (8.0, 8.0)
    assert run_for(12, {"a": short, "b": long, "c": long, "d": short, "e": short}) == (
        ["a", "b", "d", "e"],
        [],
    )


def test_a_run_that_was_resumed_is_not_taken_for_a_short_one(run_for):
    assert run_for(6, dict.fromkeys("abc", (1.0, 1.0)), before=5.0) == (["a"], [])


@pytest.mark.parametrize(
    ("work", "longest"),
    [
        (
            2.0,
            5.0,
        ),  # another residual of the size took longer than the one that has as many operations
        (1.0, 5.0),  # of the smallest size that is as large
        (4.0, 60.0),
        (90.0, 180.0),  # in proportion to the largest
    ],
)
def test_how_long_a_run_may_last_is_known_from_those_like_it(work, longest):
    assert jobs.at_most(work, [(2.0, 3.0), (2.2, 5.0), (30.0, 60.0)]) == longest
    assert jobs.at_most(work, []) == 0


def started(folder):
    folder.mkdir()
    (folder / "log.txt").touch()
    return subprocess.Popen([sys.executable, "-S", "-c", PROCESS, str(folder)])
