"""The JSON files of a run: reading them, and the hash that the summary has of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.errors import UserError

HASH = "hash"


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises UserError if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problem = f"is missing: {path.parent} does not look like a folder that headwater wrote"
    except (ValueError, RecursionError) as error:
        problem = f"is damaged ({error}): restore it, or start again in another folder"
    raise UserError(f"{path} {problem}")


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises UserError for anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def with_hash(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with a hash of them, so that a flipped bit on the disk is noticed."""
    others = {key: value for key, value in values.items() if key != HASH}
    encoded = json.dumps(others, sort_keys=True).encode()
    return others | {HASH: hashlib.sha256(encoded).hexdigest()}


def read_hashed(path: Path) -> dict[str, Any]:
    """Read values that may have a hash. Raises UserError if they do not fit it."""
    values = read_object(path)
    if HASH in values and values != with_hash(values):
        raise UserError(
            f"{path} is not what was written: its values do not fit their hash. Take it from a "
            f'copy, or, if you have changed it yourself, remove "{HASH}" from it'
        )
    return values
