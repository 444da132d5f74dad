"""Runs that differ only by seed, as one group: what it ended with, and its curves and depth records for drawing.

A difference is taken seed by seed (equal seeds saw equal data in equal order) and judged as headwater.runs.stats says.
"""

import statistics
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import accumulate
from typing import Any

from headwater.analyze.runs import Record, RecordedRun, number
from headwater.models import ModelConfig
from headwater.runs.stats import LOWER, Paired, Stat, pair, summarize

BASELINE = "standard"
# Settings that may differ inside a group: they say where and how a run was carried out, not what was computed. One that
# a bad step stopped goes on without it; its notes count such steps.
INCIDENTAL = {
    "seed", "device", "cache", "compile", "graph", "log_every", "eval_every", "depth_every", "save_every", "keep",
    "async_save", "skip_nonfinite", "hang_timeout", "wandb", "tensorboard",
}  # fmt: skip
DEFAULTS = {one.name: one.default for one in fields(ModelConfig) if one.default is not MISSING}
UNFELT = {BASELINE: {"optim.query_lr"}}  # settings of what a residual does not have
DEPTH_LISTS = {
    "output": "output_norm",
    "read": "read_norm",
    "gradient": "gradient_norm",
    "entropy": "entropy",
}
DEPTH_LISTS["experts"] = "expert_load_cv"  # of models that have some

Points = list[tuple[int, float, float | None]]  # step, tokens, value


@dataclass
class Group:
    residual: str
    settings: dict[str, str]
    runs: list[RecordedRun] = field(default_factory=list)
    label: str = ""
    baseline: "Group | None" = None
    comparisons: int = 1
    """Groups of the page that are compared with their baselines over several seeds."""

    @property
    def finished(self) -> list[RecordedRun]:
        return [run for run in self.runs if run.summary is not None]

    @property
    def results(self) -> list[RecordedRun]:
        """The runs a table row speaks of: finished ones, or every run when none has finished; one of a seed."""
        return once(self.finished or self.runs)

    def final(self, key: str) -> Stat | None:
        return summarize([run.final(key) for run in self.results])

    def tokens(self) -> float | None:
        """Tokens of the longest run in `results`."""
        last = [row["tokens"] for run in self.results for row in (run.train[-1:] or run.evals[-1:])]
        return max(
            [value for run in self.finished if (value := run.final("tokens")) is not None] or last,
            default=None,
        )

    def by_seed(self, key: str = "loss") -> dict[int | None, float | None]:
        return {run.seed: run.final(key) for run in self.finished}

    def difference(self) -> Paired | None:
        """This group's loss minus its baseline's, over the seeds that finished in both."""
        if self.baseline is None or self.baseline is self:
            return None
        values = pair(self.by_seed(), self.baseline.by_seed())
        return Paired(values, self.comparisons) if values else None

    @property
    def beside(self) -> int | None:
        """The most runs made at a time with any run of a table row; None where one of them does not say."""
        return most_beside(self.results)

    @property
    def timed(self) -> bool:
        """Whether its wall-clock can be held against its baseline's: runs of both had the machine to themselves."""
        base = None if self.baseline is self else self.baseline
        return base is not None and self.beside == base.beside == 1


def once(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Of runs with one seed the last: made twice, it is still one draw, which tells nothing of how far seeds differ."""
    return list({run.name if run.seed is None else run.seed: run for run in runs}.values())


def most_beside(some: Sequence[Group] | Sequence[RecordedRun]) -> int | None:
    """The most runs made at a time with any of these; None where one of them does not say."""
    counts = [each.beside for each in some]
    return None if None in counts else max(filter(None, counts), default=None)


def noun(groups: Sequence[Group]) -> str:
    """What one of them is called: a residual, or an arm where some have one residual and differ in other settings, such
    as sizes and learning rates."""
    return "residual" if len({group.residual for group in groups}) == len(groups) else "arm"


def told_lowest(groups: list[Group]) -> Group | None:
    """The group that ends below every other, each pair told from chance; none where the noise leaves it open.

    It is chosen after looking at all of them, so every pair of groups counts as a comparison.
    """
    known = [
        (loss.mean, group)
        for group in groups
        if group.finished and (loss := group.final("loss")) is not None
    ]
    if len(known) < 2:
        return None
    _, best = min(known, key=lambda pair: pair[0])
    comparisons = len(known) * (len(known) - 1) // 2
    others = [pair(best.by_seed(), group.by_seed()) for _, group in known if group is not best]
    return (
        best
        if all(values and Paired(values, comparisons).verdict == LOWER for values in others)
        else None
    )


def group_runs(runs: list[RecordedRun], order: Sequence[str] = (BASELINE,)) -> list[Group]:
    """Groups, first those in `order`, whose first is the baseline, then the others as they come. Each knows the
    baseline trained with the same settings."""
    baseline = order[0]
    groups: dict[tuple, Group] = {}
    for run, settings in zip(runs, settings_of(runs), strict=True):
        group = groups.setdefault(
            (run.residual, *sorted(settings.items())), Group(run.residual, settings)
        )
        group.runs.append(run)
    place = {residual: number for number, residual in enumerate(order)}
    ordered = sorted(groups.values(), key=lambda group: place.get(group.residual, len(place)))
    for group in ordered:
        twins = [other for other in ordered if other.residual == group.residual]
        keys = telling([twin.settings for twin in twins])
        group.label = ", ".join([group.residual, *(words_of(key, group.settings) for key in keys)])
        group.baseline = next(
            (g for g in ordered if g.residual == baseline and not beyond(g, group)), None
        )
    judged = sum(
        1
        for group in ordered
        if (found := group.difference()) is not None and len(found.values) > 1
    )
    for group in ordered:
        group.comparisons = max(1, judged)
    return ordered


def beyond(one: Group, other: Group) -> list[str]:
    """The settings in which two groups differ, but for those that make their arms, or that `one` does not feel."""
    named = {key for group in (one, other) for run in group.runs for key in run.switches}
    named |= UNFELT.get(one.residual, set())
    return [key for key in differing([one.settings, other.settings]) if key not in named]


def settings_of(runs: Sequence[RecordedRun]) -> list[dict[str, str]]:
    """By dotted name. Runs that have seen the same tokens all have the first one's words for them, as one may have gone
    on where its text, or what its tokenizer was taken from, had moved to."""
    named: dict[tuple[object, ...], dict[str, str]] = {}
    found = []
    for run in runs:
        settings = flatten(run.config)
        seen = run.corpus.get("source_hash"), run.corpus.get("tokenizer_hash")
        if all(seen):
            text = {key: value for key, value in settings.items() if key.startswith("data.")}
            settings = {key: settings[key] for key in settings.keys() - text} | named.setdefault(
                seen, text
            )
        found.append(settings)
    return found


def flatten(config: Record, prefix: str = "") -> dict[str, str]:
    """Settings by dotted name, without the residual itself and what is incidental."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(
            value, dict
        ):  # a run from before there was a setting did what its default does
            flat |= flatten(DEFAULTS | value if key == "model" else value, f"{prefix}{key}.")
        elif key != "residual" and key not in INCIDENTAL:
            flat[prefix + key] = str(value)
    return flat


def differing(settings: list[dict[str, str]]) -> list[str]:
    keys = sorted({key for each in settings for key in each})
    return [key for key in keys if len({each.get(key) for each in settings}) > 1]


def telling(settings: list[dict[str, str]]) -> list[str]:
    """As few settings as tell these apart: none that goes with others, as heads do with width."""
    keys: list[str] = []
    for key in differing(settings):
        known, more = (
            {tuple(each.get(k) for k in some) for each in settings} for some in (keys, [*keys, key])
        )
        if len(more) > len(known):
            keys.append(key)
    return keys


def words_of(key: str, settings: dict[str, str]) -> str:
    name, value = key.split(".")[-1], settings.get(key, "unset")
    return f"no {name}" if value == "None" else f"{name} {value}"


def points(rows: list[Record], key: str = "loss") -> Points:
    return [(row["step"], row["tokens"], number(row.get(key))) for row in rows]


def smoothing_reach(count: int) -> int:
    """Neighbours on each side that a smoothed point averages over: about a twentieth of the curve in all."""
    return max(1, count // 40)


def smooth(curve: Points) -> Points:
    """Centred moving average; a missing value stays missing.

    It narrows towards the steep start, where far neighbours would bend it; the last points look back more than ahead.
    """
    reach = smoothing_reach(len(curve))
    sums = list(accumulate((value or 0.0 for _, _, value in curve), initial=0.0))
    counts = list(accumulate((value is not None for _, _, value in curve), initial=0))
    out: Points = []
    for i, (step, tokens, value) in enumerate(curve):
        near = min(reach, i)
        low, high = i - near, min(i + near + 1, len(curve))
        out.append(
            (
                step,
                tokens,
                None if value is None else (sums[high] - sums[low]) / (counts[high] - counts[low]),
            )
        )
    return out


def average(curves: list[Points]) -> Points:
    """The mean over seeds at the steps that every seed reached; missing where any seed's value is missing."""
    tables = [{step: (tokens, value) for step, tokens, value in curve} for curve in curves]
    out: Points = []
    for step, tokens, _ in curves[0] if curves else []:
        if all(step in table for table in tables):
            values = [value for table in tables if (value := table[step][1]) is not None]
            out.append(
                (step, tokens, statistics.fmean(values) if len(values) == len(tables) else None)
            )
    return out


def subtract(curve: Points, base: Points) -> Points:
    """Point by point, at the steps both have; missing where either is."""
    table = {step: value for step, _, value in base}
    shared = [(step, tokens, value, table[step]) for step, tokens, value in curve if step in table]
    return [
        (step, tokens, None if a is None or b is None else a - b) for step, tokens, a, b in shared
    ]


def thin(items: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` of the items, evenly spaced, first and last kept."""
    if len(items) <= limit:
        return list(items)
    if limit == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def curves(group: Group, kind: str) -> dict[int, Points]:
    """Each run's curve of one kind, by its position in the group."""
    made: dict[int, Points] = {}
    rivals = {run.seed: run for run in group.baseline.runs} if group.baseline else {}
    for position, run in enumerate(group.runs):
        if kind == "train":
            curve = smooth(points(run.train))
        elif kind == "eval":
            curve = points(run.evals)
        else:
            curve = (
                subtract(points(run.evals), points(rivals[run.seed].evals))
                if run.seed in rivals
                else []
            )
        if curve:
            made[position] = curve
    return made


def draw_curves(group: Group, kind: str, limit: int) -> dict[str, Any]:
    made = curves(group, kind)
    counted = {id(run) for run in once([group.runs[position] for position in made])}

    def lists(curve: Points) -> dict[str, Any]:
        kept = thin(curve, limit)
        return {
            "x": [tokens for _, tokens, _ in kept],
            "y": [rounded(value, 5) for _, _, value in kept],
        }

    return {
        "runs": [
            {"seed": group.runs[position].seed} | lists(curve) for position, curve in made.items()
        ],
        "mean": lists(
            average(
                [curve for position, curve in made.items() if id(group.runs[position]) in counted]
            )
        ),
        "recorded": (recorded := max(map(len, made.values()), default=0)),
        "window": 2 * smoothing_reach(recorded) + 1 if kind == "train" else 1,
    }


def draw_depth(group: Group, frames: int, digits: int) -> dict[str, Any] | None:
    """Depth records averaged over seeds, at up to `frames` steps that every seed recorded (or each seed's last one)."""
    runs = once([run for run in group.runs if run.depth])
    kinds = runs[-1].depth[-1]["sublayers"] if runs else []
    tables = [
        {record["step"]: record for record in run.depth if record["sublayers"] == kinds}
        for run in runs
    ]
    if not kinds or not all(tables):
        return None
    shared = [step for step in tables[0] if all(step in table for table in tables)]
    sets = [[table[step] for table in tables] for step in thin(shared, frames)]
    if not sets:
        sets = [[list(table.values())[-1] for table in tables]]
    return {
        "kinds": [str(kind) for kind in kinds],
        "seeds": len(runs),
        "recorded": len(shared) or 1,
        "frames": [frame(records, digits) for records in sets],
    }


def frame(records: list[Record], digits: int) -> dict[str, Any]:
    lists = {
        name: mean_list([record.get(key) for record in records], digits)
        for name, key in DEPTH_LISTS.items()
    }
    # The lower triangle, row after row: read r has the r + 1 sources before it.
    triangles = [
        [v for r, row in enumerate(record.get("mixing") or []) for v in row[: r + 1]] or None
        for record in records
    ]
    first = {key: records[0][key] for key in ("step", "tokens")}
    return {**first, **lists, "mixing": mean_list(triangles, digits)}


def mean_list(lists: list[list | None], digits: int) -> list[float | None] | None:
    """Position-wise mean over seeds; None where no seed has a number."""
    present = [values for values in lists if values is not None]
    if not present:
        return None
    columns = (
        [v for value in column if (v := number(value)) is not None] for column in zip(*present)
    )
    return [rounded(statistics.fmean(known), digits) if known else None for known in columns]


def rounded(value: float | None, digits: int) -> float | None:
    """To so many significant digits: what a page can show, in fewer bytes."""
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
