"""Runs that differ only by seed as one group, with its results and its difference to the baseline.

A difference is taken seed by seed (equal seeds saw equal data in equal order). headwater.runs.stats
judges it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.runs.launch import most_at_a_time
from headwater.runs.record import Record, RecordedRun
from headwater.runs.settings import SETTINGS, flatten
from headwater.runs.stats import Paired, Stat, judge, pair, summarize

BASELINE = "standard"
# Settings that may differ inside a group: they say where and how a run was carried out, not what
# was computed. A run that a bad step stopped goes on without the step; its notes count such steps.
INCIDENTAL = {"model.residual", "train.seed", "train.device"}
# Settings of parts that a residual does not have.
UNFELT: dict[str, set[str]] = {BASELINE: set()}
for _name, _marks in SETTINGS.items():
    if _marks.changes != "numbers" or _marks.resumable:
        INCIDENTAL.add(_name)
    if _marks.felt_by == "queries":
        UNFELT[BASELINE].add(_name)


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
        """The runs of a table's row: one of each seed, and finished ones if any has finished."""
        return once(self.finished or self.runs)

    def final(self, key: str) -> Stat | None:
        return summarize([run.final(key) for run in self.results])

    def tokens(self) -> float | None:
        """Tokens of the longest run in `results`."""
        counts = [run.final("tokens") for run in self.finished]
        if all(count is None for count in counts):
            for run in self.results:
                counts += [row["tokens"] for row in (run.train or run.evals)[-1:]]
        return max((count for count in counts if count is not None), default=None)

    def by_seed(self, key: str = "loss") -> dict[int | None, float | None]:
        return {run.seed: run.final(key) for run in self.finished}

    def difference(self) -> Paired | None:
        """The group's loss minus its baseline's, over the seeds that finished in both."""
        return self.paired

    @property
    def beside(self) -> int | None:
        """The most runs made at a time with a run of a table's row; None if a run does not say."""
        return most_at_a_time(run.beside for run in self.results)

    @property
    def timed(self) -> bool:
        """True if the runs of group and baseline had the machine to themselves, so times compare."""
        if self.baseline is None or self.baseline is self:
            return False
        return self.beside == 1 and self.baseline.beside == 1


def once(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Return the last run of each seed: a seed that ran twice is still one draw."""
    last: dict[int | str, RecordedRun] = {}
    for run in runs:
        last[run.name if run.seed is None else run.seed] = run
    return list(last.values())


def noun(groups: Sequence[Group]) -> str:
    """Name what a group is: a residual, or a variant if groups of a residual differ in settings."""
    residuals = {group.residual for group in groups}
    return "residual" if len(residuals) == len(groups) else "variant"


def lowest_of(groups: list[Group]) -> Group | None:
    """Return the group with a significantly lower loss than every other one, if there is one.

    It is chosen after looking at all of them, so every pair of groups counts as a comparison.
    """
    losses = {id(group): group.final("loss") for group in groups if group.finished}
    rivals = [group for group in groups if losses.get(id(group)) is not None]
    if len(rivals) < 2:
        return None
    lowest = min(rivals, key=lambda group: losses[id(group)].mean)  # type: ignore[union-attr]
    comparisons = len(rivals) * (len(rivals) - 1) // 2
    for group in rivals:
        differences = pair(lowest.by_seed(), group.by_seed())
        if group is not lowest and not (differences and Paired(differences, comparisons).lower):
            return None
    return lowest


def group_runs(runs: list[RecordedRun], order: Sequence[str] = (BASELINE,)) -> list[Group]:
    """Group runs by all but their seeds; each group knows the baseline with its settings.

    `order`: residuals that come first, the baseline being its first; the others follow.
    """
    groups: dict[tuple[object, ...], Group] = {}
    for run, settings in zip(runs, settings_of(runs), strict=True):
        key = (run.residual, *sorted(settings.items()))
        groups.setdefault(key, Group(run.residual, settings)).runs.append(run)
    # Residuals in the order of the comparison, then the others.
    place = {residual: i for i, residual in enumerate(order)}
    ordered = sorted(groups.values(), key=lambda group: place.get(group.residual, len(place)))

    # The baseline of a group has its settings, but for those of parts that one of them lacks.
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
    losses = {id(group): group.by_seed() for group in groups}
    baselines = {id(group): id(group.baseline) for group in groups if group.baseline is not None}
    differences = judge(losses, baselines)
    for group in groups:
        group.paired = differences.get(id(group))
        group.comparisons = next((paired.comparisons for paired in differences.values()), 1)


def beyond(one: Group, other: Group) -> list[str]:
    """List the settings in which two groups differ and that are no part of their residuals.

    A switch of the model that a run's name says is a part; so is a setting that `one` does not feel.
    """
    fair = set(UNFELT.get(one.residual, ()))
    for run in one.runs + other.runs:
        fair.update(run.switches)
    return [key for key in differing([one.settings, other.settings]) if key not in fair]


def settings_of(runs: Sequence[RecordedRun]) -> list[dict[str, str]]:
    """Return the settings of each run by dotted name.

    Runs that saw the same tokens get the first run's `data.*` settings: the same text may lie under
    another path, and so may the tokenizer.
    """
    data_of: dict[tuple[object, ...], dict[str, str]] = {}
    all_settings = []
    for run in runs:
        settings = compared(run.config)
        # Runs whose text is unknown keep their own settings.
        hashes = run.corpus.get("source_hash"), run.corpus.get("tokenizer_hash")
        if all(hashes):
            data = {key: value for key, value in settings.items() if key.startswith("data.")}
            others = {key: value for key, value in settings.items() if key not in data}
            settings = others | data_of.setdefault(hashes, data)
        all_settings.append(settings)
    return all_settings


def compared(config: Record) -> dict[str, str]:
    """Return settings by dotted name, without the residual and those that may differ in a group."""
    settings = flatten(config).items()
    return {key: str(value) for key, value in settings if key not in INCIDENTAL}


def differing(settings: list[dict[str, str]]) -> list[str]:
    keys = sorted({key for values in settings for key in values})
    return [key for key in keys if len({values.get(key) for values in settings}) > 1]


def telling(settings: list[dict[str, str]]) -> list[str]:
    """Choose few settings that tell all apart: none that goes with another, as heads with width."""
    # A setting is taken if it splits the groups further than those before it.
    keys: list[str] = []
    kinds = 1
    for key in differing(settings):
        longer = [*keys, key]
        count = len({tuple(values.get(name) for name in longer) for values in settings})
        if count > kinds:
            keys, kinds = longer, count
    return keys


def words_of(key: str, settings: dict[str, str]) -> str:
    name, value = key.split(".")[-1], settings.get(key, "unset")
    return f"no {name}" if value == "None" else f"{name} {value}"
