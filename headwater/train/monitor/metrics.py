"""metrics.jsonl: what a run writes as it goes, one record a line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from headwater.folders import replace_file


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
        lines = (
            path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        )  # what follows the last end is torn
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
