"""metrics.jsonl: what a run writes as it goes, one record a line."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from headwater.errors import UserError, spell
from headwater.folders import replace_file

NEWLINE = b"\n"
START: dict[str, Any] = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}


def read_record(line: bytes) -> dict[str, Any] | None:
    """One line of a metrics log, or None where it is not a record: a killed machine can leave anything there."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    # A record knows its step: by it one decides what to keep.
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


class Mirror(Protocol):
    def put(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """metrics.jsonl: one object a line, flushed as it is written. Numbers that are not finite become null."""

    mirrors: Sequence[Mirror] = ()
    """Loggers that get every record as well."""

    def __init__(self, path: Path, *, step: int = 0, saved: Mapping[str, Any] = START) -> None:
        """Go on after the first bytes of a log, which the checkpoint of `step` has `saved` the number and the hash of.

        What follows them is of steps that will be taken again, or torn. Where these bytes are not what was written, the
        records up to the step stay, and the run says so.
        """
        written = path.read_bytes() if path.exists() else b""
        # The checkpoint vouches for these bytes.
        content = written[: saved["bytes"]]
        if hashlib.sha256(content).hexdigest() != saved["sha256"]:
            content = b"".join(records_until(written, step))
            print(
                f"headwater: {path} is not what was written until step {step}: "
                f"{content.count(NEWLINE)} records are left of that time",
                file=sys.stderr,
            )
        # What is wrong or too late leaves the file before anything is added.
        replace_file(path, content)
        self.path, self.size, self.digest = path, len(content), hashlib.sha256(content)
        self.file = path.open("ab")

    def write(self, kind: str, step: int, **values: Any) -> None:
        record = {"kind": kind, "step": step} | finite(values)
        line = json.dumps(record, allow_nan=False).encode() + NEWLINE
        self.file.write(line)
        self.file.flush()
        self.size += len(line)
        self.digest.update(line)
        # Loggers come after the file, which is the record of the run.
        for mirror in self.mirrors:
            mirror.put(record)

    def saved(self) -> dict[str, Any]:
        """The length and hash that a checkpoint keeps, to know this log again."""
        return {"bytes": self.size, "sha256": self.digest.hexdigest()}

    def sync(self) -> None:
        """Before a checkpoint commits, the records it vouches for reach the disk.

        Raises: `UserError` if the file is no longer in its place, and so neither is the folder of the run.
        """
        # The file that is open must be the file of that name.
        here = os.fstat(self.file.fileno())
        if not (self.path.exists() and os.path.samestat(here, self.path.stat())):
            raise UserError(
                f"{self.path} is no longer the file that this run writes to: its folder was moved or "
                "removed, or another process works there. Put it back where it was, then go on "
                f"with {spell('resume')}"
            )
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
        mirrors, self.mirrors = self.mirrors, ()
        for mirror in mirrors:
            mirror.close()


def records_until(written: bytes, step: int) -> Iterator[bytes]:
    """The whole lines that hold a record of a step up to this one."""
    for line in written.splitlines(keepends=True):
        record = read_record(line)
        if line.endswith(NEWLINE) and record is not None and record["step"] <= step:
            yield line


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
