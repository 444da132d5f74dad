"""Curves and depth records as a page draws them: smoothed, averaged over seeds, thinned."""

import statistics
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from headwater.runs.groups import Group, once
from headwater.runs.record import Record, RecordedRun, number

# Lists of a depth record, by the name that the page gives them.
DEPTH_LISTS = {
    "output": "output_norm",
    "read": "read_norm",
    "gradient": "gradient_norm",
    "entropy": "entropy",
    "experts": "expert_load_cv",  # of models that have experts
}

Points = list[tuple[int, float, float | None]]  # step, tokens, value


def points(rows: list[Record]) -> Points:
    curve: Points = []
    for row in rows:
        curve.append((row["step"], row["tokens"], number(row.get("loss"))))
    return curve


def smoothing_reach(count: int) -> int:
    """Count the neighbours on each side of a smoothed point: a twentieth of the curve in all."""
    return max(1, count // 40)


def smooth(curve: Points) -> Points:
    """Centred moving average; a missing value stays missing.

    It narrows towards the steep start, where far neighbours would bend it; the last points look
    back more than ahead.
    """
    reach = smoothing_reach(len(curve))
    # Running sums make each average a difference of two, however wide it is.
    values = [value for _, _, value in curve]
    sums = list(accumulate((value or 0.0 for value in values), initial=0.0))
    counts = list(accumulate((value is not None for value in values), initial=0))
    smoothed: Points = []
    for i, (step, tokens, value) in enumerate(curve):
        near = min(reach, i)
        low, high = i - near, min(i + near + 1, len(curve))
        if value is not None:
            total, count = sums[high] - sums[low], counts[high] - counts[low]
            value = total / count
        smoothed.append((step, tokens, value))
    return smoothed


def average(curves: list[Points]) -> Points:
    """The mean over seeds at the steps that all reached; missing where a seed's value is."""
    if not curves:
        return []
    tables = [_by_step(curve) for curve in curves]
    means: Points = []
    for step, tokens, _ in curves[0]:
        if not all(step in table for table in tables):
            continue
        values = [table[step] for table in tables]
        numbers = [value for value in values if value is not None]
        complete = len(numbers) == len(tables)
        means.append((step, tokens, statistics.fmean(numbers) if complete else None))
    return means


def _by_step(curve: Points) -> dict[int, float | None]:
    return {step: value for step, _, value in curve}


def subtract(curve: Points, base: Points) -> Points:
    """Point by point, at the steps both have; missing where either is."""
    table = _by_step(base)
    differences: Points = []
    for step, tokens, value in curve:
        if step in table:
            other = table[step]
            missing = value is None or other is None
            differences.append((step, tokens, None if missing else value - other))  # type: ignore[operator]
    return differences


def thin(items: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` of the items, evenly spaced, with the first and the last."""
    if len(items) <= limit:
        return list(items)
    if limit == 1:
        return [items[-1]]
    # From the first to the last in equal steps.
    stride = (len(items) - 1) / (limit - 1)
    return [items[round(i * stride)] for i in range(limit)]


def curves(group: Group, kind: str) -> dict[int, Points]:
    """The curve of each run by its position in the group: "train", "eval" or "difference"."""
    # Differences are taken to the baseline's run of equal seed.
    baseline = {run.seed: run for run in group.baseline.runs} if group.baseline else {}
    by_position: dict[int, Points] = {}
    for position, run in enumerate(group.runs):
        curve = _curve(run, kind, baseline.get(run.seed))
        if curve:
            by_position[position] = curve
    return by_position


def _curve(run: RecordedRun, kind: str, baseline: RecordedRun | None) -> Points:
    if kind == "train":
        return smooth(points(run.train))
    if kind == "eval":
        return points(run.evals)
    return subtract(points(run.evals), points(baseline.evals)) if baseline else []


def draw_curves(group: Group, kind: str, limit: int) -> dict[str, Any]:
    """The group's curves as the page's script takes them, each with at most `limit` points."""
    by_position = curves(group, kind)
    runs = [group.runs[position] for position in by_position]

    # A seed that ran twice is drawn twice, and counts once in the mean.
    counted = set(map(id, once(runs)))
    lines, averaged = [], []
    for run, curve in zip(runs, by_position.values(), strict=True):
        lines.append({"seed": run.seed, **_lists(curve, limit)})
        if id(run) in counted:
            averaged.append(curve)
    recorded = max(map(len, by_position.values()), default=0)
    return {
        "runs": lines,
        "mean": _lists(average(averaged), limit),
        "recorded": recorded,
        "window": 2 * smoothing_reach(recorded) + 1 if kind == "train" else 1,
    }


def _lists(curve: Points, limit: int) -> dict[str, list[float | None]]:
    places = thin(curve, limit)
    return {
        "x": [tokens for _, tokens, _ in places],
        "y": [rounded(value, 5) for _, _, value in places],
    }


def draw_depth(group: Group, frames: int, digits: int) -> dict[str, Any] | None:
    """Average depth records over seeds, at up to `frames` steps that every seed recorded.

    Without a common step, the last record of each seed is taken.
    """
    runs = once([run for run in group.runs if run.depth])
    kinds = runs[-1].depth[-1]["sublayers"] if runs else []

    # The records of each run by step. A run of other sublayers is of another model.
    tables = []
    for run in runs:
        records = [record for record in run.depth if record["sublayers"] == kinds]
        tables.append({record["step"]: record for record in records})
    if not kinds or not all(tables):
        return None

    shared = [step for step in tables[0] if all(step in table for table in tables)]
    records_of_frames = [[table[step] for table in tables] for step in thin(shared, frames)]
    if not records_of_frames:
        records_of_frames = [[list(table.values())[-1] for table in tables]]
    return {
        "kinds": [str(kind) for kind in kinds],
        "seeds": len(runs),
        "recorded": len(shared) or 1,
        "frames": [frame(records, digits) for records in records_of_frames],
    }


def frame(records: list[Record], digits: int) -> dict[str, Any]:
    """Average the lists of one step over seeds, and the map's lower triangle, row after row."""
    values: dict[str, Any] = {key: records[0][key] for key in ("step", "tokens")}
    for name, key in DEPTH_LISTS.items():
        values[name] = mean_list([record.get(key) for record in records], digits)
    values["mixing"] = mean_list([_triangle(record) for record in records], digits)
    return values


def _triangle(record: Record) -> list[float | None] | None:
    """Read r has the r + 1 sources before it."""
    triangle: list[float | None] = []
    for r, row in enumerate(record.get("mixing") or []):
        triangle += row[: r + 1]
    return triangle or None


def mean_list(lists: list[list[Any] | None], digits: int) -> list[float | None] | None:
    """Position-wise mean over seeds; None where no seed has a number."""
    present = [values for values in lists if values is not None]
    if not present:
        return None
    # A seed without a number at a place is left out of the mean there.
    means = []
    for column in zip(*present):
        numbers = [value for value in map(number, column) if value is not None]
        means.append(rounded(statistics.fmean(numbers), digits) if numbers else None)
    return means


def rounded(value: float | None, digits: int) -> float | None:
    """Round to significant digits, as many as a page can show, and whole numbers to integers."""
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
