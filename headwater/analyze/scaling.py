"""Loss against compute: L = E + A C^-alpha for each residual, and how much compute one of them is worth in another's.

For a given alpha the best E and A are a linear least-squares fit, so the search is over alpha alone (variable
projection); E and A stay above zero. The compute multiplier of a residual at a budget C is C' / C, where the baseline's
curve reaches at C' what the residual's reaches at C: above one, it saves.

Intervals are a bootstrap whose noise is that of seeds: what a residual's runs of one budget differ by. Small models may
vary much more than larger ones, so every budget has noise of its own, if there are seeds enough to know it; else those
next to each other share theirs, so that a budget with one seed has noise too. A residual with too few seeds for that
takes what all residuals vary by together, or its own where that is more. Residual and baseline are drawn together,
correlated as their runs of equal seed are, if enough pairs tell; with few seeds noise is itself known roughly, so each
draw has a scale of its own, sqrt(f / chi2_f) for f seeds beyond the first of the one that has more. Both
curves are fitted again to what was found plus noise, and the middle 95 % of what comes out is the interval: for what
depends linearly on the losses, Student's. Drawing seeds anew instead would make too little of the spread: with two a
budget, such intervals hold in 70 to 80 of 100 cases.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headwater.analyze.groups import UNFELT, differing, settings_of
from headwater.analyze.provenance import corpus
from headwater.analyze.rates import RATE, at_rate, rate_of, rates_told
from headwater.analyze.runs import RecordedRun, number, paths_of, read_runs, section
from headwater.errors import UserError, nearest

ALPHAS = np.geomspace(0.01, 2.0, 100)
BUDGETS = 3  # at least: the curve has three numbers
DRAWS = 4000
AT_ONCE = 1000  # fits, for memory
ENOUGH = 3  # seeds beyond the first: fewer do not tell how far runs of a budget differ
NEAR = 0.03  # budgets whose logarithms differ by less are one
TWIN = 0.2  # and by less than this, budgets of two residuals: their own operations tell them apart
FAR = 1.5  # times its largest budget, or of its smallest: further out a curve is not asked
Points = Mapping[float, Mapping[int | None, float]]  # compute to the loss of each seed


@dataclass(frozen=True)
class Fit:
    """L = floor + scale * (C / unit)^-alpha: bits per byte L by operations C. `unit` is the geometric mean of the
    budgets, which keeps numbers small."""

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
    """`low` and `high` are None where no budget has two seeds: nothing then tells how far runs differ."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Scaling:
    """A residual's curve beside the baseline's: `multipliers` at the baseline's budgets as far as the residual's own
    runs reach, None where the curves do not meet. Runs at fewer than three budgets have no `fit`, no `alpha` and no
    multipliers. `confounders`: settings beyond the residual, as `optim.lr`, in which its runs differ from the
    baseline's of the same budgets: they share in what it is worth."""

    residual: str
    points: Points
    fit: Fit | None
    alpha: Interval | None
    multipliers: dict[float, Interval | None]
    confounders: tuple[str, ...] = ()

    @property
    def above(self) -> dict[float, float]:
        """How far the mean loss of each budget lies above the curve, in bits per byte; empty without a curve."""
        means = {c: sum(losses.values()) / len(losses) for c, losses in sorted(self.points.items())}
        return {} if self.fit is None else {c: mean - self.fit.loss(c) for c, mean in means.items()}

    @property
    def miss(self) -> float | None:
        """How far the curve is at most from the mean loss of a budget; None without a curve. Of three budgets a small
        one says nothing: a curve has three numbers."""
        return max(map(abs, self.above.values()), default=None)


def fit(compute: Sequence[float], losses: Sequence[float]) -> Fit:
    """Least squares over the points. Raises UserError with fewer than three budgets."""
    return fit_each(compute, np.asarray([losses], dtype=float))[0]


def fit_each(compute: Sequence[float], losses: np.ndarray) -> list[Fit]:
    """A fit to each row of losses (draws, points)."""
    if len(losses) > AT_ONCE:
        return [*fit_each(compute, losses[:AT_ONCE]), *fit_each(compute, losses[AT_ONCE:])]
    budgets, which, runs = np.unique(
        np.asarray(compute, dtype=float), return_inverse=True, return_counts=True
    )
    if len(budgets) < BUDGETS:
        raise UserError(
            f"a scaling fit needs runs at three budgets at least, and got {len(budgets)}"
        )
    # What runs of a budget differ by is the same for every curve: their mean decides, as often as there are runs.
    means = np.stack([losses[:, which == n].mean(-1) for n in range(len(budgets))], -1)
    share = runs / runs.sum()
    unit = float(np.exp(share @ np.log(budgets)))
    coarse = _best(ALPHAS[None], budgets / unit, means, share)[2]
    step = ALPHAS[1] / ALPHAS[0]
    floor, scale, alpha = _best(
        coarse[:, None] * np.geomspace(1 / step, step, 101), budgets / unit, means, share
    )
    return [
        Fit(e, a, exponent, unit)
        for e, a, exponent in zip(floor.tolist(), scale.tolist(), alpha.tolist())
    ]


def _best(
    alphas: np.ndarray, c: np.ndarray, y: np.ndarray, share: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of alphas (draws or 1, A), at points c (P,) that count by their share (P,), the best for each row of y
    (draws, P): floor, scale and alpha."""
    x, y = c ** -alphas[..., None], y[:, None]  # (draws or 1, A, P) and (draws, 1, P)
    floor, scale = _lines(x, y, share)  # (draws, A)
    errors = (floor[..., None] + scale[..., None] * x - y) ** 2 @ share
    best = errors.argmin(-1)[:, None]
    alphas = np.broadcast_to(alphas, errors.shape)
    floor, scale, alpha = (
        np.take_along_axis(part, best, -1)[:, 0] for part in (floor, scale, alphas)
    )
    return floor, scale, alpha


def _lines(x: np.ndarray, y: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Along the last axis the best floor + scale x with neither below zero."""
    spread, mean = x - (x @ share)[..., None], y @ share
    scale = (spread * y) @ share / (spread**2 @ share)
    floor = mean - scale * (x @ share)
    through_zero = (x * y) @ share / (x**2 @ share)
    scale = np.where(floor < 0, through_zero, scale)
    floor = np.where(scale < 0, mean, np.maximum(floor, 0))
    return floor, np.maximum(scale, 0)


def compare_scaling(
    points: Mapping[str, Points], baseline: str, draws: int = DRAWS, seed: int = 0
) -> list[Scaling]:
    """Every residual's curve and its multipliers at the baseline's budgets, with 95 % intervals; none far beyond its
    own runs, where a curve is a guess. One with runs at fewer than three budgets has its points alone.

    Arguments: `points`, by residual, the loss of each seed at each budget in operations; `baseline`, one of them;
    `draws`, bootstrap samples. Raises UserError for an unknown baseline, or if it or all others have too few budgets.
    """
    if baseline not in points:
        others = f": take another; {nearest(baseline, points)}" if points else ", nor has any other"
        raise UserError(f"no run of the baseline '{baseline}' has finished{others}")
    plain = points[baseline]
    few = {name: len(at) for name, at in points.items() if len(at) < BUDGETS}
    if baseline in few or len(few) == len(points) - 1 > 0:
        counts = ", ".join(f"{name} has {count}" for name, count in few.items())
        raise UserError(
            f"a scaling fit needs runs of {baseline} and of another residual at three budgets at least: {counts}"
        )
    found = []
    for name, at in points.items():
        if name in few:
            found.append(Scaling(name, at, None, None, {}))
            continue
        fits = _fit_points(at), _fit_points(plain)
        drawn = _drawn(at, plain, [*points.values()], draws, np.random.default_rng(seed))
        within = [c for c in sorted(plain) if min(at) / FAR < c < max(at) * FAR]
        multipliers = {c: _multiplier(fits, drawn, c) for c in within}
        found.append(
            Scaling(
                name,
                at,
                fits[0],
                _interval(fits[0].alpha, [f.alpha for f, _ in drawn]),
                multipliers,
            )
        )
    return found


def _fit_points(points: Points) -> Fit:
    places = _places(points)
    return fit([c for c, _ in places], [points[c][seed] for c, seed in places])


def _drawn(
    mine: Points, plain: Points, everyone: Sequence[Points], draws: int, random: np.random.Generator
) -> list[tuple[Fit, Fit]]:
    """Curves of a residual and of the baseline, fitted to what was found plus noise; none where that is unknown."""
    near = {c: min((abs(math.log(b / c)), b) for b in plain) for at in everyone for c in at}
    if not any(map(_deviations, everyone)):
        return []
    spread: tuple[dict[float, tuple[float, Any]], ...] = (
        {},
        {},
    )  # by budget: how far runs differ, and in each draw
    for budgets in _neighbours(
        [{near[c][1]: len(losses) - 1 for c, losses in at.items()} for at in (mine, plain)]
    ):
        every = [
            _varied({c: at[c] for c in at if near[c][1] in budgets})
            for at in (mine, plain, *everyone)
        ]
        rough = math.sqrt(
            sum(squares for squares, _ in every[2:]) / sum(seeds for _, seeds in every[2:])
        )
        most = max(seeds for _, seeds in every[:2]) or max(seeds for _, seeds in every)
        scale = np.sqrt(most / random.chisquare(most, draws))
        for (squares, seeds), found in zip(every, spread):
            sigma = math.sqrt(squares / seeds) if seeds else 0.0
            sigma = sigma if seeds >= ENOUGH else max(sigma, rough)
            found.update(dict.fromkeys(budgets, (sigma or 1.0, sigma * scale)))
    off, plain_off = _deviations(mine), _deviations(plain)
    twins = {
        (c, s): (b, s)
        for c, (far, b) in near.items()
        for s in mine.get(c, ())
        if far < TWIN and s in plain[b]
    }
    both = [(place, twin) for place, twin in twins.items() if place in off and twin in plain_off]
    pairs = [(off[p] / spread[0][t[0]][0], plain_off[t] / spread[1][t[0]][0]) for p, t in both]
    a, b = np.array(pairs).reshape(-1, 2).T
    enough = len(both) - len({place[0] for place, _ in both}) >= ENOUGH
    share = (
        float(2 * a @ b / ((a @ a + b @ b) or 1.0)) if enough else 0.0
    )  # the correlation of what varies alike
    noise = {place: random.standard_normal(draws) for place in _places(plain)}
    own = {place: random.standard_normal(draws) for place in _places(mine)}
    for place, twin in twins.items():
        own[place] = share * noise[twin] + math.sqrt(max(0.0, 1 - share**2)) * own[place]
    curves = (
        fit_each(
            [c for c, _ in z],
            np.stack([at[c][s] + found[near[c][1]][1] * z[c, s] for c, s in z], 1),
        )
        for at, z, found in zip((mine, plain), (own, noise), spread, strict=True)
    )
    return list(zip(*curves))


def _varied(points: Points) -> tuple[float, int]:
    """How far runs are from the means of their budgets, squared and summed; how many there are beyond the first."""
    return sum(off**2 for off in _deviations(points).values()), sum(
        len(losses) - 1 for losses in points.values()
    )


def _neighbours(seeds: Sequence[Mapping[float, int]]) -> list[list[float]]:
    """The baseline's budgets, those together that need each other's seeds. `seeds`: of each residual, by budget, how
    many there are beyond the first."""
    groups = [[budget] for budget in sorted(seeds[-1])]
    while len(groups) > 1:
        counts = [max(sum(each.get(b, 0) for b in group) for each in seeds) for group in groups]
        few = [n for n, count in enumerate(counts) if count < ENOUGH]
        if not few:
            break
        at = max(few[-1], 1)  # with the budget below it; the smallest with that above
        groups[at - 1 : at + 1] = [groups[at - 1] + groups[at]]
    return groups


def _places(points: Points) -> list[tuple[float, int | None]]:
    return [(c, seed) for c, losses in points.items() for seed in losses]


def _deviations(points: Points) -> dict[tuple[float, int | None], float]:
    """Of each run from the mean of its budget, where that has several."""
    means = {
        c: sum(losses.values()) / len(losses) for c, losses in points.items() if len(losses) > 1
    }
    return {
        (c, seed): loss - means[c]
        for c, losses in points.items()
        if c in means
        for seed, loss in losses.items()
    }


def _multiplier(
    fits: tuple[Fit, Fit], drawn: Sequence[tuple[Fit, Fit]], compute: float
) -> Interval | None:
    value = _ratio(fits, compute)
    return (
        None if math.isinf(value) else _interval(value, [_ratio(each, compute) for each in drawn])
    )


def _ratio(fits: tuple[Fit, Fit], compute: float) -> float:
    """Infinite where the other curve never comes so low."""
    mine, other = fits
    loss = mine.loss(compute)
    needed = other.compute(loss)
    if needed is None:
        return math.inf if loss <= other.floor else 0.0
    return needed / compute


def _interval(value: float, draws: Sequence[float]) -> Interval:
    if not draws:
        return Interval(value, None, None)
    low, high = np.quantile(
        draws, (0.025, 0.975), method="closest_observation"
    )  # some may be infinite
    return Interval(value, float(low), float(high))


def operations(run: RecordedRun) -> float | None:
    """Of a whole run."""
    per_token, tokens = (
        number((run.summary or {}).get(key)) for key in ("flops_per_token", "tokens")
    )
    return None if per_token is None or tokens is None else per_token * tokens


def points_of(
    runs: Sequence[RecordedRun],
    loss: str = "bits_per_byte",
    cost: Callable[[RecordedRun], float | None] = operations,
) -> dict[str, dict[float, dict[int | None, float]]]:
    """Finished runs by residual, budget (operations, or what `cost` makes of a run) and seed. Budgets within 3 % count
    as one, which is what a residual's own operations make of it: then they are not matched, and the multiplier says so.

    Raises UserError for two runs of one residual, budget and seed: runs that differ in a learning rate are not seeds;
    and for runs on different text, or evaluated on more windows of it than others, whose losses lie on no curve.
    """
    found: dict[str, dict[float, dict[int | None, float]]] = defaultdict(lambda: defaultdict(dict))
    known: dict[tuple[str, float, int | None], RecordedRun] = {}
    of_context: dict[
        Any, RecordedRun
    ] = {}  # the first of each: a longer window is another one anyway
    for run in runs:
        c, value = cost(run), number((run.summary or {}).get(loss))
        if c is None or value is None:
            continue
        if (
            first := next((first for first in known.values() if not same_text(first, run)), None)
        ) is not None:
            raise UserError(
                f"{first.name} ({corpus(first)}) and {run.name} ({corpus(run)}) have seen different text, so their "
                "losses lie on no curve: fit the runs of each text by themselves"
            )
        alike = of_context.setdefault(section(run.config, "model").get("context"), run)
        windows = [section(each.config, "train").get("eval_windows") for each in (alike, run)]
        if windows[0] != windows[1]:
            raise UserError(
                f"{alike.name} ends with its loss on {windows[0]} windows of held-out text and {run.name} on "
                f"{windows[1]}, so their losses lie on no curve: fit the runs of one train.eval_windows by themselves"
            )
        budgets = found[run.residual]
        near = next((b for b in budgets if abs(math.log(b / c)) < NEAR), c)
        if (other := known.setdefault((run.residual, near, run.seed), run)) is not run:
            keys = differing(settings_of([other, run]))
            told = ", ".join(keys) or "nothing, so name its folder once"
            if RATE in keys:
                told += f". There are {rates_told(runs)}: choose one, as with --lr {rate_of(run):g}, or --lr best"
            raise UserError(
                f"{other.name} and {run.name} are both {run.residual} at {c:.3g} operations with seed {run.seed}: a "
                f"fit takes one run for each seed; they differ in {told}"
            )
        budgets[near][run.seed] = value
    return {name: dict(budgets) for name, budgets in found.items()}


def confounders_of(runs: Sequence[RecordedRun], baseline: str) -> dict[str, tuple[str, ...]]:
    """By residual the settings, but for the model's, steps and seed, in which it differs from the baseline's runs of
    its budgets: what it is worth is then in part worth of these."""
    known = [(run, c) for run in runs if (c := operations(run))]
    keys: dict[str, set[str]] = defaultdict(set)
    for run, c in known:
        twins = [(abs(math.log(b / c)), plain) for plain, b in known if plain.residual == baseline]
        far, plain = min(
            twins, key=lambda twin: (twin[0], twin[1].seed != run.seed), default=(math.inf, run)
        )
        if far < TWIN:
            keys[run.residual].update(differing(settings_of([plain, run])))
    fair = {"train.steps", *UNFELT.get(baseline, ())}
    return {
        name: tuple(sorted(key for key in each - fair if not key.startswith("model.")))
        for name, each in keys.items()
    }


def same_text(one: RecordedRun, other: RecordedRun) -> bool:
    """By its hash; where that of one is not known, as of early runs, by what it is called, wherever it lay."""
    known = [run.corpus.get("source_hash") for run in (one, other)]
    named = [
        [Path(name).name for name in section(run.config, "data").get("source", ())]
        for run in (one, other)
    ]
    first, second = known if all(known) else named
    return bool(first == second)


def compare_runs(runs: Sequence[RecordedRun], baseline: str) -> list[Scaling]:
    """The curves of finished runs by operations, each with its `confounders`."""
    confounders = confounders_of(runs, baseline)
    return [
        replace(scaling, confounders=confounders.get(scaling.residual, ()))
        for scaling in compare_scaling(points_of(runs), baseline)
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
        lr: take the runs with this learning rate; "best": of each residual and size, those with the rate at which
            their mean loss is lowest; where that is another than the baseline's, it is among the `confounders`.

    Returns a `Scaling` for each residual. Raises `headwater.errors.UserError` for folders without runs, for runs with
    several learning rates and no `lr`, on different text or windows of it, and for too few budgets.

        for found in scaling_of(["runs/sizes"]):
            print(found.residual, found.fit, found.multipliers, found.confounders)
    """
    return compare_runs(at_rate(read_runs(paths_of(folders)), lr), baseline)


def without_ends(found: Sequence[Scaling], baseline: str) -> dict[float, list[Scaling]]:
    """How far curves hang on single sizes: those without the baseline's largest budget, and those without its smallest,
    by the budget that is left out. None where three budgets are all there are: with fewer there is no curve."""
    points = {scaling.residual: scaling.points for scaling in found}
    budgets = sorted(points.get(baseline, ()))
    fitted = {}
    for end in (budgets[-1], budgets[0]) if len(budgets) > BUDGETS else ():
        rest = {
            name: {c: at for c, at in each.items() if abs(math.log(c / end)) >= TWIN}
            for name, each in points.items()
        }
        enough = {name: each for name, each in rest.items() if len(each) >= BUDGETS}
        if baseline in enough and len(enough) > 1:
            fitted[end] = compare_scaling(enough, baseline)
    return fitted
