"""Of runs with several learning rates, those that a fit takes."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

from headwater.analyze.groups import flatten
from headwater.analyze.runs import RecordedRun, number, section
from headwater.errors import UserError

RATE = "optim.lr"


def at_rate(runs: Sequence[RecordedRun], lr: float | Literal["best"]) -> list[RecordedRun]:
    """The runs with this learning rate; or, of each residual and size (of all settings but the rate), the finished runs
    with the rate at which they have the lowest mean loss. Raises UserError for a rate that no run has."""
    if lr != "best":
        if found := [run for run in runs if rate_of(run) == lr]:
            return found
        raise UserError(f"no run has the learning rate {lr:g}; there are {rates_told(runs)}")
    sweeps: dict[Any, dict[float, list[RecordedRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.summary is not None:
            rest = sorted((key, value) for key, value in flatten(run.config).items() if key != RATE)
            sweeps[run.residual, *rest][rate_of(run)].append(run)
    return [run for sweep in sweeps.values() for run in min(sweep.values(), key=_mean_loss)]


def _mean_loss(runs: Sequence[RecordedRun]) -> float:
    return statistics.fmean(math.inf if (loss := run.final("bits_per_byte")) is None else loss for run in runs)


def rate_of(run: RecordedRun) -> float:
    return number(section(run.config, "optim").get("lr")) or math.nan


def rates_told(runs: Sequence[RecordedRun]) -> str:
    """As in: standard with 0.003 and 0.006, attnres-block with 0.006."""
    found: dict[str, set[float]] = defaultdict(set)
    for run in runs:
        found[run.residual].add(rate_of(run))
    return ", ".join(f"{name} with {' and '.join(f'{lr:g}' for lr in sorted(rates))}" for name, rates in found.items())


def rates_by_budget(runs: Sequence[RecordedRun], cost: Callable[[RecordedRun], float | None]) -> str:
    """As in: standard 0.016 at 1.46e+15, 0.008 at 1e+16; a line for each residual."""
    rates = {(run.residual, c): rate_of(run) for run in runs if (c := cost(run)) is not None}
    told: dict[str, list[str]] = defaultdict(list)
    for (name, c), rate in sorted(rates.items()):
        told[name].append(f"{rate:g} at {c:.3g}")
    return "\n".join(f"  {name} {', '.join(each)}" for name, each in told.items())
