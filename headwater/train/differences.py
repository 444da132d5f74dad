"""Differences between two configurations, if they do not describe one run.

A run goes on, and counts for a comparison or a study, only as what it began as; but more has come to be set since the
first runs, some settings only say what is kept, and a text is the same wherever it lies.
"""

from __future__ import annotations

import json
from typing import Any

from headwater.runs.settings import SETTINGS, flatten

# Other values of these change what is kept and shown and who computes it, never what.
OUTER = frozenset(name for name, marks in SETTINGS.items() if marks.changes == "records")
# A run may be resumed with other values of these as well.
FREE = frozenset(
    name for name, marks in SETTINGS.items() if marks.changes != "numbers" or marks.resumable
)

# Equal where two runs have seen the same tokens
CORPUS = frozenset({"source_hash", "tokenizer_hash", "split"})
# What tokens are made of, with the files.
TEXT = frozenset(name for name in SETTINGS if name.startswith("data."))


def differences(
    saved: dict[str, Any], asked: dict[str, Any], free: frozenset[str] = FREE
) -> list[str]:
    """List the keys that change the run and are not equal, with both values.

    They are compared as JSON (where tuples are lists). Settings come before what follows from them. Where the tokens
    are the same, what their text is called and where it lies does not count.
    """
    corpus = saved.get("corpus", {})
    if corpus.keys() >= CORPUS and corpus == asked.get("corpus"):
        free = free | TEXT
    old, new = as_compared(saved), as_compared(asked)
    lines = []
    for key in sorted(old.keys() | new.keys(), key=lambda key: (key.startswith("corpus."), key)):
        before, after = old.get(key), new.get(key)
        if key not in free and before != after:
            lines.append(f"{key}: {before!r} there, {after!r} asked for")
    return lines


def as_compared(values: dict[str, Any]) -> dict[str, Any]:
    return flatten(json.loads(json.dumps(values)))
