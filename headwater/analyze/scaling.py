"""Loss against compute, L = E + A C^-alpha, for each residual, and the compute that it saves.

The compute multiplier of a residual at a budget C is C' / C, where the baseline's curve reaches at
C' what the residual's reaches at C: above one, it saves compute. The curves are those of
`power_law`, and the 95 % intervals the middle of what `bootstrap` draws.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from headwater.errors import UserError, nearest
from headwater.runs.record import RecordedRun, paths_of, read_runs

from .bootstrap import TWIN, Points, apart, draw_curves, places_of
from .power_law import BUDGETS, Fit, fit
from .rates import at_rate
from .scaling_points import confounders_of, points_of

DRAWS = 4000
FAR = 1.5  # times its largest budget, or of its smallest: further out a curve is not asked


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval. Without a budget of two seeds, `low` and `high` are None."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Scaling:
    """A residual's curve beside the baseline's.

    `multipliers`: at the baseline's budgets as far as the residual's own runs reach; None where the
    curves do not meet. Runs at fewer than three budgets have no `fit`, no `alpha` and no
    multipliers.
    `confounders`: settings beyond the residual, as `optim.lr`, in which its runs differ from the
    baseline's of the same budgets: a part of the multiplier is due to them.
    """

    residual: str
    points: Points
    fit: Fit | None
    alpha: Interval | None
    multipliers: dict[float, Interval | None]
    confounders: tuple[str, ...] = ()

    @property
    def above(self) -> dict[float, float]:
        """Mean loss of each budget less the curve's, in bits per byte; empty without a curve."""
        if self.fit is None:
            return {}
        differences = {}
        for compute, losses in sorted(self.points.items()):
            mean = sum(losses.values()) / len(losses)
            differences[compute] = mean - self.fit.loss(compute)
        return differences

    @property
    def miss(self) -> float | None:
        """The largest distance of the curve from the mean loss of a budget; None without a curve.

        Of three budgets a small one says nothing: a curve has three numbers.
        """
        return max(map(abs, self.above.values()), default=None)


def compare_scaling(
    points: Mapping[str, Points], baseline: str, draws: int = DRAWS, seed: int = 0
) -> list[Scaling]:
    """Fit every residual's curve, and its multipliers at the baseline's budgets with intervals.

    There is no multiplier far beyond a residual's own runs, where a curve is a guess; a residual
    with runs at fewer than three budgets has its points alone.

    Arguments: `points`, by residual, the loss of each seed at each budget in operations;
    `baseline`, one of them; `draws`, bootstrap samples. Raises UserError for an unknown baseline,
    or if it or all others have too few budgets.
    """
    if baseline not in points:
        others = f": take another; {nearest(baseline, points)}" if points else ", nor has any other"
        raise UserError(f"no run of the baseline '{baseline}' has finished{others}")

    # A curve needs three budgets, of the baseline and of another residual at least.
    few = {name: len(budgets) for name, budgets in points.items() if len(budgets) < BUDGETS}
    if baseline in few or len(few) == len(points) - 1 > 0:
        counts = ", ".join(f"{name} has {count}" for name, count in few.items())
        raise UserError(
            f"a scaling fit needs runs of {baseline} and of another residual at three budgets at "
            f"least: {counts}"
        )
    baseline_points = points[baseline]
    baseline_curve = fit_points(baseline_points)
    scalings = []
    for name, losses in points.items():
        if name in few:
            scalings.append(Scaling(name, losses, None, None, {}))
            continue
        curve = fit_points(losses)

        # Curves of other seeds; equal draws for each residual.
        random = np.random.default_rng(seed)
        draws_of_both = draw_curves(losses, baseline_points, [*points.values()], draws, random)
        alpha = interval_of(curve.alpha, [ours.alpha for ours, _ in draws_of_both])

        multipliers = {}
        curves = (curve, baseline_curve)
        for compute in sorted(baseline_points):
            if min(losses) / FAR < compute < max(losses) * FAR:
                multipliers[compute] = multiplier_interval(curves, draws_of_both, compute)
        scalings.append(Scaling(name, losses, curve, alpha, multipliers))
    return scalings


def fit_points(points: Points) -> Fit:
    places = places_of(points)
    losses = [points[compute][seed] for compute, seed in places]
    return fit([compute for compute, _ in places], losses)


def multiplier_interval(
    fits: tuple[Fit, Fit], draws: Sequence[tuple[Fit, Fit]], compute: float
) -> Interval | None:
    # The best estimate must be a number; draws may be infinite, which opens the interval.
    value = multiplier(*fits, compute)
    if math.isinf(value):
        return None
    return interval_of(value, [multiplier(ours, baseline, compute) for ours, baseline in draws])


def multiplier(ours: Fit, baseline: Fit, compute: float) -> float:
    """Return C' / C, infinite where the baseline's curve never comes as low as ours at C."""
    # From the budget up to our loss, and from that loss down to the baseline's budget.
    loss = ours.loss(compute)
    needed = baseline.compute(loss)
    if needed is None:
        return math.inf if loss <= baseline.floor else 0.0
    return needed / compute


def interval_of(value: float, draws: Sequence[float]) -> Interval:
    """The middle 95 % of the draws, some of which may be infinite."""
    if not draws:
        return Interval(value, None, None)
    low, high = np.quantile(draws, (0.025, 0.975), method="closest_observation")
    return Interval(value, float(low), float(high))


def compare_runs(runs: Sequence[RecordedRun], baseline: str) -> list[Scaling]:
    """Fit the curves of finished runs by operations, each with its `confounders`."""
    confounders = confounders_of(runs, baseline)
    scalings = compare_scaling(points_of(runs), baseline)
    return [
        replace(scaling, confounders=confounders.get(scaling.residual, ())) for scaling in scalings
    ]


def scaling_of(
    folders: Sequence[str | Path],
    baseline: str = "standard",
    lr: float | Literal["best"] | None = None,
) -> list[Scaling]:
    """Fit bits per byte against compute for each residual, as `headwater scaling` does.

    Arguments:
        folders: of runs, comparisons and studies.
        baseline: the residual whose compute the others are measured in.
        lr: take the runs with this learning rate; "best": of each residual and size, those with the
            rate at which their mean loss is lowest; where that is another than the baseline's, it
            is among the `confounders`.

    Returns a `Scaling` for each residual. Raises `headwater.errors.UserError` for folders without
    runs, for runs with several learning rates and no `lr`, on different text or windows of it, and
    for too few budgets.

        for scaling in scaling_of(["runs/sizes"]):
            print(scaling.residual, scaling.fit, scaling.multipliers, scaling.confounders)
    """
    return compare_runs(at_rate(read_runs(paths_of(folders)), lr), baseline)


def without_ends(scalings: Sequence[Scaling], baseline: str) -> dict[float, list[Scaling]]:
    """Fit again without the baseline's largest budget and without its smallest, by that budget.

    This shows how far curves depend on single sizes. Empty where three budgets are all there are.
    """
    # The ends are the baseline's: residuals are compared at its budgets.
    points = {scaling.residual: scaling.points for scaling in scalings}
    budgets = sorted(points.get(baseline, ()))
    if len(budgets) <= BUDGETS:
        return {}
    fits = {}
    for end in (budgets[-1], budgets[0]):
        # Residuals that have three budgets left.
        enough = {}
        for name, losses in points.items():
            rest = {compute: losses[compute] for compute in losses if apart(compute, end) >= TWIN}
            if len(rest) >= BUDGETS:
                enough[name] = rest
        if baseline in enough and len(enough) > 1:
            fits[end] = compare_scaling(enough, baseline)
    return fits
