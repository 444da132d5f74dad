"""launch.json, which a comparison or a study writes beside a run that it starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.runs.files import read_object

LAUNCH = "launch.json"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Facts of a run that the run itself does not know."""

    side_by_side: int | None = None
    """The most runs made at a time, this one included; None if nobody recorded it."""
    arm: str = ""
    """Name of the run's arm in a comparison, where that is more than its residual."""
    corpus: dict[str, Any] = field(default_factory=dict)
    """Hashes of the text and of the tokenizer that the run began with."""


def read_launch(run: Path) -> Launch:
    """Read launch.json of a run's folder; a run that was started by itself has none."""
    path = run / LAUNCH
    # Values of another type count as unknown.
    values = read_object(path) if path.is_file() else {}
    count, corpus = values.get("side_by_side"), values.get("corpus")
    return Launch(
        side_by_side=count if isinstance(count, int) else None,
        arm=str(values.get("arm") or ""),
        corpus=corpus if isinstance(corpus, dict) else {},
    )


def most_at_a_time(counts: Iterable[int | None]) -> int | None:
    """The most runs made at a time with any of several; None if one of them does not say."""
    counts = list(counts)
    if None in counts:
        return None
    return max((count for count in counts if count is not None), default=None)
