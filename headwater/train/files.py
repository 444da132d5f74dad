"""JSON files, their seals, and locks."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from headwater.errors import UserError, spell
from headwater.folders import replace_file


def write_json(path: Path, value: Any) -> None:
    replace_file(path, encode_json(value))


def encode_json(value: Any, indent: int | None = 1) -> bytes:
    """Encode a value as JSON. Without an indent C does it, which counts for the thousands of entries of an index."""
    return (json.dumps(value, indent=indent, allow_nan=False) + "\n").encode()


def seal(values: dict[str, Any]) -> bytes:
    """JSON with a hash of itself, so that it can be told from a damaged one."""
    return encode_json({**values, "seal": hashlib.sha256(encode_json(values)).hexdigest()})


def unseal(raw: bytes) -> dict[str, Any] | None:
    """Return the values that `seal` was given, or None if it did not write this."""
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    values.pop("seal", None)
    return values if seal(values) == raw else None


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing: {path.parent} does not look like a folder that headwater wrote"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{path} is damaged ({error}): restore it, or start again in another folder"
        ) from None


LOGS = (
    "log.txt",
    "launch.json",
    "nohup.out",
)  # what may be in a folder before the work in it begins


def others_in(folder: Path, known: Collection[str] = ()) -> list[str]:
    """List what a folder holds besides `known` names, hidden files and logs: nobody may write beside it."""
    if not folder.is_dir():
        return []
    kept = (*known, *LOGS)
    return sorted(
        p.name
        for p in folder.iterdir()
        if not (p.name.startswith(".") or p.suffix == ".log" or p.name in kept)
    )


def refuse_others(folder: Path, what: str, known: Collection[str] = ()) -> None:
    """`what` begins in a folder of its own: files that are there already would be overwritten or mixed up with it."""
    if others := others_in(folder, known):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise UserError(
            f"{folder} holds something else ({', '.join(others[:3])}{more}), and {what} needs a folder of its own: "
            f"choose another {spell('out')}"
        )


def from_here(path: Path) -> str:
    """Name a path where nothing is; for a relative one, with the folder it is relative to."""
    return str(path) if path.is_absolute() else f"{path} (from {Path.cwd()})"


def open_lock(path: Path) -> IO[str]:
    """Never through a link: what it leads to would be emptied."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UserError(
            f"{path} is a link, and a lock must be a file: remove it, or choose another "
            f"{spell('out')}"
        ) from None
    return os.fdopen(handle, "r+", encoding="utf-8")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time: the kernel drops the lock with its holder, however that one dies."""
    with open_lock(folder / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read().strip() or "it left no name"
            raise UserError(
                f"another process is working in {folder} ({holder}): wait for it, end it with kill, or choose another "
                f"{spell('out')}"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


@contextmanager
def taking_turns(lock: Path) -> Iterator[None]:
    """Lock as `locked` does, but let the others wait until it is their turn."""
    with open_lock(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
