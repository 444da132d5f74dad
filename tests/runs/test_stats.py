"""Few seeds are judged for what they are worth: quantiles against scipy, coverage by simulation, words by interval."""

import math
import random
import statistics
import subprocess
import sys

import pytest

from headwater.runs.stats import (
    Paired,
    Stat,
    limits,
    pair,
    ranks,
    reach,
    spearman,
    summarize,
    t_quantile,
    t_tails,
)


@pytest.fixture(scope="module")
def scipy_t():
    return pytest.importorskip(
        "scipy.stats", reason="scipy is the oracle; it comes with lm-eval, in the dev extra"
    ).t


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 7, 9, 19, 30, 99, 1000, 10**6])
@pytest.mark.parametrize("error", [0.9, 0.5, 0.1, 0.05, 0.025, 0.05 / 18, 1e-6, 1e-12])
def test_quantiles_are_those_of_scipy(scipy_t, freedom, error):
    digits = 1e-11 if freedom < 10**6 else 2e-8  # of lgamma(5e5) only sixteen in all are left
    assert t_quantile(error, freedom) == pytest.approx(scipy_t.isf(error / 2, freedom), rel=digits)
    assert t_tails(t_quantile(error, freedom), freedom) == pytest.approx(error, rel=1e-8)


def test_tails_at_the_ends():
    assert t_tails(0.0, 3) == 1.0
    assert t_tails(1e200, 3) == 0.0
    assert t_tails(1.0, 1) == pytest.approx(
        0.5, rel=1e-14
    )  # a quarter of a Cauchy lies beyond one, on each side


@pytest.mark.parametrize(("seeds", "comparisons"), [(2, 1), (3, 1), (3, 4), (5, 2)])
def test_equal_residuals_are_told_apart_in_five_of_a_hundred_comparisons(seeds, comparisons):
    """Any of the verdicts: with |mean| > spread, two seeds and one rival err in half of all comparisons."""
    rng = random.Random(f"{seeds}/{comparisons}")
    trials = 1500
    wrong = 0
    for _ in range(trials):
        rivals = [
            Paired(tuple(rng.gauss(0, 1) for _ in range(seeds)), comparisons)
            for _ in range(comparisons)
        ]
        wrong += any(rival.verdict != "not told apart" for rival in rivals)
    assert wrong / trials < 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)
    assert wrong / trials > 0.03  # not by calling nothing ever


def test_a_paired_difference_is_an_interval_and_a_verdict(scipy_t):
    values = (-0.03, -0.05, -0.02)
    alone, among = Paired(values), Paired(values, comparisons=4)
    half = 4.302652729749464 * statistics.stdev(values) / math.sqrt(3)
    assert alone.half_width == pytest.approx(half)
    assert alone.interval == pytest.approx((alone.mean - half, alone.mean + half))
    assert among.half_width / alone.half_width == pytest.approx(
        scipy_t.isf(0.025 / 4, 2) / scipy_t.isf(0.025, 2)
    )
    assert alone.verdict == "not told apart"
    assert Paired((-0.03, -0.031, -0.029)).verdict == "lower"
    assert Paired((0.03, 0.031, 0.029)).verdict == "higher"
    assert Paired((0.0, 0.0)).verdict == "not told apart"
    assert (Paired((-0.5,)).verdict, Paired((-0.5,)).interval) == ("one seed", None)
    # Correction decides: told alone, not told among nineteen.
    assert [Paired((-0.03, -0.035, -0.026), n).verdict for n in (1, 18)] == [
        "lower",
        "not told apart",
    ]


def test_pairs_are_of_equal_seeds():
    assert pair({0: 1.0, 1: 2.0, 2: None, 3: 4.0}, {1: 1.5, 0: 3.0, 2: 1.0}) == (-2.0, 0.5)


def test_means_have_a_spread_from_two_values_on():
    assert summarize([]) is None
    assert summarize([None]) is None
    assert summarize([2.0, None]) == Stat(2.0, None, 1)
    assert summarize([1.0, 3.0]) == Stat(2.0, math.sqrt(2), 2)
    assert str(Stat(2.0, math.sqrt(2), 2)) == "2.0000 ± 1.4142"
    assert Stat(-0.5, None, 1).text(sign="+") == "−0.5000"
    assert Stat(0.5, 0.25, 2).text(".1f", "+") == "+0.5 ± 0.2"


def test_a_mean_is_no_median():
    paired = Paired((1.0, 2.0, 6.0))
    assert paired.mean == paired.stat.mean == 3.0
    assert paired.stat.spread == pytest.approx(math.sqrt(7))
    assert summarize([1.0, None, 2.0, 6.0]) == Stat(3.0, pytest.approx(math.sqrt(7)), 3)


def test_what_seeds_can_tell_is_said_in_words():
    assert "cannot tell any difference" in limits(1, 2)
    told = "a difference is told from chance when it exceeds {} times the spread of its pairs"
    assert (
        limits(2, 2)
        == f"With 2 seeds and 2 residuals, {told.format(18)}; with five seeds, 1.6 times would do."
    )
    assert "exceeds 130 times" in limits(2, 14)
    assert limits(5) == f"With 5 seeds, {told.format(1.2)}."
    assert reach(3, 2) == pytest.approx(6.205346817 / math.sqrt(3))


def test_needs_no_torch():
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, headwater.runs.stats; assert 'torch' not in sys.modules",
        ],
        check=True,
    )


def test_ranks_and_their_correlation():
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert spearman([1, 2, 3], [10, 1000, 20000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 1, 2]) == pytest.approx(-0.8)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
