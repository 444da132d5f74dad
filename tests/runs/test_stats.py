"""Few seeds are judged as they are: quantiles against scipy, coverage by simulation, words by interval."""

import math
import random
import statistics
import subprocess
import sys

import pytest

from headwater.runs.stats import (
    NOT_SIGNIFICANT,
    SIGNIFICANT,
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


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30, 1000, 10**6])
@pytest.mark.parametrize("error", [0.9, 0.5, 0.05, 0.025, 0.05 / 18, 1e-12])
def test_quantiles_are_those_of_scipy(scipy_t, freedom, error):
    digits = 1e-11 if freedom < 10**6 else 2e-8  # of lgamma(5e5) only sixteen in all are left
    assert t_quantile(error, freedom) == pytest.approx(scipy_t.isf(error / 2, freedom), rel=digits)
    assert t_tails(t_quantile(error, freedom), freedom) == pytest.approx(error, rel=1e-8)


def test_tails_at_the_ends():
    assert t_tails(0.0, 3) == 1.0
    assert t_tails(1e200, 3) == 0.0
    # A quarter of a Cauchy lies beyond one, on each side
    assert t_tails(1.0, 1) == pytest.approx(0.5, rel=1e-14)


@pytest.mark.parametrize(("seeds", "comparisons"), [(2, 1), (3, 1), (3, 4), (5, 2)])
def test_equal_residuals_differ_significantly_in_five_of_a_hundred_comparisons(seeds, comparisons):
    """Any of the verdicts: with |mean| > spread, two seeds and one rival err in half of all comparisons."""
    rng = random.Random(f"{seeds}/{comparisons}")
    trials, wrong = 1500, 0
    for _ in range(trials):
        verdicts = set()
        for _ in range(comparisons):
            values = tuple(rng.gauss(0, 1) for _ in range(seeds))
            verdicts.add(Paired(values, comparisons).verdict)
        wrong += SIGNIFICANT in verdicts
    assert wrong / trials < 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)
    assert wrong / trials > 0.03  # not by calling nothing ever


def test_a_paired_difference_is_an_interval_and_a_verdict(scipy_t):
    values = (-0.03, -0.05, -0.02)
    alone, among = Paired(values), Paired(values, comparisons=4)
    half = 4.302652729749464 * statistics.stdev(values) / math.sqrt(3)
    assert alone.half_width == pytest.approx(half)
    assert alone.interval == pytest.approx((alone.mean - half, alone.mean + half))
    wider = scipy_t.isf(0.025 / 4, 2) / scipy_t.isf(0.025, 2)
    assert among.half_width / alone.half_width == pytest.approx(wider)
    assert alone.verdict == "no significant difference"
    for values, lower in (((-0.03, -0.031, -0.029), True), ((0.03, 0.031, 0.029), False)):
        paired = Paired(values)
        assert (paired.verdict, paired.lower) == ("significant (95 %)", lower)
    assert Paired((0.0, 0.0)).verdict == NOT_SIGNIFICANT
    assert (Paired((-0.5,)).verdict, Paired((-0.5,)).interval) == ("one seed", None)
    # The correction decides: significant alone, not among nineteen.
    verdicts = [Paired((-0.03, -0.035, -0.026), n).verdict for n in (1, 18)]
    assert verdicts == [SIGNIFICANT, NOT_SIGNIFICANT]


def test_pairs_are_of_equal_seeds_and_a_mean_is_no_median():
    assert pair({0: 1.0, 1: 2.0, 2: None, 3: 4.0}, {1: 1.5, 0: 3.0, 2: 1.0}) == (-2.0, 0.5)
    paired = Paired((1.0, 2.0, 6.0))
    assert paired.mean == paired.stat.mean == 3.0
    assert paired.stat.spread == pytest.approx(math.sqrt(7))


def test_means_have_a_spread_from_two_values_on():
    assert summarize([]) is summarize([None]) is None
    assert summarize([2.0, None]) == Stat(2.0, None, 1)
    assert summarize([1.0, None, 2.0, 6.0]) == Stat(3.0, pytest.approx(math.sqrt(7)), 3)
    assert str(Stat(2.0, math.sqrt(2), 2)) == "2.0000 ± 1.4142"
    assert Stat(-0.5, None, 1).text(sign="+") == "−0.5000"
    assert Stat(0.5, 0.25, 2).text(".1f", "+") == "+0.5 ± 0.2"


def test_what_seeds_can_tell_is_said_in_words():
    assert "no difference can be significant" in limits(1, 2)
    two = "a difference is significant if it exceeds 18 times the spread of its pairs"
    more = "with five seeds, 1.6 times are enough."
    assert limits(2, 2) == f"With 2 seeds and 2 residuals, {two}; {more}"
    assert "exceeds 130 times" in limits(2, 14)
    assert limits(5) == f"With 5 seeds, {two.replace('18', '1.2')}."
    assert reach(3, 2) == pytest.approx(6.205346817 / math.sqrt(3))


def test_ranks_and_their_correlation():
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert spearman([1, 2, 3], [10, 1000, 20000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 1, 2]) == pytest.approx(-0.8)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_needs_no_torch():
    code = "import sys, headwater.runs.stats; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
