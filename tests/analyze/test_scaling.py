"""Scaling fits on curves that are known, with noise that is known."""

import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from headwater.analyze.bootstrap import noise_groups
from headwater.analyze.plot import TOP
from headwater.analyze.power_law import Fit, fit
from headwater.analyze.scaling import Interval, compare_scaling, without_ends
from headwater.analyze.scaling_report import plot, table, write_plot
from headwater.errors import UserError
from headwater.runs.stats import t_quantile

SVG = "{http://www.w3.org/2000/svg}"
BUDGETS = [1e15, 3e15, 1e16, 3e16, 1e17]
TRUE = Fit(floor=1.2, scale=0.4, alpha=0.25, unit=1e16)


def sampled(curve=TRUE, sigma=0.002, seeds=2, seed=0, shift=1.0):
    """Losses of a curve by budget and seed; with `shift` the residual saves so much compute."""
    random = np.random.default_rng(seed)
    points = {}
    for c in BUDGETS:
        losses = curve.loss(c * shift) + sigma * random.standard_normal(seeds)
        points[c] = dict(enumerate(losses.tolist()))
    return points


def compare(points, **options):
    return compare_scaling(points, "standard", **options)


def compare_two(other, plain, **options):
    return compare({"standard": plain, "other": other}, **options)


def lines_of(scalings):
    return table(scalings, "standard")


def width(points, compute=1e16, **options):
    """The width of the second residual's interval at a budget."""
    interval = compare(points, **options)[1].multipliers[compute]
    return interval.high - interval.low


def at_budgets(points, budgets):
    return {c: points[c] for c in budgets}


def test_without_noise_the_curve_comes_back():
    losses = [TRUE.loss(c) for c in BUDGETS]
    curve = fit(BUDGETS, losses)
    assert curve.alpha == pytest.approx(0.25, rel=0.02)
    assert curve.floor == pytest.approx(1.2, rel=0.01)
    assert [curve.loss(c) for c in BUDGETS] == pytest.approx(losses, rel=1e-4)
    assert curve.compute(curve.loss(5e15)) == pytest.approx(5e15)
    assert curve.compute(curve.floor) is None


def test_every_run_counts_once_however_many_a_budget_has():
    """Beside scipy's least squares over all points, not over the means of budgets."""
    reason = "scipy is the oracle; it comes with lm-eval, in the dev extra"
    optimize = pytest.importorskip("scipy.optimize", reason=reason)
    compute = [1.0] * 6 + [10.0] * 3 + [100.0] * 2 + [1000.0]
    off = [0.03, -0.02, 0.01, 0.04, -0.01, 0.02, -0.03, 0.01, -0.02, 0.02, 0.03, -0.01]

    def formula(c, floor, scale, alpha):
        return floor + scale * c**-alpha

    losses = formula(np.array(compute), 1, 0.5, 0.3) + off
    parameters, _ = optimize.curve_fit(formula, compute, losses, p0=(1, 0.5, 0.3))
    curve = fit(compute, losses)
    assert curve.alpha == pytest.approx(parameters[2], rel=1e-2)
    for budget in (1.0, 30.0, 1000.0):
        assert curve.loss(budget) == pytest.approx(formula(budget, *parameters), abs=1e-4)


def test_a_residual_that_is_worth_a_quarter_more_compute_is_found_to_be():
    better = sampled(sigma=5e-4, seeds=5, seed=1, shift=1.25)
    standard = sampled(sigma=5e-4, seeds=5)
    plain, scaling = compare_two(better, standard, draws=200)
    for c in BUDGETS[1:-1]:
        assert 1 < scaling.multipliers[c].low < 1.25 < scaling.multipliers[c].high
    assert all(interval.value == pytest.approx(1) for interval in plain.multipliers.values())

    # A curve is not asked far beyond its own runs.
    short = {c * 1.1: better[c] for c in BUDGETS[:-1]}
    scalings = compare_two(short, standard, draws=20)
    assert [[*scaling.multipliers] for scaling in scalings] == [BUDGETS, BUDGETS[:-1]]
    assert lines_of(scalings).count("times the compute") == len(BUDGETS) - 1


@pytest.mark.parametrize(
    ("seeds", "noise"),
    [([2] * 5, [0.002] * 5), ([6, 3, 3, 2, 1], [0.01] + [0.002] * 4)],
)
def test_intervals_hold_as_often_as_they_say(seeds, noise):
    """There are few seeds, or more of the smallest models, which vary more.

    Of 100 studies 95 hold on average. Intervals that hold in 85 of 100 would pass here three times
    in a hundred; with the seeds themselves drawn anew they hold in 70 to 80.
    """
    hits = 0
    for seed in range(100):
        points = {}
        for name in ("standard", "same"):
            random = np.random.default_rng([seed, len(name)])
            points[name] = {}
            for c, n, sigma in zip(BUDGETS, seeds, noise, strict=True):
                losses = TRUE.loss(c) + random.normal(0, sigma, n)
                points[name][c] = dict(enumerate(losses.tolist()))
        interval = compare(points, draws=100, seed=seed)[1].multipliers[1e17]
        hits += interval.low <= 1 <= interval.high
    assert hits >= 92


def test_the_study_of_intervals_draws_runs_that_vary_as_it_says(script):
    study, random = script("studies/scaling-intervals/run.py"), np.random.default_rng(0)
    sigmas = {"standard": (3.0,) * 4, "better": (1.0, 2.0, 2.0, 2.0)}
    arms = {name: ((8,) * 4, sigma) for name, sigma in sigmas.items()}
    cases = [study.drawn(arms, 0.8, random) for _ in range(200)]
    for i, c in enumerate(study.BUDGETS):
        losses = {name: [] for name in arms}
        for case in cases:
            for name in arms:
                losses[name] += case[name][c].values()
        for name, curve in (("standard", study.PLAIN), ("better", study.BETTER)):
            sigma = sigmas[name][i]
            assert len(losses[name]) == 8 * 200
            assert np.mean(losses[name]) == pytest.approx(curve.loss(c), abs=sigma / 8)
            assert np.std(losses[name]) == pytest.approx(sigma, rel=0.1)
        together = np.corrcoef(*losses.values())[0, 1]
        assert together == pytest.approx(0.8, abs=0.05)


def test_with_little_noise_an_interval_is_students():
    """The interval follows from how far a fitted curve moves with each loss, and the noise of pairs."""
    plain, random = sampled(sigma=3e-4), np.random.default_rng(7)
    other, squares = {}, 0.0
    for c, losses in plain.items():
        differences = 3e-4 * random.standard_normal(2)
        other[c] = {s: y + differences[s] for s, y in losses.items()}
        squares += 2 * np.var(differences)
    interval = compare_two(other, plain, draws=4000)[1].multipliers[1e16]

    # Derivatives of the losses by floor, log scale and alpha; their inverse moves the curve.
    c = np.array(BUDGETS) / TRUE.unit
    falls = TRUE.scale * c**-TRUE.alpha
    derivatives = np.stack((np.ones(5), falls, -falls * np.log(c)), 1)
    at_1e16 = np.array([1, TRUE.scale, 0])
    weights = at_1e16 @ np.linalg.pinv(derivatives)

    freedom = len(BUDGETS)  # two seeds at each
    sigma = math.sqrt(squares / freedom / 2)
    half = t_quantile(0.05, freedom) * sigma * np.linalg.norm(weights)
    expected = 2 * half / (TRUE.scale * TRUE.alpha)
    assert math.log(interval.high / interval.low) == pytest.approx(expected, rel=0.06)


def test_a_budget_with_seeds_enough_has_noise_of_its_own():
    """The smallest model's, ten times that of the others, does not reach them, nor theirs it."""
    quiet, loud, mean = {}, {}, TRUE.loss(1e15)
    for seed, name in enumerate(("standard", "other")):
        points = quiet[name] = sampled(sigma=3e-4, seeds=4, seed=seed)
        smallest = {s: mean + 10 * (loss - mean) for s, loss in points[1e15].items()}
        loud[name] = points | {1e15: smallest}

    def times_wider(c):
        return width(loud, c, draws=1000) / width(quiet, c, draws=1000)

    assert times_wider(1e15) > 4
    assert times_wider(1e17) < 1.6


def test_budgets_share_their_noise_from_the_largest_down_until_there_are_seeds_enough():

    def groups_of(*extras):
        return noise_groups([dict(enumerate(seeds)) for seeds in extras])

    assert groups_of((3, 2, 1, 0), (5, 2, 0, 0)) == [[0], [1, 2, 3]]
    assert groups_of((1, 3, 3)) == [[0, 1], [2]]
    assert groups_of((1, 0, 0)) == [[0, 1, 2]]

    # A budget with one seed has the noise of the others, and a curve less sure of itself.
    three = sampled(seeds=3)
    one = three | {1e17: {0: three[1e17][0]}}
    widths = []
    for points in (one, three):
        (scaling,) = compare({"standard": points}, draws=400)
        widths.append(scaling.alpha.high - scaling.alpha.low)
    assert widths[0] > widths[1]


def test_a_residual_without_a_second_seed_has_the_noise_of_all_residuals():
    """The baseline's seeds may happen to end close together."""
    single = sampled(sigma=0, seeds=1)
    points = {"standard": sampled(sigma=1e-4, seeds=4), "single": single}
    loud = points | {"loud": sampled(sigma=3e-3, seeds=4, seed=1)}
    beside_loud = width(loud, draws=400)
    assert beside_loud > 5 * width(points, draws=400)

    # Without seeds of the baseline both curves have noise, that of the loud residual alone.
    neither = width(loud | {"standard": single}, draws=400)
    assert neither == pytest.approx(2 * beside_loud, rel=0.3)


def test_residuals_have_noise_of_their_own():
    """A residual has enough runs, or more noise than all have together."""
    points = {
        "standard": sampled(sigma=1e-4, seeds=4),
        "quiet": sampled(sigma=1e-4, seeds=4, seed=1),
        "loud": sampled(sigma=3e-3, seeds=4, seed=2),
        "near": {},
        "far": {},
    }
    for c in BUDGETS:
        loss = TRUE.loss(c)
        points["near"][c] = {0: loss - 1e-5, 1: loss + 1e-5}
        points["far"][c] = {0: loss - 1e-2, 1: loss + 1e-2}
    widths = {}
    for scaling in compare(points, draws=400):
        interval = scaling.multipliers[1e16]
        widths[scaling.residual] = interval.high - interval.low
    assert widths["loud"] > 15 * widths["quiet"]
    assert widths["near"] > 5 * widths["quiet"], "two seeds that happen to end close say little"
    assert widths["far"] > 3 * widths["near"], "two that end far apart say enough"


def test_few_pairs_do_not_tell_that_runs_vary_together():
    """Two pairs always lie on a line."""
    plain = sampled(sigma=1e-3, seeds=4)
    few = {c: {0: losses[0]} for c, losses in plain.items()}
    few[1e15][1] = plain[1e15][1]
    unpaired = {}
    for c, losses in few.items():
        unpaired[c] = {s + 9: y for s, y in losses.items()}
    widths = []
    for points in (few, unpaired, plain):
        widths.append(width({"standard": plain, "other": points}, draws=1000))
    assert widths[0] == pytest.approx(widths[1], rel=0.1)
    assert widths[2] < 1e-3


def test_runs_that_do_not_tell_a_curve_are_said_not_to():
    flat = replace(TRUE, scale=0.001)
    unknown = lines_of(compare({"standard": sampled(flat, 0.05)}, draws=400))
    assert "so these runs do not tell the curve; 5 budgets" in unknown
    (scaling,) = compare({"standard": sampled(sigma=5e-4)}, draws=400)
    assert re.search(r"\(alpha 0\.2\d+ to 0\.\d+; 5 budgets", lines_of([scaling]))
    # Where the search ends, nobody knows further.
    for words, low, high in (
        ("0.500 to 2 or more", 0.5, 2.11),
        ("0.01 or less to 0.500", 0.0095, 0.5),
    ):
        half = replace(scaling, alpha=Interval(0.5, low, high))
        assert f"(alpha {words}; 5 budgets" in lines_of([half])


@pytest.mark.parametrize("alpha", [0.001, 0.25, 9.0])
def test_an_exponent_that_the_search_ends_with_is_said_to_be_unknown(alpha):
    curve = replace(TRUE, alpha=alpha)
    text = lines_of(compare({"standard": sampled(curve, 0.0, 1)}))
    assert ("alpha is the edge of what is tried, so not known" in text) == (alpha != 0.25)


def test_without_a_second_seed_there_is_no_interval():
    scalings = compare_two(sampled(seeds=1, seed=1), sampled(seeds=1))
    assert scalings[1].alpha.low is None
    assert scalings[1].multipliers[1e16].high is None
    text = lines_of(scalings)
    assert text.count("one seed: no interval") == len(BUDGETS)
    assert "alpha" not in text


def test_a_curve_that_may_never_be_reached_leaves_the_interval_open():
    """So near to the baseline's floor that in some draws no compute brings the baseline so low."""
    steep, low = replace(TRUE, alpha=0.5), replace(TRUE, scale=0.001, alpha=0.5)
    plain = sampled(steep, 0.003, 3, seed=1)
    other = sampled(low, 0.001, 3, seed=9)
    scalings = compare_two(other, plain, draws=200)
    assert scalings[1].multipliers[1e16].high == math.inf
    assert math.isfinite(scalings[1].multipliers[1e16].low)
    assert "to inf" in lines_of(scalings)


def test_the_table_has_intervals_and_verdicts_and_bad_input_is_named():
    points = {"standard": sampled(seeds=3), "same": sampled(seeds=3, seed=1)}
    text = lines_of(compare(points, draws=100))
    assert "standard: L = 1." in text
    assert "3 seeds at least" in text
    ratio = r"standard needs \d\.\d+ times the compute \(\d\.\d+ to \d\.\d+\)"
    assert re.search(rf"operations: {ratio}: no significant difference\n", text)
    with pytest.raises(UserError, match="three budgets at least, and got 2"):
        fit([1, 2, 2], [3.0, 2.0, 2.1])
    with pytest.raises(UserError, match="did you mean 'standard'"):
        compare_scaling(points, "standrad")
    with pytest.raises(UserError, match="'plain' has finished, nor has any other"):
        compare_scaling({}, "plain")


def test_a_curve_says_how_far_it_misses_its_budgets():
    """Means count, which seeds that differ do not move; three budgets test no curve."""
    off = dict(zip(BUDGETS, (0.0, 0.02, -0.05, 0.02, 0.0)))
    bent = {}
    for c in BUDGETS:
        mean = TRUE.loss(c) + off[c]
        bent[c] = {0: mean + 0.3, 1: mean - 0.3}
    points = {
        "standard": bent,
        "three": at_budgets(bent, BUDGETS[::2]),
        "two": {1.0: {0: 2.0}, 2.0: {0: 1.0}},
        "steeper": {1e15: {0: 3.0}, 1e16: {0: 2.9}, 1e17: {0: 2.0}},  # no curve goes through it
    }
    standard, three, two, steeper = scalings = compare(points, draws=20)
    means = {c: sum(losses.values()) / 2 for c, losses in bent.items()}
    distances = [abs(mean - standard.fit.loss(c)) for c, mean in means.items()]
    assert standard.miss == pytest.approx(max(distances))
    assert standard.miss == pytest.approx(0.041, abs=0.01)
    assert three.miss < 1e-3
    assert two.miss is None
    assert steeper.miss > 0.2
    lines = lines_of(scalings).splitlines()
    assert lines[2] == f"  at most {standard.miss:.4f} from the mean of a budget"
    misses = [line.split()[2] for line in lines if line.endswith("as a curve has three numbers")]
    assert misses == [f"{scaling.miss:.4f}" for scaling in (three, steeper)]


def test_curves_without_the_largest_and_the_smallest_budget_tell_what_hangs_on_them():
    """A residual that saves a fifth of the compute but for its last size, whose budgets differ."""
    better = {1.05 * c: {0: TRUE.loss(1.25 * c)} for c in BUDGETS}
    better[1.05e17] = {0: TRUE.loss(1e17)}
    short = {c: better[1.05 * c] for c in BUDGETS[2:]}
    plain = sampled(sigma=0, seeds=1)
    scalings = compare({"standard": plain, "better": better, "short": short})
    last, first = without_ends(scalings, "standard").values()
    # Without the last budget `short` has two, too few for a curve.
    budgets = [[*scaling.points] for scaling in last]
    assert budgets == [BUDGETS[:-1], [*better][:-1]]
    assert [len(scaling.points) for scaling in first] == [4, 4, 3]
    ratios = [interval.value for interval in last[1].multipliers.values()]
    assert ratios == pytest.approx([1.25 / 1.05] * 4, rel=1e-3)
    assert first[1].multipliers[1e17].value < 1.1
    text = lines_of(scalings)
    ratios = "1.19 at 1e+15, 1.19 at 3e+15, 1.19 at 1e+16, 1.19 at 3e+16\n"
    assert f"\nWithout 1e+17 operations:\n  better: {ratios}" in text
    assert "\nWithout 1e+15 operations:\n  better: " in text

    # Three budgets are too few to leave one out.
    few = at_budgets(plain, BUDGETS[:3])
    assert not without_ends(compare_two(few, few), "standard")


def panels_of(svg):
    return ElementTree.fromstring(svg).findall(f"{SVG}g")


def name_of(group):
    return group.find(f"{SVG}text[@class='named']").text


def test_a_residual_with_too_few_budgets_is_left_out_and_said_to_be():
    short = sampled(seed=2)
    two, one = at_budgets(short, BUDGETS[:2]), at_budgets(short, BUDGETS[:1])
    both = {"standard": sampled(), "same": sampled(seed=1)}
    scalings = compare(both | {"short": two}, draws=20)
    assert scalings[:2] == compare(both, draws=20)
    assert "\nshort: left out, for it has runs at 2 budgets" in lines_of(scalings)

    # Its runs are drawn, without a curve and without a ratio.
    curves, ratios = panels_of(plot(scalings, "standard"))
    by_name = {name_of(group): group for group in curves.findall(f"{SVG}g")}
    assert by_name.keys() == {"standard", "same", "short, no fit"}
    assert [name_of(group) for group in ratios.findall(f"{SVG}g")] == ["same"]
    bare = by_name["short, no fit"]
    assert len(bare.findall(f"{SVG}circle")) == 4
    assert not bare.find(f"{SVG}polyline").get("points")

    for few, words in (
        ({"standard": two}, "standard has 2"),
        ({"same": two, "short": one}, "same has 2, short has 1"),
    ):
        with pytest.raises(UserError, match=rf"of another residual at three .*: {words}$"):
            compare(both | {"short": short} | few)


def test_the_plot_has_a_dot_for_each_run_the_curves_and_what_each_saves_with_its_interval(tmp_path):
    points = {
        "standard": sampled(seeds=3),
        "attnres-block": sampled(seeds=3, seed=1, shift=1.25),
        "mine:<b>": sampled(seeds=3, seed=2),
    }
    scalings = compare(points, draws=100)
    curves, ratios = panels_of(plot(scalings, "standard"))
    assert len(curves.findall(f".//{SVG}circle")) == 3 * 5 * 3
    assert {name_of(group) for group in curves.findall(f"{SVG}g")} == set(points)
    groups = ratios.findall(f"{SVG}g")
    assert [group.get("class") for group in groups] == ["block", "other0"], "without the baseline"
    for group, scaling in zip(groups, scalings[1:], strict=True):
        # A larger ratio stands higher, inside its interval.
        heights = [float(dot.get("cy")) for dot in group.findall(f"{SVG}circle")]
        for height, span in zip(heights, group.findall(f"{SVG}path"), strict=True):
            low, high = re.fullmatch(r"M[\d.]+ ([\d.]+)V([\d.]+)", span.get("d")).groups()
            assert float(high) < height < float(low)
        values = [scaling.multipliers[c].value for c in BUDGETS]
        order = sorted(range(len(BUDGETS)), key=values.__getitem__)
        assert [heights[i] for i in order] == sorted(heights, reverse=True)

    file = tmp_path / "scaling.svg"
    for _ in range(2):
        assert write_plot(scalings, "standard", file) == file
    file.write_text("mine")
    with pytest.raises(UserError, match="is no picture of this kind, and would be overwritten"):
        write_plot(scalings, "standard", file)


def test_the_plot_of_one_seed_has_no_intervals_and_an_endless_interval_ends_at_its_edge():
    better = sampled(sigma=0, seeds=1, shift=1.25)
    scalings = compare_two(better, sampled(sigma=0, seeds=1))
    assert "stroke-opacity" not in plot(scalings, "standard")
    plots = []
    for high in (math.inf, 140.0):
        multipliers = {1e16: Interval(1.5, 1.2, high)}
        changed = [replace(scaling, multipliers=multipliers) for scaling in scalings]
        plots.append(plot(changed, "standard"))
    assert plots[0] == plots[1]
    (top,) = re.findall(r'd="M[\d.]+ [\d.]+V([\d.]+)"', plots[0])
    assert float(top) == TOP
