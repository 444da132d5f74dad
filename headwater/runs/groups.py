"""Runs that differ only by seed, as one group: what it ended with, and its difference to the baseline.

A difference is taken seed by seed (equal seeds saw equal data in equal order) and judged as headwater.runs.stats says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.runs.launch import most_at_a_time
from headwater.runs.record import Record, RecordedRun
from headwater.runs.settings import SETTINGS
from headwater.runs.stats import LOWER, Paired, Stat, judge, pair, summarize

BASELINE = "standard"
# Settings that may differ inside a group: they say where and how a run was carried out, not what was computed. A run
# that a bad step stopped goes on without the step; its notes count such steps.
INCIDENTAL = {"train.seed", "train.device"}
for _name, _marks in SETTINGS.items():
    if _marks.changes != "numbers" or _marks.resumable:
        INCIDENTAL.add(_name)
# Settings of parts that a residual does not have.
UNFELT = {BASELINE: {name for name, marks in SETTINGS.items() if marks.felt_by == "queries"}}


@dataclass
class Group:
    residual: str
    settings: dict[str, str]
    runs: list[RecordedRun] = field(default_factory=list)
    label: str = ""
    baseline: "Group | None" = None
    paired: Paired | None = None
    """The group's loss minus its baseline's, over the seeds that finished in both."""
    comparisons: int = 1
    """Groups that are compared with their baselines over several seeds."""

    @property
    def finished(self) -> list[RecordedRun]:
        return [run for run in self.runs if run.summary is not None]

    @property
    def results(self) -> list[RecordedRun]:
        """The runs that a table's row speaks of: one of each seed, finished ones if any has finished."""
        return once(self.finished or self.runs)

    def final(self, key: str) -> Stat | None:
        return summarize([run.final(key) for run in self.results])

    def tokens(self) -> float | None:
        """Tokens of the longest run in `results`."""
        counts = [run.final("tokens") for run in self.finished]
        if all(count is None for count in counts):
            last_rows = [run.train[-1:] or run.evals[-1:] for run in self.results]
            counts = [row["tokens"] for rows in last_rows for row in rows]
        return max((count for count in counts if count is not None), default=None)

    def by_seed(self, key: str = "loss") -> dict[int | None, float | None]:
        return {run.seed: run.final(key) for run in self.finished}

    def difference(self) -> Paired | None:
        """The group's loss minus its baseline's, over the seeds that finished in both."""
        return self.paired

    @property
    def beside(self) -> int | None:
        """The most runs made at a time with any run of a table's row; None if one of them does not say."""
        return most_at_a_time(run.beside for run in self.results)

    @property
    def timed(self) -> bool:
        """Whether its wall-clock can be compared with its baseline's: runs of both had the machine to themselves."""
        if self.baseline is None or self.baseline is self:
            return False
        return self.beside == 1 and self.baseline.beside == 1


def once(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """The last run of each seed: a seed that ran twice is still one draw, and tells nothing of how far seeds differ."""
    last: dict[int | str, RecordedRun] = {}
    for run in runs:
        last[run.name if run.seed is None else run.seed] = run
    return list(last.values())


def noun(groups: Sequence[Group]) -> str:
    """What a group is called: a residual; or an arm, if groups of one residual differ in other settings."""
    return "residual" if len({group.residual for group in groups}) == len(groups) else "arm"


def told_lowest(groups: list[Group]) -> Group | None:
    """The group that ends below every other, each pair told from chance; None if the noise leaves it open.

    It is chosen after looking at all of them, so every pair of groups counts as a comparison.
    """
    losses: list[tuple[float, Group]] = []
    for group in groups:
        loss = group.final("loss")
        if group.finished and loss is not None:
            losses.append((loss.mean, group))
    if len(losses) < 2:
        return None
    _, lowest = min(losses, key=lambda pair: pair[0])
    comparisons = len(losses) * (len(losses) - 1) // 2
    for _, group in losses:
        differences = pair(lowest.by_seed(), group.by_seed())
        if group is lowest:
            continue
        if not differences or Paired(differences, comparisons).verdict != LOWER:
            return None
    return lowest


def group_runs(runs: list[RecordedRun], order: Sequence[str] = (BASELINE,)) -> list[Group]:
    """Group runs by all but their seeds; each group knows the baseline that was trained with its settings.

    `order`: residuals that come first, the baseline being its first; the others follow as they come.
    """
    groups: dict[tuple[object, ...], Group] = {}
    for run, settings in zip(runs, settings_of(runs), strict=True):
        key = (run.residual, *sorted(settings.items()))
        groups.setdefault(key, Group(run.residual, settings)).runs.append(run)
    place = {residual: i for i, residual in enumerate(order)}
    ordered = sorted(groups.values(), key=lambda group: place.get(group.residual, len(place)))

    baselines = [group for group in ordered if group.residual == order[0]]
    for group in ordered:
        group.label = _label(group, ordered)
        fair = (baseline for baseline in baselines if not beyond(baseline, group))
        group.baseline = next(fair, None)
    _judge(ordered)
    return ordered


def _label(group: Group, groups: Sequence[Group]) -> str:
    """Its residual, and the settings that tell it from other groups of this residual."""
    twins = [other.settings for other in groups if other.residual == group.residual]
    words = [words_of(key, group.settings) for key in telling(twins)]
    return ", ".join([group.residual, *words])


def _judge(groups: list[Group]) -> None:
    """Pair each group with its baseline, all intervals of the page holding together."""
    places = {id(group): i for i, group in enumerate(groups)}
    losses = {i: group.by_seed() for i, group in enumerate(groups)}
    baselines = {
        i: places[id(group.baseline)]
        for i, group in enumerate(groups)
        if group.baseline is not None
    }
    verdicts = judge(losses, baselines)
    for i, group in enumerate(groups):
        group.paired = verdicts.get(i)
        group.comparisons = next((paired.comparisons for paired in verdicts.values()), 1)


def beyond(one: Group, other: Group) -> list[str]:
    """Settings in which two groups differ, but for those that make their arms, or that `one` does not feel."""
    fair = set(UNFELT.get(one.residual, ()))
    for run in one.runs + other.runs:
        fair.update(run.switches)
    return [key for key in differing([one.settings, other.settings]) if key not in fair]


def settings_of(runs: Sequence[RecordedRun]) -> list[dict[str, str]]:
    """Settings of each run by dotted name.

    Runs that saw the same tokens get the first run's `data.*` settings: the same text may lie under another path, and
    so may the tokenizer.
    """
    data_of: dict[tuple[object, ...], dict[str, str]] = {}
    all_settings = []
    for run in runs:
        settings = flatten(run.config)
        seen = run.corpus.get("source_hash"), run.corpus.get("tokenizer_hash")
        if all(seen):
            data = {key: value for key, value in settings.items() if key.startswith("data.")}
            others = {key: value for key, value in settings.items() if key not in data}
            settings = others | data_of.setdefault(seen, data)
        all_settings.append(settings)
    return all_settings


def flatten(config: Record, prefix: str = "") -> dict[str, str]:
    """Settings by dotted name, without the residual itself and those that may differ inside a group."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        elif key != "residual" and prefix + key not in INCIDENTAL:
            flat[prefix + key] = str(value)
    return flat


def differing(settings: list[dict[str, str]]) -> list[str]:
    keys = sorted({key for values in settings for key in values})
    return [key for key in keys if len({values.get(key) for values in settings}) > 1]


def telling(settings: list[dict[str, str]]) -> list[str]:
    """As few settings as tell these apart: none that goes with others, as heads do with width."""
    keys: list[str] = []
    kinds = 1
    for key in differing(settings):
        tried = [*keys, key]
        more = len({tuple(values.get(name) for name in tried) for values in settings})
        if more > kinds:
            keys, kinds = tried, more
    return keys


def words_of(key: str, settings: dict[str, str]) -> str:
    name, value = key.split(".")[-1], settings.get(key, "unset")
    return f"no {name}" if value == "None" else f"{name} {value}"
