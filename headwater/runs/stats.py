"""Statistics of a few seeds: mean and spread, and the 95 % interval of differences taken seed by
seed.

Runs with equal seeds saw equal data in equal order, so a residual is compared with the baseline in
pairs. The interval of the mean difference is Student's, mean ± t s / sqrt(n); with few seeds t is
large. If several residuals are compared with one baseline, each interval is made wider (Bonferroni:
its error of 5 % is divided by their number), so that all of them hold together with 95 %. A
difference is significant if its interval leaves zero out. Without the correction, one of twenty
equal residuals would be called better. Holm's steps would call a few more, but beside an interval
that says otherwise.
"""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

Seed = TypeVar("Seed")
Arm = TypeVar("Arm", bound=Hashable)

ERROR = 0.05  # how often one of the intervals may miss, all of them together

# The verdicts of every table and page. The sign of the difference beside it says which loss is
# lower.
SIGNIFICANT = "significant (95 %)"
NOT_SIGNIFICANT = "no significant difference"
ONE_SEED = "one seed"
BASELINE = "baseline"


@dataclass(frozen=True)
class Stat:
    mean: float
    spread: float | None  # the sample standard deviation; None: one value has none
    count: int

    def __str__(self) -> str:
        return self.text()

    def text(self, form: str = ".4f", sign: str = "") -> str:
        """`1.2345 ± 0.0012`; `sign="+"` writes the mean's sign, with a true minus."""
        mean = minus(f"{self.mean:{sign}{form}}")
        return mean if self.spread is None else f"{mean} ± {self.spread:{form}}"


def summarize(values: Sequence[float | None]) -> Stat | None:
    """Mean and sample standard deviation of the values that are not None; None if there are
    none."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    spread = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Stat(statistics.fmean(numbers), spread, len(numbers))


@dataclass(frozen=True)
class Paired:
    """Differences to a baseline, one for each seed, and their verdict if `comparisons` are made at
    once.

    For example: `Paired((-0.03, -0.05, -0.02), comparisons=2).verdict` is "no significant
    difference".
    """

    values: tuple[float, ...]
    comparisons: int = 1

    @property
    def stat(self) -> Stat:
        spread = statistics.stdev(self.values) if len(self.values) > 1 else None
        return Stat(self.mean, spread, len(self.values))

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def half_width(self) -> float | None:
        """Half of the interval around the mean; None of one seed."""
        if len(self.values) < 2:
            return None
        return reach(len(self.values), self.comparisons) * statistics.stdev(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        half = self.half_width
        return None if half is None else (self.mean - half, self.mean + half)

    @property
    def verdict(self) -> str:
        """Say whether the interval leaves zero out; one seed has no interval."""
        half = self.half_width
        if half is None:
            return ONE_SEED
        return SIGNIFICANT if abs(self.mean) > half else NOT_SIGNIFICANT

    @property
    def lower(self) -> bool:
        """True if the difference is significant and below zero."""
        return self.verdict == SIGNIFICANT and self.mean < 0


def pair(
    ours: Mapping[Seed, float | None], theirs: Mapping[Seed, float | None]
) -> tuple[float, ...]:
    """Ours minus theirs for every seed that has a number in both, by seed."""
    pairs = [(value, theirs.get(seed)) for seed, value in ours.items()]
    return tuple(a - b for a, b in pairs if a is not None and b is not None)


def judge(
    values: Mapping[Arm, Mapping[Seed, float | None]], baselines: Mapping[Arm, Arm]
) -> dict[Arm, Paired]:
    """Compare each arm with its baseline, seed by seed, all intervals holding together.

    Arguments: `values`, by arm the number of each seed; `baselines`, by arm the arm that it is
    compared with. An arm that is its own baseline, or shares no seed with it, is left out of the
    result.

        judge({"standard": {0: 2.0, 1: 2.1}, "mhc": {0: 1.9, 1: 2.0}}, {"mhc":
        "standard"})["mhc"].mean
    """
    # Differences of the seeds that both have.
    differences: dict[Arm, tuple[float, ...]] = {}
    for arm, baseline in baselines.items():
        pairs = pair(values[arm], values[baseline])
        if arm != baseline and pairs:
            differences[arm] = pairs
    # One seed has no interval, so it is no comparison that could miss.
    comparisons = max(1, sum(len(pairs) > 1 for pairs in differences.values()))
    return {arm: Paired(pairs, comparisons) for arm, pairs in differences.items()}


def reach(seeds: int, comparisons: int = 1) -> float:
    """Compute from how many times its spread on a paired difference is significant, for two seeds
    or more."""
    return t_quantile(ERROR / comparisons, seeds - 1) / math.sqrt(seeds)


def limits(seeds: int, comparisons: int = 1, noun: str = "residual") -> str:
    """Say in a sentence or two which differences are significant with few seeds.

    `seeds`: the pairs of the residual that has the fewest. `comparisons`: residuals compared with
    the baseline, or what `noun` calls them.
    """
    if seeds < 2:
        return (
            "One seed has no spread: it shows that a residual trains, but no difference can be "
            "significant. Take three seeds or more."
        )
    subject = f"{seeds} seeds"
    if comparisons > 1:
        subject += f" and {comparisons} {noun}s"
    times = two_digits(reach(seeds, comparisons))
    needed = f"if it exceeds {times} times the spread of its pairs"
    if seeds < 5:
        needed += f"; with five seeds, {two_digits(reach(5, comparisons))} times are enough"
    return f"With {subject}, a difference is significant {needed}."


def two_digits(value: float) -> str:
    """130, and not 1.3e+02."""
    return f"{float(f'{value:.2g}'):g}"


@cache
def t_quantile(error: float, freedom: int) -> float:
    """The t that Student's |T| with `freedom` degrees of freedom exceeds with probability `error`,
    in (0, 1).

    For example: `t_quantile(0.05, 2)` is 4.3027. Computed by halving, to the last digits of a
    double.
    """
    # Doubling finds an upper end, halving the place between.
    low, high = 0.0, 1.0
    while t_tails(high, freedom) > error:
        low, high = high, 2 * high
    middle = (low + high) / 2
    while middle not in (low, high):
        if t_tails(middle, freedom) > error:
            low = middle
        else:
            high = middle
        middle = (low + high) / 2
    return high


def t_tails(t: float, freedom: int) -> float:
    """P(|T| > t) = I_x(freedom / 2, 1 / 2) at x = freedom / (freedom + t^2), I the incomplete beta
    function."""
    square = t * t
    total = freedom + square
    return incomplete_beta(freedom / 2, 0.5, freedom / total, square / total)


def incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """I_x(a, b), regularised. `rest` is 1 - x, which a caller may know without cancellation.

    The continued fraction converges quickly below the distribution's mean; above it, the other tail
    is computed.
    """
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, rest, x)
    # x^a (1 - x)^b / (a B(a, b)), then the fraction.
    normalizer = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(normalizer + a * math.log(x) + b * math.log(rest))
    return front * beta_fraction(a, b, x) / a


def beta_fraction(a: float, b: float, x: float) -> float:
    """1 / (1 + d1 / (1 + d2 / (1 + ...))) by Lentz's method: numerator over denominator, both
    updated from the left."""
    # Tiny numbers stand in for zeros, by which nothing may be divided.
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
    """Ranks from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    places = [0.0] * len(values)
    start = 0
    while start < len(order):
        # Equal values from `start` to `end`.
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for i in order[start : end + 1]:
            places[i] = (start + end) / 2 + 1
        start = end + 1
    return places


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation; None if all values of one side are equal, which ranks nothing."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return statistics.correlation(ranks(a), ranks(b))
