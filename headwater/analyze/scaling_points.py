"""The points of a scaling fit, from finished runs: loss by residual, budget and seed."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headwater.errors import UserError, spell
from headwater.runs.groups import UNFELT, differing, settings_of
from headwater.runs.record import RecordedRun, number, section

from .bootstrap import TWIN, apart
from .provenance import corpus
from .rates import RATE, rate_of, rates_told

NEAR = 0.03  # budgets whose logarithms differ by less are one


def operations(run: RecordedRun) -> float | None:
    """Operations of a whole run; None where its summary does not know them."""
    summary = run.summary or {}
    per_token, tokens = number(summary.get("flops_per_token")), number(summary.get("tokens"))
    return None if per_token is None or tokens is None else per_token * tokens


def points_of(
    runs: Sequence[RecordedRun],
    loss: str = "bits_per_byte",
    cost: Callable[[RecordedRun], float | None] = operations,
) -> dict[str, dict[float, dict[int | None, float]]]:
    """Loss of finished runs by residual, budget (operations, or the `cost` of a run) and seed.

    Budgets within 3 % count as one, which is what a residual's own operations make of it: then they
    are not matched, and the multiplier says so.

    Raises UserError for two runs of one residual, budget and seed: runs that differ in a learning
    rate are not seeds; and for runs on different text, or evaluated on more windows of it than
    others, whose losses lie on no curve.
    """
    points: dict[str, dict[float, dict[int | None, float]]] = defaultdict(lambda: defaultdict(dict))
    runs_by_place: dict[tuple[str, float, int | None], RecordedRun] = {}
    first_by_context: dict[Any, RecordedRun] = {}  # a longer context has other windows anyway
    for run in runs:
        compute = cost(run)
        value = number((run.summary or {}).get(loss))
        if compute is None or value is None:
            continue

        # Losses of other text, or of more windows of it, are no points of the same curve.
        for other in runs_by_place.values():
            _check_text(other, run)
        context = section(run.config, "model").get("context")
        _check_windows(first_by_context.setdefault(context, run), run)

        # The residual's own operations move a budget a little.
        budgets = points[run.residual]
        near = next((budget for budget in budgets if apart(budget, compute) < NEAR), compute)
        other = runs_by_place.setdefault((run.residual, near, run.seed), run)
        if other is not run:
            raise UserError(_twice(other, run, compute, runs))
        budgets[near][run.seed] = value
    return {name: dict(budgets) for name, budgets in points.items()}


def _check_text(one: RecordedRun, other: RecordedRun) -> None:
    if not same_text(one, other):
        raise UserError(
            f"{one.name} ({corpus(one)}) and {other.name} ({corpus(other)}) have seen different "
            "text, so their losses lie on no curve: fit the runs of each text by themselves"
        )


def _check_windows(one: RecordedRun, other: RecordedRun) -> None:
    windows = [section(run.config, "train").get("eval_windows") for run in (one, other)]
    if windows[0] != windows[1]:
        raise UserError(
            f"{one.name} ends with its loss on {windows[0]} windows of held-out text and "
            f"{other.name} on {windows[1]}, so their losses lie on no curve: fit the runs of one "
            "train.eval_windows by themselves"
        )


def _twice(
    one: RecordedRun, other: RecordedRun, compute: float, runs: Sequence[RecordedRun]
) -> str:
    """The refusal of two runs at one place: in which settings they differ."""
    keys = differing(settings_of([one, other]))
    difference = ", ".join(keys) or "nothing, so name its folder once"
    if RATE in keys:
        difference += (
            f". There are {rates_told(runs)}: choose one, as with {spell('lr')} "
            f"{rate_of(other):g}, "
            f"or {spell('lr')} best"
        )
    return (
        f"{one.name} and {other.name} are both {other.residual} at {compute:.3g} operations with "
        f"seed {other.seed}: a fit takes one run for each seed; they differ in {difference}"
    )


def same_text(one: RecordedRun, other: RecordedRun) -> bool:
    """Compare texts by their hashes; where one is not known, by their names, wherever they lay."""
    hashes = [run.corpus.get("source_hash") for run in (one, other)]
    if all(hashes):
        return bool(hashes[0] == hashes[1])
    names = []
    for run in (one, other):
        sources = section(run.config, "data").get("source", ())
        names.append([Path(source).name for source in sources])
    return names[0] == names[1]


def confounders_of(runs: Sequence[RecordedRun], baseline: str) -> dict[str, tuple[str, ...]]:
    """Settings in which a residual differs from the baseline's runs of its budgets, by residual.

    A part of the residual's multiplier is then due to these settings. The model's settings, steps
    and seed do not count: they make the budget.
    """
    budgets = [(run, compute) for run in runs if (compute := operations(run))]
    plain = [(run, compute) for run, compute in budgets if run.residual == baseline]

    # Settings in which a run differs from its twin among the baseline's runs.
    keys: dict[str, set[str]] = defaultdict(set)
    for run, compute in budgets:
        twin = _twin(run, compute, plain)
        if twin is not None:
            keys[run.residual].update(differing(settings_of([twin, run])))

    # Settings that make the budget, or that the baseline does not feel, are fair.
    fair = {"train.steps", *UNFELT.get(baseline, ())}
    confounders = {}
    for name, differences in keys.items():
        unfair = [key for key in differences - fair if not key.startswith("model.")]
        confounders[name] = tuple(sorted(unfair))
    return confounders


def _twin(
    run: RecordedRun, compute: float, plain: Sequence[tuple[RecordedRun, float]]
) -> RecordedRun | None:
    """The baseline's run at the nearest budget, of equal seed if there is one; None if far away."""
    nearest = min(
        plain,
        key=lambda pair: (apart(pair[1], compute), pair[0].seed != run.seed),
        default=None,
    )
    if nearest is None or apart(nearest[1], compute) >= TWIN:
        return None
    return nearest[0]
