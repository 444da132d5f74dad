"""Files and folders that are written whole or not at all: synced, then renamed, and swept."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.errors import Interrupted, UserError
from headwater.folders import HASHES, check_hashes, whole_file, whole_folder


@pytest.fixture
def synced(monkeypatch):
    """The paths that were synced, each with whether a final name was there already."""
    calls = []
    sync = os.fsync

    def record(handle):
        calls.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    monkeypatch.setattr(os, "fsync", record)
    return calls


def write_model(folder):
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "inner").mkdir()
    (folder / "inner" / "config.json").write_text("{}")


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, synced, there):
    out = tmp_path / "out"
    if there:
        out.mkdir()
    with whole_folder(out) as partial:
        write_model(partial)
        assert not list(out.glob("*.safetensors"))
    parent = out if there else tmp_path
    *before, last = synced
    files = {"model.safetensors", "inner", "inner/config.json", HASHES, "."}
    assert {str(path.relative_to(partial)) for path in before} == files
    assert last == parent  # the name itself
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "inner", HASHES}


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, synced):
    path = tmp_path / "page.html"
    path.write_text("old")
    with whole_file(path) as scratch:
        scratch.write_text("new")
        assert path.read_text() == "old"
    assert synced == [scratch, tmp_path]
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_what_was_killed_is_swept_by_the_next_call(tmp_path):
    """SIGKILL leaves the hidden folder; SIGTERM and SIGHUP leave nothing."""
    program = (
        "import sys, time; from pathlib import Path; from headwater.folders import whole_folder\n"
    )
    program += "with whole_folder(Path('out')): print('in', flush=True); time.sleep(60)"
    for number, remains in (
        (signal.SIGTERM, []),
        (signal.SIGHUP, []),
        (signal.SIGKILL, [".tmp-out"]),
    ):
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        )
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        process.wait()
        assert [path.name for path in tmp_path.iterdir()] == remains
    with whole_folder(tmp_path / "out") as partial:
        write_model(partial)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_signal_has_the_exit_code_of_the_shell_and_its_handler_again(tmp_path):
    with pytest.raises(Interrupted) as raised, whole_folder(tmp_path / "out"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert raised.value.exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_hashes_are_those_of_the_shell(tmp_path):
    with whole_folder(tmp_path / "out") as partial:
        write_model(partial)
    check = ["sha256sum", "--check", "--strict", HASHES]
    subprocess.run(check, cwd=tmp_path / "out", check=True, capture_output=True)
    (tmp_path / "out" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        check_hashes(tmp_path / "out")
    (tmp_path / "out" / HASHES).write_text("0123  model.safetensors\n")
    with pytest.raises(UserError, match="is damaged"):
        check_hashes(tmp_path / "out")
