"""Of runs with several learning rates, those that a fit takes."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from headwater.errors import UserError
from headwater.runs.groups import UNFELT, settings_of
from headwater.runs.record import RecordedRun, number, section

RATE = "optim.lr"


def at_rate(runs: Sequence[RecordedRun], lr: float | Literal["best"] | None) -> list[RecordedRun]:
    """The runs with this learning rate, all of them for None; or, of each residual and size (of all settings but the
    rate), the finished runs with the rate at which they have the lowest mean loss. Raises UserError for a rate that no
    run has."""
    if lr is None:
        return list(runs)
    if lr != "best":
        if found := [run for run in runs if rate_of(run) == lr]:
            return found
        raise UserError(f"no run has the learning rate {lr:g}; there are {rates_told(runs)}")
    return [run for sweep in sweeps_of(runs) for run in best_of(sweep)]


def sweeps_of(runs: Sequence[RecordedRun]) -> list[dict[float, list[RecordedRun]]]:
    """Of each residual and size (settings that the residual does not have aside) its runs by their rate, those that
    have not finished too."""
    sweeps: dict[Any, dict[float, list[RecordedRun]]] = defaultdict(lambda: defaultdict(list))
    for run, settings in zip(runs, settings_of(runs), strict=True):
        unfelt = UNFELT.get(run.residual, set()) | {RATE}
        rest = sorted((key, value) for key, value in settings.items() if key not in unfelt)
        sweeps[run.residual, *rest][rate_of(run)].append(run)
    return list(sweeps.values())


def best_of(sweep: Mapping[float, Sequence[RecordedRun]]) -> list[RecordedRun]:
    """The finished runs of the rate with the lowest mean loss; none where none has finished."""
    finished = [[run for run in runs if run.summary is not None] for runs in sweep.values()]
    return min(filter(None, finished), key=_mean_loss, default=[])


def _mean_loss(runs: Sequence[RecordedRun]) -> float:
    return statistics.fmean(
        math.inf if (loss := run.final("bits_per_byte")) is None else loss for run in runs
    )


def rate_of(run: RecordedRun) -> float:
    return number(section(run.config, "optim").get("lr")) or math.nan


def rates_told(runs: Sequence[RecordedRun]) -> str:
    """As in: standard with 0.003 and 0.006, attnres-block with 0.006."""
    found: dict[str, set[float]] = defaultdict(set)
    for run in runs:
        found[run.residual].add(rate_of(run))
    return ", ".join(
        f"{name} with {' and '.join(f'{lr:g}' for lr in sorted(rates))}"
        for name, rates in found.items()
    )


def rates_by_budget(
    runs: Sequence[RecordedRun], cost: Callable[[RecordedRun], float | None]
) -> str:
    """Of the runs of all rates the best, by budget, and how far to believe it. As in: standard 0.016 at 1.46e+15 (3
    seeds), 0.008 at 1e+16 (1 of 3 seeds; the smallest that was tried); a line for each residual."""
    told: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for sweep in sweeps_of(runs):
        best = best_of(sweep)
        if best and (c := cost(best[0])) is not None:
            rate, most = rate_of(best[0]), max(map(len, sweep.values()))
            few = f" of {most}" if len(best) < most else ""
            ends = {
                max(sweep): "; the largest that was tried",
                min(sweep): "; the smallest that was tried",
            }
            edge = "; no other was tried" if len(sweep) == 1 else ends.get(rate, "")
            seeds = f"{len(best)}{few} seed{'s' * (most > 1)}{edge}"
            told[best[0].residual].append((c, f"{rate:g} at {c:.3g} ({seeds})"))
    return "\n".join(
        f"  {name} {', '.join(words for _, words in sorted(each))}"
        for name, each in sorted(told.items())
    )
