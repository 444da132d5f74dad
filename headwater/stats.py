"""What a few seeds can tell: mean and spread, and the 95 % interval of differences taken seed by seed.

Runs with equal seeds saw equal data in equal order, so a residual is compared with the baseline in pairs. The interval
of the mean difference is Student's, mean ± t s / sqrt(n): with few seeds t is large, which is what few seeds are worth.
Where several residuals are compared with one baseline, each interval is made wider (Bonferroni: its error of 5 % is
divided by their number), so that all of them hold together with 95 %. A verdict says no more than its interval: without
this, one of twenty equal residuals would be called better. Holm's steps would call a few more, but beside an interval
that says otherwise. Nothing here imports torch: the trainer and the report share it.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

Seed = TypeVar("Seed")

ERROR = 0.05  # how often one of the intervals may miss, all of them taken together

# The words of every table and page.
LOWER, HIGHER, UNTOLD, ONE_SEED, BASELINE = (
    "lower",
    "higher",
    "not told apart",
    "one seed",
    "baseline",
)


@dataclass(frozen=True)
class Stat:
    mean: float
    spread: float | None  # the sample standard deviation; None: one value has none
    count: int

    def __str__(self) -> str:
        return self.text()

    def text(self, form: str = ".4f", sign: str = "") -> str:
        """`1.2345 ± 0.0012`; `sign="+"` writes the mean's sign, with a true minus."""
        shown = minus(f"{self.mean:{sign}{form}}")
        return shown if self.spread is None else f"{shown} ± {self.spread:{form}}"


def summarize(values: Sequence[float | None]) -> Stat | None:
    """Mean and sample standard deviation of the values that are known; None where there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Stat(
        statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known)
    )


@dataclass(frozen=True)
class Paired:
    """Differences to a baseline, one for each seed, and what they tell when `comparisons` like it are made at once.

    For example: `Paired((-0.03, -0.05, -0.02), comparisons=2).verdict` is "not told apart".
    """

    values: tuple[float, ...]
    comparisons: int = 1

    @property
    def stat(self) -> Stat:
        return Stat(
            self.mean,
            statistics.stdev(self.values) if len(self.values) > 1 else None,
            len(self.values),
        )

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def half_width(self) -> float | None:
        """Of the interval around the mean; one seed has none."""
        if len(self.values) < 2:
            return None
        return reach(len(self.values), self.comparisons) * statistics.stdev(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        half = self.half_width
        return None if half is None else (self.mean - half, self.mean + half)

    @property
    def verdict(self) -> str:
        """One of "lower", "higher" (the interval leaves zero out), "not told apart" and "one seed"."""
        if (half := self.half_width) is None:
            return ONE_SEED
        if abs(self.mean) <= half:
            return UNTOLD
        return LOWER if self.mean < 0 else HIGHER


def pair(
    ours: Mapping[Seed, float | None], theirs: Mapping[Seed, float | None]
) -> tuple[float, ...]:
    """Ours minus theirs for every seed that has a number in both, by seed."""
    pairs = [(value, theirs.get(seed)) for seed, value in ours.items()]
    return tuple(a - b for a, b in pairs if a is not None and b is not None)


def reach(seeds: int, comparisons: int = 1) -> float:
    """How many times its spread a paired difference must be to be told from chance, for at least two seeds."""
    return t_quantile(ERROR / comparisons, seeds - 1) / math.sqrt(seeds)


def limits(seeds: int, comparisons: int = 1, noun: str = "residual") -> str:
    """What so many seeds can tell and what they cannot, in a sentence or two.

    `seeds`: the pairs of the residual that has the fewest. `comparisons`: residuals compared with the baseline, or
    what `noun` calls them.
    """
    if seeds < 2:
        return (
            "One seed has no spread: it shows that a residual trains, and cannot tell any difference from chance. "
            "Three seeds or more can."
        )
    given = f"{seeds} seeds" + (f" and {comparisons} {noun}s" if comparisons > 1 else "")
    now, then = (
        f"{float(f'{reach(count, comparisons):.2g}'):g}" for count in (seeds, 5)
    )  # 130, not 1.3e+02
    more = f"; with five seeds, {then} times would do" if seeds < 5 else ""
    needed = f"when it exceeds {now} times the spread of its pairs{more}"
    return f"With {given}, a difference is told from chance {needed}."


@cache
def t_quantile(error: float, freedom: int) -> float:
    """The t that Student's |T| with `freedom` degrees of freedom exceeds with probability `error`, in (0, 1).

    For example: `t_quantile(0.05, 2)` is 4.3027. Found by halving, to the last digits of a double.
    """
    low, high = 0.0, 1.0
    while t_tails(high, freedom) > error:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if t_tails(middle, freedom) > error else (low, middle)
    return high


def t_tails(t: float, freedom: int) -> float:
    """P(|T| > t) = I_x(freedom / 2, 1 / 2) at x = freedom / (freedom + t^2), I the incomplete beta function."""
    square = t * t
    return incomplete_beta(
        freedom / 2, 0.5, freedom / (freedom + square), square / (freedom + square)
    )


def incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """I_x(a, b), regularised. `rest` is 1 - x, which a caller may know without cancellation.

    The continued fraction converges quickly below the distribution's mean; above it, the other tail is taken.
    """
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, rest, x)
    front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    )
    return math.exp(front) * beta_fraction(a, b, x) / a


def beta_fraction(a: float, b: float, x: float) -> float:
    """1 / (1 + d1 / (1 + d2 / (1 + ...))) by Lentz's method: numerator over denominator, both updated from the left."""
    tiny = 1e-300
    upper, lower = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    value = lower
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            lower = 1 / (1 + term * lower or tiny)
            upper = 1 + term / upper or tiny
            value *= upper * lower
        if abs(upper * lower - 1) < 1e-16:
            return value
    raise ArithmeticError(f"the continued fraction of I_{x}({a}, {b}) does not converge")


def minus(text: str) -> str:
    return text.replace("-", "−")


def ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in order[start : end + 1]:
            found[place] = (start + end) / 2 + 1
        start = end + 1
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """None where one side is all the same: it ranks nothing."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return statistics.correlation(ranks(a), ranks(b))
