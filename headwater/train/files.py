"""Small files that are replaced whole, and locks."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
