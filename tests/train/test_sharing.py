"""Several processes on one GPU: NVIDIA's MPS is started for them and ended, and never stands in the way."""

import os
import subprocess
from types import SimpleNamespace

import pytest

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


@pytest.mark.parametrize("case", ["one process", "no control", "told by the environment", "in the default place"])
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
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: seen.update(env) or SimpleNamespace())
    job = jobs.Job(label="a", folder=tmp_path / "run", arguments=(), steps=1)
    jobs.launch(job, 2, {"CUDA_MPS_PIPE_DIRECTORY": "here"})
    assert seen["CUDA_MPS_PIPE_DIRECTORY"] == "here"
    assert seen["OMP_NUM_THREADS"] == str(max(1, os.cpu_count() // 2))
