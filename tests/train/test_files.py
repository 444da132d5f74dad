"""A run folder survives a log with lines that are no records, and a second process."""

import json
import os
import stat
from pathlib import Path

import pytest

from headwater.errors import UserError
from headwater.train.files import locked, write_json
from headwater.train.monitor.metrics import MetricsLog


def test_lines_that_are_no_records_go_and_the_others_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = [{"kind": "train", "step": step, "loss": 1.5} for step in (1, 2, 3, 4)]
    lines = [json.dumps(record).encode() for record in good]
    torn = [
        b'{"kind": "train", "st',
        b"\0" * 40,
        b"\xff\xfe",
        b"17",
        b'{"kind": "train"}',
        b"",
        b'{"step": null}',
    ]
    first, *others = lines
    path.write_bytes(b"\n".join([first, *torn, *others, first[:9]]))
    log = MetricsLog(path, step=3, saved={"bytes": 999, "sha256": "another"})
    log.write("train", 4, loss=float("nan"))
    log.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        *good[:3],
        {"kind": "train", "step": 4, "loss": None},
    ]


def test_what_replaces_a_file_is_on_the_disk_before_it_does(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n')
    events = []
    sync, rename = os.fsync, Path.replace

    def record_sync(handle):
        if stat.S_ISREG(os.fstat(handle).st_mode):
            events.append(os.fstat(handle).st_size)
        sync(handle)

    def record_rename(source, to):
        events.append(to.name)
        rename(source, to)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "replace", record_rename)
    MetricsLog(path, step=1).close()
    write_json(tmp_path / "summary.json", {})
    assert events == [path.stat().st_size, "metrics.jsonl", 3, "summary.json"]


def test_a_second_process_learns_who_is_at_work(tmp_path):
    (tmp_path / ".lock").write_text("process 1 on a host that is gone\n" * 3)
    for _ in range(2):
        with locked(tmp_path), pytest.raises(UserError) as caught, locked(tmp_path):
            pass
        message = str(caught.value)
        holder = f"another process is working in {tmp_path} (process {os.getpid()} on "
        assert holder in message
        assert "gone" not in message
