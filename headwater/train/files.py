"""JSON files, their seals, and locks."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
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
    # The seal fits only if every byte is as it was written.
    values.pop("seal", None)
    return values if seal(values) == raw else None


# What may be in a folder before the work in it begins
LOGS = ("log.txt", "launch.json", "nohup.out")


def others_in(folder: Path, known: Collection[str] = ()) -> list[str]:
    """List what a folder holds besides `known` names, hidden files and logs: nobody may write beside it."""
    # A folder that is not there holds nothing.
    if not folder.is_dir():
        return []
    expected = (*known, *LOGS)
    return sorted(
        p.name
        for p in folder.iterdir()
        if not (p.name.startswith(".") or p.suffix == ".log" or p.name in expected)
    )


def refuse_others(folder: Path, what: str, known: Collection[str] = ()) -> None:
    """`what` begins in a folder of its own: files that are there already would be overwritten or mixed up with it."""
    if others := others_in(folder, known):
        names = ", ".join([*others[:3], "..."] if len(others) > 3 else others)
        raise UserError(
            f"{folder} holds something else ({names}), and {what} needs a folder of its own: choose another "
            f"{spell('out')}"
        )


def require(module: str, extra: str) -> Any:
    """Import a package that only an extra of headwater installs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{extra} cannot be used ({error}): pip install 'headwater[{extra}]'"
        ) from None


def from_here(path: Path) -> str:
    """Name a path where nothing is; for a relative one, with the folder it is relative to."""
    return str(path) if path.is_absolute() else f"{path} (from {Path.cwd()})"


def open_lock(path: Path) -> IO[str]:
    """Open a lock file, but never through a link: the file that it leads to would be overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    return os.fdopen(handle, "r+", encoding="utf-8")


@contextmanager
def lock_if_free(lock: Path) -> Iterator[bool]:
    """Hold a lock inside if nobody else does, and tell. The kernel drops it with its holder, however that one dies."""
    with open_lock(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def taking_turns(lock: Path) -> Iterator[None]:
    """Hold a lock inside; who comes meanwhile waits for it."""
    with open_lock(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time work in a folder, and write down which."""
    lock = folder / ".lock"
    # Whoever is kept out learns whom to wait for.
    with lock_if_free(lock) as is_free:
        if not is_free:
            holder = lock.read_text(encoding="utf-8").strip() or "it left no name"
            raise UserError(
                f"another process is working in {folder} ({holder}): wait for it, end it with kill, or choose another "
                f"{spell('out')}"
            )
        lock.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield
