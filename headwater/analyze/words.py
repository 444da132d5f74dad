"""The sentences of a report: its headline, what was found, how to read the table, what to beware of.

A verdict is that of headwater.runs.stats, in its words; none is stronger than the interval beside it.
"""

import math
from collections import Counter

from headwater.analyze.markup import count, join
from headwater.runs.groups import Group, differing, noun
from headwater.runs.launch import most_at_a_time
from headwater.runs.stats import HIGHER, LOWER, ONE_SEED, UNTOLD, Paired, limits, minus, pair

BITS = "bits_per_byte"


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
    """The result in words: one sentence for each rival of a baseline, or a count of many and three of them: the lowest
    or, where they have several baselines, as sizes do, those with the lowest difference."""
    rivals = [group for group in groups if group.difference() is not None]
    said = []
    if len(rivals) > 4:
        said.append(tally(rivals))
        rivals = sorted(rivals, key=below if len(bases_of(rivals)) > 1 else ending)[:3]
    said += [finding(group) for group in rivals]
    if said and fewest_pairs(groups) < 3:
        said.append(limits(fewest_pairs(groups), groups[0].comparisons, noun(groups)))
    return said or [
        f"{group.label} {'ends' if group.finished else 'stands'} at {loss.mean:.4f} nats per token."
        for group in groups[:6]
        if (loss := group.final("loss")) is not None
    ]


def ending(group: Group) -> float:
    return mean(group, "loss") or math.inf


def below(group: Group) -> float:
    paired = group.difference()
    return math.inf if paired is None else paired.mean


def bases_of(rivals: list[Group]) -> dict[str, str]:
    """Residuals of what they are compared with, by label."""
    return {
        group.baseline.label: group.baseline.residual
        for group in rivals
        if group.baseline is not None
    }


def finding(group: Group) -> str:
    paired, loss, base = group.difference(), group.final("loss"), group.baseline
    assert paired is not None
    assert loss is not None
    assert base is not None
    away = f"{abs(paired.mean):.4f} {'below' if paired.mean < 0 else 'above'} {base.label}"
    amount = f"{group.label} ends at {loss.mean:.4f} nats per token, {away}"
    if paired.verdict == ONE_SEED:
        return f"{amount}, on one seed: that may be chance.{in_bits(group, base)}"
    seen = f"95 % interval {interval(paired)}, over {len(paired.values)} seeds"
    return f"{amount} ({seen}): {paired.verdict}.{in_bits(group, base)}"


def in_bits(group: Group, base: Group) -> str:
    """The same in the unit of the terminal and of table.json, where it is known of the same runs."""
    bits, values = group.final(BITS), pair(group.by_seed(BITS), base.by_seed(BITS))
    if bits is None or len(values) < len(pair(group.by_seed(), base.by_seed())):
        return ""
    away = Paired(values).mean
    return (
        f" In bits per byte: {bits.mean:.4f}, {abs(away):.4f} {'below' if away < 0 else 'above'}."
    )


def tally(rivals: list[Group]) -> str:
    verdicts = Counter(
        paired.verdict for group in rivals if (paired := group.difference()) is not None
    )
    said = {
        LOWER: ("end lower", "ends lower"),
        HIGHER: ("end higher", "ends higher"),
        UNTOLD: ("are not told apart", "is not told apart"),
        ONE_SEED: ("have one seed", "has one seed"),
    }
    bases = bases_of(rivals)
    label, residual = next(iter(bases.items()))
    against = label if len(bases) == 1 else f"{residual} at the same settings"
    parts = [
        f"{n} {several if n > 1 else one}"
        for verdict, (several, one) in said.items()
        if (n := verdicts[verdict])
    ]
    shown = "The lowest three" if len(bases) == 1 else "The three with the lowest difference"
    return f"Of {many(rivals)} against {against}, {join(parts)}. {shown}:"


def interval(paired: Paired) -> str:
    if paired.interval is None:
        return "—"
    return " to ".join(minus(f"{end:+.4f}") for end in paired.interval)


def fewest_pairs(groups: list[Group]) -> int:
    return min(
        (len(paired.values) for group in groups if (paired := group.difference()) is not None),
        default=0,
    )


def mean(group: Group, key: str) -> float | None:
    found = group.final(key)
    return None if found is None else found.mean


def trained(groups: list[Group]) -> bool:
    """Whether any run has a curve to show; a model that read a prompt has none."""
    return any(run.train or run.evals for group in groups for run in group.runs)


def has_results(groups: list[Group]) -> bool:
    """Whether the table says anything: of a run under way that it is, of a model that read a prompt nothing."""
    return trained(groups) or any(group.final("loss") is not None for group in groups)


def caption(groups: list[Group]) -> str:
    if not has_results(groups):
        return "No losses are shown: there are no records of training here."
    words = ["Validation loss in nats per token; ± is the standard deviation over seeds."]
    judged = [paired for group in groups if (paired := group.difference()) is not None]
    if judged:
        words.append("Difference: minus the baseline, seed by seed on equal data; a dot is a seed.")
    if any(paired.interval for paired in judged):
        together = groups[0].comparisons
        corrected = (
            f" that hold for all {together} {noun(groups)}s at once (Bonferroni)"
            if together > 1
            else ""
        )
        words.append(f"Bars are 95 % intervals (Student's t){corrected}.")
        if fewest_pairs(groups) > 2:  # else it is said above, with the findings
            words.append(limits(fewest_pairs(groups), together, noun(groups)))
    if judged:
        words.append("× compares with the baseline.")
    return " ".join([*words, wall_clock(groups)] if len(groups) > 1 else words)


def wall_clock(groups: list[Group]) -> str:
    """Times of runs that shared the machine say how busy it was."""
    if (most := most_at_a_time(group.beside for group in groups)) == 1:
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
        notes.append(
            f"Settings differ beyond the residual: {', '.join(keys[:6] + ['…'] * (len(keys) > 6))}."
        )
    for group in groups:
        if group.baseline and group.difference() and group.tokens() != group.baseline.tokens():
            seen = f"{count(group.tokens())} tokens, {group.baseline.label} {count(group.baseline.tokens())}"
            notes.append(f"{group.label} saw {seen}: not a fair comparison.")
        counted = {run.seed: run for run in group.results}
        for run in group.finished:
            if run.seed is not None and (other := counted[run.seed]) is not run:
                notes.append(
                    f"{run.name}: {other.name} has its settings and its seed, and is the one that counts."
                )
        shown = (
            "the table shows the last evaluation"
            if group.final("loss")
            else "it was never evaluated"
        )
        which = "the table counts only finished runs" if group.finished else shown
        notes += [f"{run.name}: {run.stopped}; {which}." for run in group.runs if run.stopped]
        waiting = [run.name for run in group.runs if run.summary is None and not run.stopped]
        if waiting:
            notes.append(
                f"Unfinished ({group.label}): {join(waiting)}, without summary.json; {which}."
            )
        notes += [f"{run.name}: {note.rstrip('.')}." for run in group.runs for note in run.notes]
    return notes
