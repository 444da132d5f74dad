"""Choose the runs that a scaling fit uses when several learning rates were tried."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from headwater.errors import UserError
from headwater.runs.groups import UNFELT, settings_of
from headwater.runs.record import RecordedRun, number, section

RATE = "optim.lr"
Sweep = Mapping[float, Sequence[RecordedRun]]  # runs of one residual and size, by learning rate
Rate = float | Literal["best"] | None


def at_rate(runs: Sequence[RecordedRun], lr: Rate) -> list[RecordedRun]:
    """Choose runs by their learning rate.

    `lr`: a rate; "best": for each residual and size (all settings but the rate), the finished runs
    with the rate at which their mean loss is lowest; None: all runs. Raises UserError for a rate
    that no run has.
    """
    if lr is None:
        return list(runs)
    if lr == "best":
        best = map(best_of, sweeps_of(runs))
        return list(chain.from_iterable(best))
    chosen = [run for run in runs if rate_of(run) == lr]
    if not chosen:
        raise UserError(f"no run has the learning rate {lr:g}; there are {rates_told(runs)}")
    return chosen


def sweeps_of(runs: Sequence[RecordedRun]) -> list[Sweep]:
    """Runs of each residual and size by their rate, unfinished ones too.

    Settings of parts that the residual does not have make no size of their own.
    """
    sweeps: dict[Any, dict[float, list[RecordedRun]]] = defaultdict(lambda: defaultdict(list))
    for run, settings in zip(runs, settings_of(runs), strict=True):
        # A size is all settings that the residual feels, without the rate.
        ignored = UNFELT.get(run.residual, set()) | {RATE}
        size = sorted((key, value) for key, value in settings.items() if key not in ignored)
        sweeps[run.residual, *size][rate_of(run)].append(run)
    return list(sweeps.values())


def best_of(sweep: Sweep) -> list[RecordedRun]:
    """The finished runs of the rate with the lowest mean loss; none if no run has finished."""
    candidates = []
    for runs in sweep.values():
        finished = [run for run in runs if run.summary is not None]
        if finished:
            candidates.append(finished)
    return min(candidates, key=_mean_loss, default=[])


def _mean_loss(runs: Sequence[RecordedRun]) -> float:
    # A run that diverged has no loss, and its rate is never the best one.
    losses = [run.final("bits_per_byte") for run in runs]
    return statistics.fmean(math.inf if loss is None else loss for loss in losses)


def rate_of(run: RecordedRun) -> float:
    return number(section(run.config, "optim").get("lr")) or math.nan


def rates_told(runs: Sequence[RecordedRun]) -> str:
    """Name the rates: standard with 0.003 and 0.006, attnres-block with 0.006."""
    rates_of: dict[str, set[float]] = defaultdict(set)
    for run in runs:
        rates_of[run.residual].add(rate_of(run))
    words = []
    for residual, rates in rates_of.items():
        words.append(f"{residual} with {' and '.join(f'{lr:g}' for lr in sorted(rates))}")
    return ", ".join(words)


def rates_by_budget(
    runs: Sequence[RecordedRun], cost: Callable[[RecordedRun], float | None]
) -> str:
    """Name the best rate at each budget, and how far to believe it, with a line for each residual.

    For example: standard 0.016 at 1.46e+15 (3 seeds), 0.008 at 1e+16 (1 of 3 seeds; the smallest
    that was tried).
    """
    lines: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for sweep in sweeps_of(runs):
        best = best_of(sweep)
        budget = cost(best[0]) if best else None
        if budget is not None:
            words = f"{rate_of(best[0]):g} at {budget:.3g} ({_belief(sweep, best)})"
            lines[best[0].residual].append((budget, words))
    residuals = []
    for residual, budgets in sorted(lines.items()):
        residuals.append(f"  {residual} {', '.join(words for _, words in sorted(budgets))}")
    return "\n".join(residuals)


def _belief(sweep: Sweep, best: Sequence[RecordedRun]) -> str:
    """Count the seeds of the best rate, and say if it lies at the edge of what was tried."""
    rate = rate_of(best[0])
    seeds_tried = max(map(len, sweep.values()))
    few = f" of {seeds_tried}" if len(best) < seeds_tried else ""
    seeds = f"{len(best)}{few} seed{'s' * (seeds_tried > 1)}"
    if len(sweep) == 1:
        return f"{seeds}; no other was tried"
    if rate == min(sweep):
        return f"{seeds}; the smallest that was tried"
    if rate == max(sweep):
        return f"{seeds}; the largest that was tried"
    return seeds
