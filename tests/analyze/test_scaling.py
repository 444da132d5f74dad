"""Scaling fits on curves that are known, with noise that is known."""

from types import SimpleNamespace

import numpy as np
import pytest

from headwater.analyze.scaling import Fit, compare_scaling, fit, points_of, table
from headwater.errors import UserError

BUDGETS = [1e15, 3e15, 1e16, 3e16, 1e17]
TRUE = Fit(floor=1.2, scale=0.4, alpha=0.25, unit=1e16)


def sampled(curve, sigma, seeds, seed=0, shift=1.0):
    random = np.random.default_rng(seed)
    return {c: [curve.loss(c * shift) + sigma * random.standard_normal() for _ in range(seeds)] for c in BUDGETS}


def test_without_noise_the_curve_comes_back():
    found = fit(BUDGETS, [TRUE.loss(c) for c in BUDGETS])
    assert found.alpha == pytest.approx(0.25, rel=0.02)
    assert found.floor == pytest.approx(1.2, rel=0.01)
    assert [found.loss(c) for c in BUDGETS] == pytest.approx([TRUE.loss(c) for c in BUDGETS], rel=1e-4)
    assert found.compute(found.loss(5e15)) == pytest.approx(5e15)
    assert found.compute(found.floor) is None


def test_a_residual_that_is_worth_a_quarter_more_compute_is_found_to_be():
    points = {"standard": sampled(TRUE, 0.0005, 5), "better": sampled(TRUE, 0.0005, 5, seed=1, shift=1.25)}
    plain, better = compare_scaling(points, "standard", draws=200)
    for c in BUDGETS[1:-1]:
        assert better.multipliers[c].low < 1.25 < better.multipliers[c].high
        assert better.multipliers[c].low > 1
    assert all(interval.value == pytest.approx(1) for interval in plain.multipliers.values())


def test_equal_residuals_are_not_told_apart_and_intervals_hold_as_often_as_they_say():
    held = 0
    for seed in range(40):
        points = {
            "standard": sampled(TRUE, 0.002, 4, seed=2 * seed),
            "same": sampled(TRUE, 0.002, 4, seed=2 * seed + 1),
        }
        interval = compare_scaling(points, "standard", draws=60, seed=seed)[1].multipliers[1e16]
        held += interval.low <= 1 <= interval.high
    assert held >= 34  # 95 % of 40 is 38; of four seeds a bootstrap makes somewhat too little of the spread


def test_intervals_leave_a_twentieth_out():
    points = {"standard": sampled(TRUE, 0.002, 4)}
    drawn = compare_scaling(points, "standard", draws=400)[0].alpha
    random, budgets = np.random.default_rng(0), [c for c in BUDGETS for _ in range(4)]
    draws = [[x for c in BUDGETS for x in random.choice(points["standard"][c], 4)] for _ in range(400)]
    expected = np.quantile([fit(budgets, losses).alpha for losses in draws], (0.025, 0.975))
    assert (drawn.low, drawn.high) == pytest.approx(tuple(expected))


def test_points_are_operations_times_tokens():
    """Budgets within three per cent are one, that of the run that came first."""

    def run(residual, per_token, tokens, bits):
        return SimpleNamespace(
            residual=residual,
            summary={"flops_per_token": per_token, "tokens": tokens, "bits_per_byte": bits, "loss": 9.0},
        )

    runs = [run("a", 10, 1000, 1.0), run("a", 10, 2000, 2.0), run("a", 10.2, 1000, 3.0), run("b", 20, 1000, 4.0)]
    unfinished = SimpleNamespace(residual="a", summary=None)
    assert points_of([*runs, unfinished]) == {"a": {10_000: [1.0, 3.0], 20_000: [2.0]}, "b": {20_000: [4.0]}}
    assert points_of(runs[:1], "loss") == {"a": {10_000: [9.0]}}


def test_the_table_says_what_is_not_told_apart_and_bad_input_what_is_missing():
    points = {"standard": sampled(TRUE, 0.002, 3), "same": sampled(TRUE, 0.002, 3, seed=1)}
    text = table(compare_scaling(points, "standard", draws=100), "standard")
    assert "3 seeds at least" in text
    assert "not told apart from 1" in text
    with pytest.raises(UserError, match="three budgets at least, and got 2"):
        fit([1, 2, 2], [3.0, 2.0, 2.1])
    with pytest.raises(UserError, match="no runs of the baseline 'plain'"):
        compare_scaling(points, "plain")
