"""Loss against compute: L = E + A C^-alpha for each residual, and how much compute one of them is worth in another's.

For a given alpha the best E and A are a linear least-squares fit, so the search is over alpha alone (variable
projection); E and A stay above zero. Intervals are bootstrapped over runs: seeds are drawn anew at every budget, the
fit is made again, and the middle 95 % of what comes out is the interval. The compute multiplier of a residual at a
budget C is C' / C, where the baseline's curve reaches at C' what the residual's reaches at C: above one, it saves.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headwater.analyze.runs import RecordedRun, find_runs, number, read_run
from headwater.errors import UserError

ALPHAS = np.geomspace(0.01, 2.0, 100)
DRAWS = 1000
Points = Mapping[float, Sequence[float]]  # compute to the losses of its seeds


@dataclass(frozen=True)
class Fit:
    """L = floor + scale * (C / unit)^-alpha; `unit` is the geometric mean of the budgets, which keeps numbers small."""

    floor: float
    scale: float
    alpha: float
    unit: float

    def loss(self, compute: float) -> float:
        return self.floor + self.scale * (compute / self.unit) ** -self.alpha

    def compute(self, loss: float) -> float | None:
        """The budget at which this curve has the loss; None at or below its floor."""
        if loss <= self.floor or self.scale <= 0:
            return None
        return self.unit * ((loss - self.floor) / self.scale) ** (-1 / self.alpha)


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Scaling:
    """A residual's curve beside the baseline's: `multipliers` by budget, None where the curves do not meet."""

    residual: str
    points: Points
    fit: Fit
    alpha: Interval
    multipliers: dict[float, Interval | None]


def fit(compute: Sequence[float], losses: Sequence[float]) -> Fit:
    """Least squares over the points. Raises UserError with fewer than three budgets: the curve has three numbers."""
    c, y = np.asarray(compute, dtype=float), np.asarray(losses, dtype=float)
    if len(np.unique(c)) < 3:
        raise UserError(f"a scaling fit needs runs at three budgets at least, and got {len(np.unique(c))}")
    unit = float(np.exp(np.log(c).mean()))
    _, coarse, _ = _best(ALPHAS, c / unit, y)
    step = ALPHAS[1] / ALPHAS[0]
    floor, alpha, scale = _best(np.geomspace(coarse / step, coarse * step, 101), c / unit, y)
    return Fit(floor, scale, alpha, unit)


def _best(alphas: np.ndarray, c: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    x = c ** -alphas[:, None]  # (alphas, points)
    floor, scale = _lines(x, y)
    best = int(((floor[:, None] + scale[:, None] * x - y) ** 2).sum(1).argmin())
    return float(floor[best]), float(alphas[best]), float(scale[best])


def _lines(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row of x the best floor + scale x with neither below zero."""
    spread = x - x.mean(1, keepdims=True)
    scale = (spread * y).sum(1) / (spread**2).sum(1)
    floor = y.mean() - scale * x.mean(1)
    through_zero = (x * y).sum(1) / (x**2).sum(1)
    scale = np.where(floor < 0, through_zero, scale)
    floor = np.where(scale < 0, y.mean(), np.maximum(floor, 0))
    return floor, np.maximum(scale, 0)


def compare_scaling(points: Mapping[str, Points], baseline: str, draws: int = DRAWS, seed: int = 0) -> list[Scaling]:
    """Every residual's curve and its multipliers at the baseline's budgets, with 95 % intervals.

    Arguments: `points`, by residual, the losses of all seeds at each budget in operations; `baseline`, one of them;
    `draws`, bootstrap samples. Raises UserError for an unknown baseline or too few budgets.
    """
    if baseline not in points:
        raise UserError(f"no runs of the baseline '{baseline}'. There are: {', '.join(points)}")
    fits = {name: _fit_points(at) for name, at in points.items()}
    random = np.random.default_rng(seed)
    drawn = {name: [_fit_points(_resample(at, random)) for _ in range(draws)] for name, at in points.items()}
    budgets = sorted(points[baseline])
    return [
        Scaling(
            name,
            at,
            fits[name],
            _interval(fits[name].alpha, [f.alpha for f in drawn[name]]),
            {c: _multiplier(fits, drawn, name, baseline, c) for c in budgets},
        )
        for name, at in points.items()
    ]


def _fit_points(points: Points) -> Fit:
    pairs = [(c, loss) for c, losses in points.items() for loss in losses]
    return fit([c for c, _ in pairs], [loss for _, loss in pairs])


def _resample(points: Points, random: np.random.Generator) -> Points:
    """One seed has no spread to draw from: it stays, and the interval is then too narrow, which the table says."""
    return {c: list(random.choice(losses, len(losses))) for c, losses in points.items()}


def _multiplier(
    fits: Mapping[str, Fit], drawn: Mapping[str, list[Fit]], name: str, baseline: str, compute: float
) -> Interval | None:
    value = _ratio(fits[name], fits[baseline], compute)
    pairs = zip(drawn[name], drawn[baseline], strict=True)
    found = [ratio for mine, other in pairs if (ratio := _ratio(mine, other, compute)) is not None]
    if value is None or len(found) < len(drawn[name]) / 2:
        return None
    return _interval(value, found)


def _ratio(mine: Fit, other: Fit, compute: float) -> float | None:
    needed = other.compute(mine.loss(compute))
    return None if needed is None else needed / compute


def _interval(value: float, draws: Sequence[float]) -> Interval:
    low, high = np.quantile(draws, (0.025, 0.975))
    return Interval(value, float(low), float(high))


def points_of(runs: Sequence[RecordedRun], loss: str = "bits_per_byte") -> dict[str, dict[float, list[float]]]:
    """Finished runs by residual and compute: operations a token, times tokens. Budgets within 3 % count as one, which
    is what a residual's own operations make of it: then they are not matched, and the multiplier says so."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        summary = run.summary or {}
        values = [number(summary.get(key)) for key in ("flops_per_token", "tokens", loss)]
        if None in values:
            continue
        per_token, tokens, value = (float(v) for v in values if v is not None)
        budgets, c = found[run.residual], per_token * tokens
        near = next((b for b in budgets if abs(math.log(b / c)) < 0.03), c)
        budgets[near].append(value)
    return {name: dict(at) for name, at in found.items()}


def scaling_of(folders: Sequence[Path], baseline: str = "standard") -> list[Scaling]:
    """The curves of the runs in these folders; a folder may be a run, a comparison or a study."""
    return compare_scaling(points_of([read_run(folder) for folder in find_runs(list(folders))]), baseline)


def table(found: Sequence[Scaling], baseline: str) -> str:
    """Lines for a terminal."""
    lines = []
    for scaling in found:
        curve = scaling.fit
        alpha = scaling.alpha
        fewest = min(len(losses) for losses in scaling.points.values())
        seeds = "1 seed" if fewest == 1 else f"{fewest} seeds"
        lines.append(
            f"{scaling.residual}: L = {curve.floor:.4f} + {curve.scale:.4f} (C / {curve.unit:.3g})^-{curve.alpha:.3f}"
            f"  (alpha {alpha.low:.3f} to {alpha.high:.3f}; {len(scaling.points)} budgets, {seeds} at least)"
        )
        if scaling.residual != baseline:
            for budget, interval in scaling.multipliers.items():
                text = "the curves do not meet" if interval is None else _words(interval)
                lines.append(f"  at {budget:.3g} operations: {text}")
    return "\n".join(lines)


def _words(interval: Interval) -> str:
    told = "" if interval.low > 1 or interval.high < 1 else ", not told apart from 1"
    return f"{interval.value:.3f} times the compute ({interval.low:.3f} to {interval.high:.3f}{told})"
