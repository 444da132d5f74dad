"""The files of a run folder that every step may touch: small JSON files replaced whole, locks, and the metrics log."""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from headwater.errors import UserError


def write_json(path: Path, value: Any) -> None:
    replace_file(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def replace_file(path: Path, content: bytes) -> None:
    """In one rename: a reader sees the old content or the new, never half of one."""
    scratch = path.with_name(f".tmp-{path.name}")
    with scratch.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {path.parent} does not look like a folder that headwater wrote") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): restore it, or start again in another folder") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time: the kernel drops the lock with its holder, however that one dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "it left no name"
            raise UserError(
                f"another process is working in {folder} ({holder}): wait for it, end it with kill, or choose another "
                "--out"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


@contextmanager
def taking_turns(lock: Path) -> Iterator[None]:
    """As `locked`, but the others wait until it is their turn."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_record(line: bytes) -> dict[str, Any] | None:
    """One line of a metrics log, or None where it is not a record: a killed machine can leave anything there."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


class Mirror(Protocol):
    def put(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """metrics.jsonl: one object a line, flushed as it is written. Numbers that are not finite become null."""

    mirrors: Sequence[Mirror] = ()
    """What else is told."""

    def __init__(self, path: Path, *, keep_until: int) -> None:
        """Records after step `keep_until` are of steps that will be taken again: they go, as do lines that are none."""
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # what follows the last end is torn
        records = ((line, read_record(line)) for line in lines)
        kept = [line + b"\n" for line, record in records if record and record["step"] <= keep_until]
        replace_file(path, b"".join(kept))
        self.file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, **values: Any) -> None:
        record = {"kind": kind, "step": step} | finite(values)
        self.file.write(json.dumps(record, allow_nan=False) + "\n")
        self.file.flush()
        for mirror in self.mirrors:
            mirror.put(record)

    def sync(self) -> None:
        """Before a checkpoint commits, the records it vouches for reach the disk."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
        mirrors, self.mirrors = self.mirrors, ()
        for mirror in mirrors:
            mirror.close()


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
