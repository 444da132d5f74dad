"""The sentences of a report: its headline, its findings, how to read the table, what to beware of.

A verdict is that of headwater.runs.stats, in its words; none is stronger than the interval beside it.
"""

import math
from collections import Counter

from headwater.analyze.markup import count, join
from headwater.runs.groups import Group, differing, noun
from headwater.runs.launch import most_at_a_time
from headwater.runs.stats import HIGHER, LOWER, ONE_SEED, UNTOLD, Paired, limits, minus, pair

BITS = "bits_per_byte"
VERDICTS = {  # of one group, of several
    LOWER: ("ends lower", "end lower"),
    HIGHER: ("ends higher", "end higher"),
    UNTOLD: ("is not told apart", "are not told apart"),
    ONE_SEED: ("has one seed", "have one seed"),
}


def headline(groups: list[Group]) -> str:
    rivals = [group for group in groups if group.baseline is not group]
    bases = [group.label for group in groups if group.baseline is group]
    if len(groups) == 1:
        return groups[0].label
    if len(groups) > 4:
        return f"{many(rivals)} against {join(bases)}" if len(bases) == 1 else many(groups)
    if not (bases and rivals):
        return join([group.label for group in groups])
    return f"{join([group.label for group in rivals])} against {join(bases)}"


def many(groups: list[Group]) -> str:
    return f"{len(groups)} {noun(groups)}s"


def findings(groups: list[Group]) -> list[str]:
    """The result in words: a sentence for each rival of a baseline, or a count of many rivals and three of them.

    The three are the lowest or, if there are several baselines, as sizes have, those with the lowest difference.
    """
    rivals = [group for group in groups if group.difference() is not None]
    sentences = []
    if len(rivals) > 4:
        sentences.append(tally(rivals))
        rivals = sorted(rivals, key=below if len(bases_of(rivals)) > 1 else ending)[:3]
    sentences += [finding(group) for group in rivals]
    if sentences and fewest_pairs(groups) < 3:
        sentences.append(limits(fewest_pairs(groups), groups[0].comparisons, noun(groups)))
    return sentences or _endings(groups[:6])


def _endings(groups: list[Group]) -> list[str]:
    """Where groups stand that have no baseline."""
    sentences = []
    for group in groups:
        loss = group.final("loss")
        verb = "ends" if group.finished else "stands"
        if loss is not None:
            sentences.append(f"{group.label} {verb} at {loss.mean:.4f} nats per token.")
    return sentences


def ending(group: Group) -> float:
    return mean(group, "loss") or math.inf


def below(group: Group) -> float:
    paired = group.difference()
    return math.inf if paired is None else paired.mean


def bases_of(rivals: list[Group]) -> dict[str, str]:
    """Residual of each baseline of the rivals, by its label."""
    bases = [group.baseline for group in rivals if group.baseline is not None]
    return {base.label: base.residual for base in bases}


def finding(group: Group) -> str:
    """A group's end, its difference to the baseline, and the verdict."""
    paired, loss, base = group.difference(), group.final("loss"), group.baseline
    assert paired is not None
    assert loss is not None
    assert base is not None
    side = "below" if paired.mean < 0 else "above"
    away = f"{abs(paired.mean):.4f} {side} {base.label}"
    amount = f"{group.label} ends at {loss.mean:.4f} nats per token, {away}"
    if paired.verdict == ONE_SEED:
        return f"{amount}, on one seed: that may be chance.{in_bits(group, base)}"
    evidence = f"95 % interval {interval(paired)}, over {len(paired.values)} seeds"
    return f"{amount} ({evidence}): {paired.verdict}.{in_bits(group, base)}"


def in_bits(group: Group, base: Group) -> str:
    """The same in the unit of the terminal and of table.json, if it is known of the same runs."""
    bits, values = group.final(BITS), pair(group.by_seed(BITS), base.by_seed(BITS))
    if bits is None or len(values) < len(pair(group.by_seed(), base.by_seed())):
        return ""
    away = Paired(values).mean
    side = "below" if away < 0 else "above"
    return f" In bits per byte: {bits.mean:.4f}, {abs(away):.4f} {side}."


def tally(rivals: list[Group]) -> str:
    """How many rivals have each verdict."""
    differences = [group.difference() for group in rivals]
    verdicts = Counter(paired.verdict for paired in differences if paired is not None)
    parts = []
    for verdict, (one, several) in VERDICTS.items():
        n = verdicts[verdict]
        if n:
            parts.append(f"{n} {several if n > 1 else one}")
    bases = bases_of(rivals)
    label, residual = next(iter(bases.items()))
    against, chosen = label, "The lowest three"
    if len(bases) > 1:
        against = f"{residual} at the same settings"
        chosen = "The three with the lowest difference"
    return f"Of {many(rivals)} against {against}, {join(parts)}. {chosen}:"


def interval(paired: Paired) -> str:
    if paired.interval is None:
        return "—"
    return " to ".join(minus(f"{end:+.4f}") for end in paired.interval)


def fewest_pairs(groups: list[Group]) -> int:
    differences = [group.difference() for group in groups]
    return min((len(paired.values) for paired in differences if paired is not None), default=0)


def mean(group: Group, key: str) -> float | None:
    stat = group.final(key)
    return None if stat is None else stat.mean


def trained(groups: list[Group]) -> bool:
    """Whether any run has a curve to show; a model that read a prompt has none."""
    return any(run.train or run.evals for group in groups for run in group.runs)


def has_results(groups: list[Group]) -> bool:
    """Whether the table has anything to say; of a model that read a prompt it has not."""
    return trained(groups) or any(group.final("loss") is not None for group in groups)


def caption(groups: list[Group]) -> str:
    """How to read the table."""
    if not has_results(groups):
        return "No losses are shown: there are no records of training here."
    words = ["Validation loss in nats per token; ± is the standard deviation over seeds."]
    differences = [paired for group in groups if (paired := group.difference()) is not None]
    if differences:
        words.append("Difference: minus the baseline, seed by seed on equal data; a dot is a seed.")
    if any(paired.interval for paired in differences):
        together = groups[0].comparisons
        corrected = ""
        if together > 1:
            corrected = f" that hold for all {together} {noun(groups)}s at once (Bonferroni)"
        words.append(f"Bars are 95 % intervals (Student's t){corrected}.")
        if fewest_pairs(groups) > 2:  # with fewer pairs the findings above say it
            words.append(limits(fewest_pairs(groups), together, noun(groups)))
    if differences:
        words.append("× compares with the baseline.")
    if len(groups) > 1:
        words.append(wall_clock(groups))
    return " ".join(words)


def wall_clock(groups: list[Group]) -> str:
    """Whether times are compared: those of runs that shared the machine say how busy it was."""
    most = most_at_a_time(group.beside for group in groups)
    if most == 1:
        return "Runs were made one at a time."
    if any(group.timed for group in groups):
        return "Wall-clock is compared only where the runs of both were made one at a time."
    if most is None:
        return "Wall-clock is not compared: how many runs were made side by side is unknown."
    return f"Wall-clock is not compared: up to {most} runs were made at a time."


def page_notes(groups: list[Group]) -> list[str]:
    """What a reader must know to read the numbers fairly."""
    notes = []
    keys = differing([group.settings for group in groups])
    if keys:
        more = ["…"] * (len(keys) > 6)
        notes.append(f"Settings differ beyond the residual: {', '.join(keys[:6] + more)}.")
    for group in groups:
        notes += _unequal_tokens(group) + _seeds_made_twice(group) + _runs_without_result(group)
        notes += [f"{run.name}: {note.rstrip('.')}." for run in group.runs for note in run.notes]
    return notes


def _unequal_tokens(group: Group) -> list[str]:
    base = group.baseline
    if base is None or not group.difference() or group.tokens() == base.tokens():
        return []
    tokens = f"{count(group.tokens())} tokens, {base.label} {count(base.tokens())}"
    return [f"{group.label} saw {tokens}: not a fair comparison."]


def _seeds_made_twice(group: Group) -> list[str]:
    counted = {run.seed: run.name for run in group.results}
    notes = []
    for run in group.finished:
        name = counted.get(run.seed, run.name)
        if run.seed is not None and name != run.name:
            words = "has its settings and its seed, and is the one that counts"
            notes.append(f"{run.name}: {name} {words}.")
    return notes


def _runs_without_result(group: Group) -> list[str]:
    """Which runs stopped or are under way, and what the table shows instead."""
    shown = "it was never evaluated"
    if group.finished:
        shown = "the table counts only finished runs"
    elif group.final("loss"):
        shown = "the table shows the last evaluation"
    notes = [f"{run.name}: {run.stopped}; {shown}." for run in group.runs if run.stopped]
    waiting = [run.name for run in group.runs if run.summary is None and not run.stopped]
    if waiting:
        names = f"{join(waiting)}, without summary.json"
        notes.append(f"Unfinished ({group.label}): {names}; {shown}.")
    return notes
