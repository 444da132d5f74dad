"""Least squares for L = E + A C^-alpha: loss against compute, or any cost.

For a given alpha, L is linear in E and A, and the best of both have a formula. So the search is
over alpha alone (variable projection): first over a coarse grid, then over a fine one around the
best. E and A stay above zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headwater.errors import UserError

ALPHAS = np.geomspace(0.01, 2.0, 100)
BUDGETS = 3  # the least number of budgets: the curve has three numbers
AT_ONCE = 1000  # fits at a time, for memory


@dataclass(frozen=True)
class Fit:
    """The curve L = floor + scale * (C / unit)^-alpha: bits per byte L by operations C.

    `unit` is the geometric mean of the budgets, which keeps numbers small.
    """

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
        falls = (loss - self.floor) / self.scale
        return self.unit * falls ** (-1 / self.alpha)


def fit(compute: Sequence[float], losses: Sequence[float]) -> Fit:
    """Least squares over the points. Raises UserError with fewer than three budgets."""
    return fit_each(compute, np.asarray([losses], dtype=float))[0]


def fit_each(compute: Sequence[float], losses: np.ndarray) -> list[Fit]:
    """Fit a curve to each row of losses (draws, points)."""
    if len(losses) > AT_ONCE:
        return fit_each(compute, losses[:AT_ONCE]) + fit_each(compute, losses[AT_ONCE:])
    budgets, budget_of_run, runs = np.unique(compute, return_inverse=True, return_counts=True)
    if len(budgets) < BUDGETS:
        raise UserError(
            f"a scaling fit needs runs at three budgets at least, and got {len(budgets)}"
        )
    # Runs of one budget differ from their mean by the same for every curve, so the mean stands for
    # them, and counts as often as there are runs.
    columns = [losses[:, budget_of_run == n].mean(-1) for n in range(len(budgets))]
    means = np.stack(columns, -1)
    share = runs / runs.sum()
    # The unit is the geometric mean of the runs' budgets.
    unit = float(np.exp(share @ np.log(budgets)))
    costs = budgets / unit

    # A coarse search for alpha, then a fine one within a step of its result.
    coarse = _best(ALPHAS[None], costs, means, share)[2]
    step = ALPHAS[1] / ALPHAS[0]
    fine = coarse[:, None] * np.geomspace(1 / step, step, 101)
    parameters = np.stack(_best(fine, costs, means, share), -1)
    return [Fit(floor, scale, alpha, unit) for floor, scale, alpha in parameters.tolist()]


def _best(
    alphas: np.ndarray, compute: np.ndarray, means: np.ndarray, share: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Floor, scale and alpha of the best curve for each row of means (draws, P).

    alphas: (draws or 1, A), those to choose from. compute: (P,). share: (P,), how much each counts.
    """
    powers = compute ** -alphas[..., None]  # (draws or 1, A, P)
    targets = means[:, None]  # (draws, 1, P)
    floors, scales = _lines(powers, targets, share)  # (draws, A)
    curves = floors[..., None] + scales[..., None] * powers
    errors = (curves - targets) ** 2 @ share
    best = errors.argmin(-1)[:, None]

    def chosen(values: np.ndarray) -> np.ndarray:
        return np.take_along_axis(values, best, -1)[:, 0]

    return chosen(floors), chosen(scales), chosen(np.broadcast_to(alphas, errors.shape))


def _lines(x: np.ndarray, y: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit floor + scale x along the last axis, with neither below zero."""
    # Weighted least squares of a line.
    center = x @ share
    spread = x - center[..., None]
    mean = y @ share
    scale = (spread * y) @ share / (spread**2 @ share)
    floor = mean - scale * center
    # With a floor below zero the best line goes through zero; with a falling one it is flat.
    through_zero = (x * y) @ share / (x**2 @ share)
    scale = np.where(floor < 0, through_zero, scale)
    floor = np.where(scale < 0, mean, np.maximum(floor, 0))
    return floor, np.maximum(scale, 0)
