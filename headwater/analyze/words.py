"""The sentences of a report: headline, findings, how to read the table, and what to beware of.

A verdict is that of headwater.runs.stats; no sentence says more than the interval beside it.
"""

import math
from collections import Counter

from headwater.analyze.markup import count, join, unique
from headwater.runs.groups import Group, differing, noun
from headwater.runs.launch import most_at_a_time
from headwater.runs.stats import NOT_SIGNIFICANT, ONE_SEED, Paired, limits, minus, pair

BITS = "bits_per_byte"
# The outcomes of comparisons, in the order in which a report counts them.
BELOW, ABOVE = "significantly lower", "significantly higher"
OPEN, WITH_ONE_SEED = "without a significant difference", "with one seed"
OUTCOMES = (BELOW, ABOVE, OPEN, WITH_ONE_SEED)


def headline(groups: list[Group]) -> str:
    """Name the rivals and the baseline, or count them where they are many."""
    rivals = [group for group in groups if group.baseline is not group]
    bases = [group.label for group in groups if group.baseline is group]
    names = [group.label for group in rivals]
    if len(groups) > 4:
        return f"{many(rivals)} against {bases[0]}" if len(bases) == 1 else many(groups)
    if not (bases and rivals):
        return join([group.label for group in groups])
    return f"{join(names)} against {join(bases)}"


def many(groups: list[Group]) -> str:
    return f"{len(groups)} {noun(groups)}s"


def findings(groups: list[Group]) -> list[str]:
    """Write the result: a sentence for each rival, or a count of many rivals and three of them.

    The three have the lowest losses or, with several baselines, as sizes have, the lowest
    differences."""
    rivals = [group for group in groups if group.difference() is not None]
    sentences = []
    # Nobody reads nineteen sentences: of many rivals the counts, and the best three.
    if len(rivals) > 4:
        sentences.append(tally(rivals))
        order = _below if len(_bases(rivals)) > 1 else _ending
        rivals = sorted(rivals, key=order)[:3]
    sentences += map(finding, rivals)
    if not sentences:
        return _endings(groups[:6])
    # Two seeds tell little, and the reader should know how little.
    pairs = fewest_pairs(groups)
    if pairs < 3:
        sentences.append(limits(pairs, groups[0].comparisons, noun(groups)))
    return sentences


def _endings(groups: list[Group]) -> list[str]:
    """Write the losses of groups that have no baseline."""
    sentences = []
    for group in groups:
        loss = group.final("loss")
        verb = "reaches" if group.finished else "is at"
        if loss is not None:
            sentences.append(f"{group.label} {verb} {loss.mean:.4f} nats per token.")
    return sentences


def _ending(group: Group) -> float:
    return mean(group, "loss") or math.inf


def _below(group: Group) -> float:
    paired = group.difference()
    return math.inf if paired is None else paired.mean


def _bases(rivals: list[Group]) -> dict[str, str]:
    """Return the residual of each baseline by its label."""
    bases = [group.baseline for group in rivals if group.baseline is not None]
    return {base.label: base.residual for base in bases}


def finding(group: Group) -> str:
    """Write a group's loss, its difference to the baseline, the verdict and the interval."""
    paired, loss, base = group.difference(), group.final("loss"), group.baseline
    assert paired is not None
    assert loss is not None
    assert base is not None
    # The amount first, then how far to believe it.
    reached = f"reaches a loss of {loss.mean:.4f} nats per token"
    amount = f"{group.label} {reached}, {_away(paired)} {base.label}"
    if paired.verdict == ONE_SEED:
        return f"{amount}, on one seed: that may be chance.{_in_bits(group, base)}"
    verdict = NOT_SIGNIFICANT if paired.verdict == NOT_SIGNIFICANT else "significant"
    evidence = f"95 % interval {interval(paired)}, over {len(paired.values)} seeds"
    return f"{amount}: {verdict} ({evidence}).{_in_bits(group, base)}"


def _away(paired: Paired) -> str:
    return f"{abs(paired.mean):.4f} {'below' if paired.mean < 0 else 'above'}"


def _in_bits(group: Group, base: Group) -> str:
    """Write the same in the unit of the terminal, if it is known of the same runs."""
    bits, values = group.final(BITS), pair(group.by_seed(BITS), base.by_seed(BITS))
    in_nats = pair(group.by_seed(), base.by_seed())
    if bits is None or len(values) < len(in_nats):
        return ""
    return f" In bits per byte: {bits.mean:.4f}, {_away(Paired(values))}."


def tally(rivals: list[Group]) -> str:
    """Count the rivals that have each outcome."""
    # "19 residuals against standard: 3 significantly lower and 16 without ...".
    counts = Counter(map(_outcome, rivals))
    parts = [f"{counts[words]} {words}" for words in OUTCOMES if counts[words]]
    bases = _bases(rivals)
    against, chosen = next(iter(bases)), "The lowest three"
    if len(bases) > 1:
        against = f"{bases[against]} at the same settings"
        chosen = "The three with the lowest difference"
    return f"{many(rivals)} against {against}: {join(parts)}. {chosen}:"


def _outcome(group: Group) -> str:
    paired = group.difference()
    assert paired is not None
    if paired.verdict == ONE_SEED:
        return WITH_ONE_SEED
    if paired.verdict == NOT_SIGNIFICANT:
        return OPEN
    return BELOW if paired.lower else ABOVE


def interval(paired: Paired) -> str:
    if paired.interval is None:
        return "—"
    return " to ".join(minus(f"{end:+.4f}") for end in paired.interval)


def fewest_pairs(groups: list[Group]) -> int:
    counts = []
    for group in groups:
        paired = group.difference()
        if paired is not None:
            counts.append(len(paired.values))
    return min(counts, default=0)


def mean(group: Group, key: str) -> float | None:
    stat = group.final(key)
    return None if stat is None else stat.mean


def trained(groups: list[Group]) -> bool:
    """Tell whether any run has a curve to show; a model that read a prompt has none."""
    return any(run.train or run.evals for group in groups for run in group.runs)


def has_results(groups: list[Group]) -> bool:
    """Tell whether the table has losses; that of a model that read a prompt has none."""
    return trained(groups) or any(group.final("loss") is not None for group in groups)


def caption(groups: list[Group]) -> str:
    """Write how to read the table."""
    if not has_results(groups):
        return "No losses are shown: there are no records of training here."
    words = [
        "Validation loss in nats per token, lower is better; ± is the standard deviation over seeds."
    ]
    # Each sentence stands only where the table has what it explains.
    pairs, together = fewest_pairs(groups), groups[0].comparisons
    if pairs:
        words.append("Difference: minus the baseline, seed by seed on equal data; a dot is a seed.")
    if any(paired.interval for group in groups if (paired := group.difference())):
        corrected = ""
        if together > 1:
            corrected = f" that hold for all {together} {noun(groups)}s at once (Bonferroni)"
        words.append(f"Bars are 95 % intervals (Student's t){corrected}.")
        if pairs > 2:  # with fewer pairs the findings say it
            words.append(limits(pairs, together, noun(groups)))
    if pairs:
        words.append("× compares with the baseline.")
    if len(groups) > 1:
        words.append(_wall_clock(groups))
    return " ".join(words)


def _wall_clock(groups: list[Group]) -> str:
    """Say whether times are compared: those of runs that shared the machine say how busy it was."""
    at_a_time = most_at_a_time(group.beside for group in groups)
    if at_a_time == 1:
        return "Runs were made one at a time."
    if any(group.timed for group in groups):
        return "Wall-clock is compared only where the runs of both were made one at a time."
    if at_a_time is None:
        return "Wall-clock is not compared: how many runs were made side by side is unknown."
    return f"Wall-clock is not compared: up to {at_a_time} runs were made at a time."


def page_notes(groups: list[Group]) -> list[str]:
    """Write what a reader must know to read the numbers fairly."""
    notes = []
    keys = differing([group.settings for group in groups])
    if keys:
        names = ", ".join(unique(keys, 6))
        notes.append(f"Settings differ beyond the residual: {names}.")
    for group in groups:
        notes += _unequal_tokens(group) + _seeds_made_twice(group) + _runs_without_result(group)
        for run in group.runs:
            notes += [f"{run.name}: {note.rstrip('.')}." for note in run.notes]
    return notes


def _unequal_tokens(group: Group) -> list[str]:
    base = group.baseline
    if base is None or not group.difference() or group.tokens() == base.tokens():
        return []
    tokens = f"{count(group.tokens())} tokens, {base.label} {count(base.tokens())}"
    return [f"{group.label} saw {tokens}: not a fair comparison."]


def _seeds_made_twice(group: Group) -> list[str]:
    # The run of each seed that counts; others of the seed are named beside it.
    counted = {run.seed: run.name for run in group.results}
    notes = []
    for run in group.finished:
        name = counted.get(run.seed, run.name)
        if run.seed is not None and name != run.name:
            words = "has its settings and its seed, and is the one that counts"
            notes.append(f"{run.name}: {name} {words}.")
    return notes


def _runs_without_result(group: Group) -> list[str]:
    """Name the runs that stopped or are under way, and what the table shows instead."""
    instead = "it was never evaluated"
    if group.finished:
        instead = "the table counts only finished runs"
    elif group.final("loss"):
        instead = "the table shows the last evaluation"
    notes = [f"{run.name}: {run.stopped}; {instead}." for run in group.runs if run.stopped]
    waiting = [run.name for run in group.runs if run.summary is None and not run.stopped]
    if waiting:
        names = f"{join(waiting)}, without summary.json"
        notes.append(f"Unfinished ({group.label}): {names}; {instead}.")
    return notes
