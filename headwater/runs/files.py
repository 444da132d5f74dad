"""Reading a run's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headwater.errors import UserError


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises UserError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not valid JSON ({error}); it may have been cut off while it was written"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
