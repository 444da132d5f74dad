"""Scaling fits on curves that are known, with noise that is known."""

import itertools
import json
import math
import re
from dataclasses import replace
from datetime import UTC, datetime
from xml.etree import ElementTree

import numpy as np
import pytest
from runfolder import write_json

from headwater.analyze import scaling_of, write_matrix, write_report
from headwater.analyze.bootstrap import noise_groups
from headwater.analyze.plot import FLOOR, HIGH, TOP, Line, Panel, lines_of, picture
from headwater.analyze.power_law import Fit, fit
from headwater.analyze.rates import at_rate, rates_by_budget
from headwater.analyze.scaling import Interval, compare_scaling, without_ends
from headwater.analyze.scaling_points import confounders_of, operations, points_of
from headwater.analyze.scaling_report import plot, table, write_plot
from headwater.cli import main
from headwater.errors import UserError
from headwater.runs.record import RecordedRun
from headwater.runs.stats import t_quantile

SVG = "{http://www.w3.org/2000/svg}"
BUDGETS = [1e15, 3e15, 1e16, 3e16, 1e17]
TRUE = Fit(floor=1.2, scale=0.4, alpha=0.25, unit=1e16)


def sampled(curve, sigma, seeds, seed=0, shift=1.0):
    random = np.random.default_rng(seed)
    return {
        c: {s: curve.loss(c * shift) + sigma * random.standard_normal() for s in range(seeds)}
        for c in BUDGETS
    }


def interval_of_second(points, compute=1e16, **options):
    """The multiplier of the second residual at a budget."""
    return compare_scaling(points, "standard", **options)[1].multipliers[compute]


def width_of_second(points, compute=1e16, **options):
    interval = interval_of_second(points, compute, **options)
    return interval.high - interval.low


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
    optimize = pytest.importorskip(
        "scipy.optimize", reason="scipy is the oracle; it comes with lm-eval, in the dev extra"
    )
    compute = [1.0] * 6 + [10.0] * 3 + [100.0] * 2 + [1000.0]
    off = [0.03, -0.02, 0.01, 0.04, -0.01, 0.02, -0.03, 0.01, -0.02, 0.02, 0.03, -0.01]
    losses = [1 + 0.5 * c**-0.3 + error for c, error in zip(compute, off)]
    curve = fit(compute, losses)
    (floor, scale, alpha), _ = optimize.curve_fit(
        lambda c, e, a, x: e + a * c**-x, compute, losses, p0=(1, 0.5, 0.3)
    )
    assert curve.alpha == pytest.approx(alpha, rel=1e-2)
    for budget in (1.0, 30.0, 1000.0):
        assert curve.loss(budget) == pytest.approx(floor + scale * budget**-alpha, abs=1e-4)


def test_a_residual_that_is_worth_a_quarter_more_compute_is_found_to_be():
    points = {
        "standard": sampled(TRUE, 0.0005, 5),
        "better": sampled(TRUE, 0.0005, 5, seed=1, shift=1.25),
    }
    plain, better = compare_scaling(points, "standard", draws=200)
    for c in BUDGETS[1:-1]:
        assert better.multipliers[c].low < 1.25 < better.multipliers[c].high
        assert better.multipliers[c].low > 1
    assert all(interval.value == pytest.approx(1) for interval in plain.multipliers.values())


def test_a_curve_is_not_asked_far_beyond_its_own_runs():
    points = {
        "standard": sampled(TRUE, 0.0005, 2),
        "better": sampled(TRUE, 0.0005, 2, seed=1, shift=1.25),
    }
    short = {c * 1.1: losses for c, losses in points["better"].items() if c != BUDGETS[-1]}
    scalings = compare_scaling(points | {"better": short}, "standard", draws=20)
    assert [*scalings[1].multipliers] == BUDGETS[:-1]
    assert [*scalings[0].multipliers] == BUDGETS
    assert table(scalings, "standard").count("times the compute") == len(BUDGETS) - 1


@pytest.mark.parametrize(
    ("seeds", "noise"), [([2] * 5, [0.002] * 5), ([6, 3, 3, 2, 1], [0.01, *[0.002] * 4])]
)
def test_intervals_hold_as_often_as_they_say(seeds, noise):
    """With few seeds; and with more of the smallest models, which vary more.

    Of 100 studies 95 hold on average. Intervals that hold in 85 of 100 would pass here three times
    in a hundred; with the seeds themselves drawn anew they hold in 70 to 80.
    """
    held = 0
    for seed in range(100):
        points = {}
        for name in ("standard", "same"):
            random = np.random.default_rng([seed, len(name)])
            cases = zip(BUDGETS, seeds, noise, strict=True)
            points[name] = {
                c: {s: TRUE.loss(c) + random.normal(0, sigma) for s in range(n)}
                for c, n, sigma in cases
            }
        interval = interval_of_second(points, 1e17, draws=100, seed=seed)
        held += interval.low <= 1 <= interval.high
    assert held >= 92


def test_the_study_of_intervals_draws_runs_that_vary_as_it_says(script):
    study = script("studies/scaling-intervals/run.py")
    random = np.random.default_rng(0)
    still = (0.0,) * 4
    quiet = study.drawn(
        {"standard": ((3, 1, 1, 1), still), "better": ((2, 1, 1, 1), still)}, 0.0, random
    )
    smallest = study.BUDGETS[0]
    assert quiet["better"][smallest] == dict.fromkeys(range(2), study.BETTER.loss(smallest))
    assert quiet["standard"][smallest] == dict.fromkeys(range(3), study.PLAIN.loss(smallest))
    arms = {"standard": ((8,) * 4, (3.0,) * 4), "better": ((8,) * 4, (1.0, 2.0, 2.0, 2.0))}
    cases = [study.drawn(arms, 0.8, random) for _ in range(200)]
    for c, sigma in zip(study.BUDGETS, (1, 2, 2, 2), strict=True):
        mine, plain = (
            [case[name][c][s] for case in cases for s in range(8)]
            for name in ("better", "standard")
        )
        assert np.std(mine) == pytest.approx(sigma, rel=0.1)
        assert np.std(plain) == pytest.approx(3, rel=0.1)
        assert np.corrcoef(mine, plain)[0, 1] == pytest.approx(0.8, abs=0.05)


def test_with_little_noise_an_interval_is_students():
    """By how far a fitted curve moves with each loss, and the noise of pairs, as in a table of differences; with so few
    seeds that of all budgets together."""
    seeds = 2
    plain, random = sampled(TRUE, 3e-4, seeds), np.random.default_rng(7)
    other = {
        c: {s: y + 3e-4 * random.standard_normal() for s, y in losses.items()}
        for c, losses in plain.items()
    }
    points = {"standard": plain, "other": other}
    interval = interval_of_second(points, draws=4000)
    c = np.array(BUDGETS) / TRUE.unit
    falls = TRUE.scale * c**-TRUE.alpha
    moved = np.stack(
        (np.ones(5), falls, -falls * np.log(c))
    )  # by floor, log scale and alpha, at each budget
    weights = np.array([1, TRUE.scale, 0]) @ np.linalg.pinv(
        moved.T
    )  # of the losses, in the curve at 1e16
    freedom = len(BUDGETS) * (seeds - 1)
    pairs = [np.var([other[c][s] - plain[c][s] for s in range(seeds)]) * seeds for c in BUDGETS]
    half = (
        t_quantile(0.05, freedom)
        * math.sqrt(sum(pairs) / freedom / seeds)
        * np.linalg.norm(weights)
    )
    expected = 2 * half / (TRUE.scale * TRUE.alpha)
    assert math.log(interval.high / interval.low) == pytest.approx(expected, rel=0.06)


def test_a_budget_with_seeds_enough_has_noise_of_its_own():
    """The smallest model's, ten times that of the others, does not reach them, nor theirs the smallest."""
    quiet = {"standard": sampled(TRUE, 3e-4, 4), "other": sampled(TRUE, 3e-4, 4, seed=1)}
    loud = {}
    for name, points in quiet.items():
        mean = TRUE.loss(1e15)
        smallest = {seed: mean + 10 * (loss - mean) for seed, loss in points[1e15].items()}
        loud[name] = points | {1e15: smallest}
    widths = {c: [width_of_second(p, c, draws=1000) for p in (quiet, loud)] for c in (1e15, 1e17)}
    assert widths[1e15][1] > 4 * widths[1e15][0]
    assert widths[1e17][1] < 1.6 * widths[1e17][0]


def test_other_draws_give_nearly_the_same_interval():
    points = {
        "standard": sampled(TRUE, 0.01, 3),
        "other": sampled(TRUE, 0.01, 3, seed=1, shift=1.2),
    }
    first, second = (interval_of_second(points, seed=seed) for seed in (0, 1))
    # Of 1000 draws they are further apart.
    assert (first.low, first.high) == pytest.approx((second.low, second.high), abs=0.01)


def test_budgets_share_their_noise_from_the_largest_down_until_there_are_seeds_enough():
    assert noise_groups([{1: 3, 2: 2, 3: 1, 4: 0}, {1: 5, 2: 2, 3: 0, 4: 0}]) == [[1], [2, 3, 4]]
    assert noise_groups([{1: 1, 2: 3, 3: 3}]) == [[1, 2], [3]]
    assert noise_groups([{1: 1, 2: 0, 3: 0}]) == [[1, 2, 3]]


def test_a_budget_with_one_seed_has_the_noise_of_the_others():
    points = sampled(TRUE, 0.002, 3)
    fewer = {c: losses if c < 1e17 else {0: losses[0]} for c, losses in points.items()}
    three, one = (
        compare_scaling({"standard": at}, "standard", draws=400)[0].alpha for at in (points, fewer)
    )
    assert one.high - one.low > three.high - three.low


def test_a_residual_without_a_second_seed_has_the_noise_of_all_residuals():
    """The baseline's seeds may happen to end close together."""
    single = {c: {0: losses[0]} for c, losses in sampled(TRUE, 0, 1).items()}
    points = {"standard": sampled(TRUE, 1e-4, 4), "single": single}
    loud = points | {"loud": sampled(TRUE, 3e-3, 4, seed=1)}
    beside_loud = width_of_second(loud, draws=400)
    assert beside_loud > 5 * width_of_second(points, draws=400)
    # Without seeds of the baseline both curves have noise, that of the loud residual alone.
    neither = width_of_second(loud | {"standard": single}, draws=400)
    assert neither == pytest.approx(2 * beside_loud, rel=0.3)


def test_residuals_have_noise_of_their_own():
    """Of runs enough, or more of it than all have together."""
    quiet, plain, loud = (
        sampled(TRUE, noise, 4, seed) for noise, seed in ((1e-4, 1), (1e-4, 0), (3e-3, 2))
    )
    points = {"standard": plain, "quiet": quiet, "loud": loud}
    for name, apart in (("near", 1e-5), ("far", 1e-2)):
        points[name] = {c: {0: TRUE.loss(c) - apart, 1: TRUE.loss(c) + apart} for c in plain}
    width = {}
    for scaling in compare_scaling(points, "standard", draws=400):
        interval = scaling.multipliers[1e16]
        width[scaling.residual] = interval.high - interval.low
    assert width["loud"] > 15 * width["quiet"]
    assert width["near"] > 5 * width["quiet"], (
        "two seeds that happen to end close together say little"
    )
    assert width["far"] > 3 * width["near"], "two that end far apart say enough"


def test_few_pairs_do_not_tell_that_runs_vary_together():
    """Two pairs always lie on a line."""
    plain = sampled(TRUE, 1e-3, 4)
    few = {
        c: {s: y for s, y in losses.items() if s < (2 if c == 1e15 else 1)}
        for c, losses in plain.items()
    }
    unpaired = {c: {s + 9: y for s, y in losses.items()} for c, losses in few.items()}
    paired, alone, many = (
        width_of_second({"standard": plain, "other": points}, draws=1000)
        for points in (few, unpaired, plain)
    )
    assert paired == pytest.approx(alone, rel=0.1)
    assert many < 1e-3


def test_runs_that_do_not_tell_a_curve_are_said_not_to():
    flat = Fit(floor=1.2, scale=0.001, alpha=0.25, unit=1e16)
    scalings = compare_scaling({"standard": sampled(flat, 0.05, 2)}, "standard", draws=400)
    assert (
        "alpha may be anything that is tried, so these runs do not tell the curve; 5 budgets"
        in table(scalings, "standard")
    )
    scalings = compare_scaling({"standard": sampled(TRUE, 0.0005, 2)}, "standard", draws=400)
    assert re.search(r"\(alpha 0\.2\d+ to 0\.\d+; 5 budgets", table(scalings, "standard"))
    for low, high, words in (
        (0.5, 2.11, "0.500 to 2 or more"),
        (0.0095, 0.5, "0.01 or less to 0.500"),
    ):
        half = replace(
            scalings[0], alpha=Interval(0.5, low, high)
        )  # where the search ends, nobody knows further
        assert f"(alpha {words}; 5 budgets" in table([half], "standard")


def test_without_a_second_seed_there_is_no_interval():
    points = {"standard": sampled(TRUE, 0.002, 1), "other": sampled(TRUE, 0.002, 1, seed=1)}
    scalings = compare_scaling(points, "standard")
    assert (scalings[1].alpha.low, scalings[1].multipliers[1e16].high) == (None, None)
    text = table(scalings, "standard")
    assert text.count("one seed: no interval") == len(BUDGETS)
    assert "alpha" not in text


def test_a_curve_that_may_never_be_reached_leaves_the_interval_open():
    """So near to the baseline's floor that in some draws no compute brings the baseline so low."""
    steep, low = (Fit(floor=1.2, scale=scale, alpha=0.5, unit=1e16) for scale in (0.4, 0.001))
    points = {
        "standard": sampled(steep, 0.003, 3, seed=1),
        "better": sampled(low, 0.001, 3, seed=9),
    }
    scalings = compare_scaling(points, "standard", draws=200)
    assert scalings[1].multipliers[1e16].high == math.inf
    assert math.isfinite(scalings[1].multipliers[1e16].low)
    assert "to inf" in table(scalings, "standard")


def recorded(residual, per_token, tokens, bits, seed=0, lr=1e-3):
    return RecordedRun(
        name=f"{residual}-{bits}",
        residual=residual,
        seed=seed,
        config={
            "model": {"residual": residual, "dim": per_token},
            "optim": {"lr": lr},
            "train": {"seed": seed},
        },
        summary={
            "flops_per_token": per_token,
            "tokens": tokens,
            "bits_per_byte": bits,
            "loss": 9.0,
        },
        train=[],
        evals=[],
        depth=[],
        notes=[],
        written=datetime.now(UTC),
    )


def test_points_are_operations_times_tokens():
    """Budgets within three per cent are one, that of the run that came first."""
    runs = [
        recorded("a", 10, 1000, 1.0),
        recorded("a", 10, 2000, 2.0),
        recorded("a", 10.2, 1000, 3.0, 1),
        recorded("b", 20, 1000, 4.0, lr=3e-3),
    ]
    unfinished = replace(runs[0], summary=None)
    assert points_of([*runs, unfinished]) == {
        "a": {10_000: {0: 1.0, 1: 3.0}, 20_000: {0: 2.0}},
        "b": {20_000: {0: 4.0}},
    }
    assert points_of(runs[:1], "loss") == {"a": {10_000: {0: 9.0}}}
    words = r"a-2.0 and a-5.0 are both a at .* with seed 0: .* they differ in optim.lr. "
    words += "There are a with 0.001 and 0.002"
    with pytest.raises(
        UserError, match=words + ", b with 0.003: choose one, as with lr 0.002, or lr best"
    ):
        points_of([*runs, recorded("a", 10, 2000, 5.0, lr=2e-3)])
    with pytest.raises(UserError, match=r"they differ in nothing, so name its folder once$"):
        points_of([runs[0], recorded("a", 10, 1000, 1.0)])


def test_of_several_learning_rates_one_is_taken_or_the_best_of_each_residual_and_size():
    """The best by the mean over seeds, not by the luckiest of them; runs that have not finished have no say."""
    small = {0.001: (2.0, 2.1), 0.002: (1.9, 2.4)}
    runs = [
        recorded("a", 10, 1000, bits, seed, lr)
        for lr, losses in small.items()
        for seed, bits in enumerate(losses)
    ]
    runs += [recorded("a", 20, 1000, bits, 0, lr) for lr, bits in ((0.001, 1.8), (0.002, 1.7))]
    runs += [recorded("b", 10, 1000, bits, 0, lr) for lr, bits in ((0.001, 2.3), (0.002, 2.2))]
    unfinished = replace(recorded("b", 10, 1000, 1.0, 0, 0.004), summary=None)
    assert [run.name for run in at_rate(runs, 0.002)] == ["a-1.9", "a-2.4", "a-1.7", "b-2.2"]
    best = at_rate([*runs, unfinished], "best")
    assert [run.name for run in best] == ["a-2.0", "a-2.1", "a-1.7", "b-2.2"]
    plain = [
        recorded("standard", 10, 1000, bits, 0, lr) for lr, bits in ((0.001, 1.5), (0.002, 1.4))
    ]
    for run, factor in zip(
        plain, (0.1, 1.0), strict=True
    ):  # it has no queries, so this is one sweep
        run.config["optim"]["query_lr"] = factor
    assert [run.name for run in at_rate(plain, "best")] == ["standard-1.4"]
    with pytest.raises(
        UserError, match=r"rate 0.003; there are a with 0.001 and 0.002, b with 0.001 and 0.002$"
    ):
        at_rate(runs, 0.003)


def test_the_best_rates_are_told_with_their_seeds_and_whether_one_beyond_was_tried():
    """A rate may be the best of a sweep by one lucky seed, or because the next was not tried; one that diverged was."""
    small = {0.001: (2.0, 2.1), 0.002: (1.9,), 0.004: (2.4, 2.4)}
    runs = [
        recorded("a", 10, 1000, bits, seed, lr)
        for lr, losses in small.items()
        for seed, bits in enumerate(losses)
    ]
    runs += [recorded("a", 20, 1000, bits, 0, lr) for lr, bits in ((0.001, 1.8), (0.002, 1.7))]
    runs += [
        recorded("b", 10, 1000, 2.3),
        recorded("b", 20, 1000, 1.9),
        recorded("b", 20, 1000, 2.2, 0, 0.002),
    ]
    assert rates_by_budget(runs, operations).splitlines() == [
        "  a 0.002 at 1e+04 (1 of 2 seeds), 0.002 at 2e+04 (1 seed; the largest that was tried)",
        "  b 0.001 at 1e+04 (1 seed; no other was tried), 0.001 at 2e+04 (1 seed; the smallest that was tried)",
    ]
    diverged = [
        replace(recorded("a", 20, 1000, 0.0, seed, lr), summary=None)
        for seed, lr in ((1, 0.002), (0, 0.004))
    ]
    assert "0.002 at 2e+04 (1 of 2 seeds)" in rates_by_budget(runs + diverged, operations)


def test_runs_on_different_text_are_not_fitted_together():
    """Where studies have noted what the text was, its name does not count."""
    first, *others = (recorded("a", 10, 1000 * n, 1.0 / n) for n in (1, 2, 3, 4))
    for run, source, known in zip((first, *others), ("in/x", "y", "x", "/of/x"), (1, 1, 2, None)):
        run.config["data"] = {"source": [source]}
        run.corpus.update({"source_hash": f"{known}" * 64} if known else {})
    same, changed, alone = others
    assert len(points_of([first, same])["a"]) == len(points_of([first, alone])["a"]) == 2
    words = (
        r"a-1.0 \(x, 1{12}\) and a-0.33.* \(x, 2{12}\) have seen different text, .* by themselves$"
    )
    with pytest.raises(UserError, match=words):
        points_of([first, changed])
    with pytest.raises(UserError, match="different text"):
        points_of([same, alone])
    with pytest.raises(UserError, match=words):
        points_of([alone, first, changed])  # the first does not know


def test_losses_on_more_windows_than_others_lie_on_no_curve():
    """Of a longer context the windows are others anyway."""
    runs = [recorded("a", 10, 1000 * n, 1.0 / n) for n in (1, 2, 4)]
    for run, context, windows in zip(runs, (64, 128, 64), (8, 4, 4)):
        run.config["model"]["context"], run.config["train"]["eval_windows"] = context, windows
    assert len(points_of(runs[:2])["a"]) == 2
    words = r"a-1.0 ends with its loss on 8 windows .* and a-0.25 on 4, .* of one train.eval_windows by themselves$"
    with pytest.raises(UserError, match=words):
        points_of(runs)


def test_settings_that_come_with_a_residual_are_named():
    """Beside the baseline's run of the same budget, and of the same seed where there is one; sizes may differ."""
    each = [(size, seed) for size in (10, 20) for seed in (0, 1)]
    plain, fair = (
        [recorded(a, size, 1000, 1.0, seed, size * 1e-4) for size, seed in each]
        for a in ("standard", "a")
    )
    for run in (plain[1], fair[1]):
        run.config["train"]["init_from"] = "x"
    for run in plain:
        run.config["optim"]["query_lr"], run.config["train"]["steps"] = 1.0, run.seed
    alike = {"standard": (), "a": ()}
    assert confounders_of(plain + fair, "standard") == alike
    size_by_itself = recorded("a", 40, 1000, 0.9, lr=1.0)
    assert confounders_of([*plain, *fair, size_by_itself], "standard") == alike
    unfair = recorded("b", 20, 1000, 0.9)
    assert confounders_of([*plain, *fair, unfair], "standard") == {**alike, "b": ("optim.lr",)}
    assert confounders_of([*plain, *fair, replace(unfair, summary=None)], "standard") == alike


def written(run, folder):
    folder.mkdir(parents=True)
    write_json(folder / "config.json", run.config)
    write_json(folder / "summary.json", run.summary)


def test_from_folders_come_the_settings_that_share_in_what_each_residual_is_worth(tmp_path, capsys):
    """The rates are a line of their own where each residual has its best."""
    both = {"standard": (), "rezero": ("optim.lr",), "ddl": ("optim.clip",), "laurel": ()}
    for name, apart in both.items():
        for size, c in enumerate(BUDGETS):
            run = recorded(name, c / 1000, 1000, TRUE.loss(c))
            run.config["optim"] = {
                key: 2.0 if f"optim.{key}" in apart else 1.0 for key in ("lr", "clip")
            }
            written(run, tmp_path / f"{name}-{size}")
    for lr, words in (
        (None, "ddl in optim.clip; rezero in optim.lr"),
        ("best", "ddl in optim.clip"),
    ):
        assert {
            scaling.residual: scaling.confounders for scaling in scaling_of([tmp_path], lr=lr)
        } == both
        assert main(["scaling", str(tmp_path), *([] if lr is None else ["--lr", lr])]) == 0
        assert f"explain a part of it too: {words}\n" in capsys.readouterr().out


def test_runs_that_went_on_to_other_steps_than_planned_are_named(tmp_path, capsys):
    for size, c in enumerate(BUDGETS):
        for name in ("standard", "ddl"):
            written(recorded(name, c / 1000, 1000, TRUE.loss(c)), tmp_path / f"{name}-{size}")
    said = "Counted, though they went on to other steps than planned, under no single schedule: "
    extension = {"kind": "extend", "step": 4, "tokens": 8, "planned": 4, "steps": 8}
    for extended in ([], ["ddl-2", "standard-1"]):
        for name in extended:
            (tmp_path / name / "metrics.jsonl").write_text(json.dumps(extension))
        assert main(["scaling", str(tmp_path)]) == 0
        lines = [
            line for line in capsys.readouterr().out.splitlines() if line.startswith("Counted")
        ]
        assert lines == ([f"{said}{', '.join(extended)}"] if extended else [])


def test_from_folders_come_the_curves_of_the_rate_that_is_asked_for(tmp_path):
    for lr, floor in ((0.001, 1.2), (0.002, 1.3)):
        for size, c in enumerate(BUDGETS):
            run = recorded("standard", c / 1000, 1000, replace(TRUE, floor=floor).loss(c), lr=lr)
            written(run, tmp_path / "runs" / f"lr-{lr}-{size}")
    with pytest.raises(UserError, match=r"There are standard with 0.001 and 0.002: choose one"):
        scaling_of([str(tmp_path)])
    for folder in (tmp_path, str(tmp_path)):
        for takes_folders in (scaling_of, write_report, write_matrix):
            with pytest.raises(UserError, match=f"folders takes a list; got '{tmp_path}': write"):
                takes_folders(folder)
    for lr, floor in (("best", 1.2), (0.002, 1.3)):
        (scaling,) = scaling_of([str(tmp_path)], lr=lr)
        assert scaling.fit.floor == pytest.approx(floor, rel=0.01)


def test_the_table_says_what_is_not_told_apart_and_bad_input_what_is_missing():
    points = {"standard": sampled(TRUE, 0.002, 3), "same": sampled(TRUE, 0.002, 3, seed=1)}
    text = table(compare_scaling(points, "standard", draws=100), "standard")
    assert text.startswith("L in bits per byte of held-out text, C in operations\nstandard: L = 1.")
    assert "3 seeds at least" in text
    assert "not told apart from 1" in text
    assert re.search(r"operations: as standard with \d\.\d+ times the compute \(", text)
    with pytest.raises(UserError, match="three budgets at least, and got 2"):
        fit([1, 2, 2], [3.0, 2.0, 2.1])
    with pytest.raises(
        UserError, match=r"finished: take another; did you mean 'standard'\? Valid: same, standard"
    ):
        compare_scaling(points, "standrad")
    with pytest.raises(
        UserError, match="no run of the baseline 'plain' has finished, nor has any other"
    ):
        compare_scaling({}, "plain")


def test_a_curve_says_how_far_it_misses_its_budgets():
    """By their means, which seeds that differ do not move; three budgets are no test of a curve of three numbers."""
    off = {1e15: 0.0, 3e15: 0.02, 1e16: -0.05, 3e16: 0.02, 1e17: 0.0}
    bent = {c: {0: TRUE.loss(c) + off[c] + 0.3, 1: TRUE.loss(c) + off[c] - 0.3} for c in BUDGETS}
    three = {c: bent[c] for c in BUDGETS[::2]}
    steeper = {1e15: {0: 3.0}, 1e16: {0: 2.9}, 1e17: {0: 2.0}}  # which no curve goes through
    scalings = compare_scaling(
        {
            "standard": bent,
            "three": three,
            "two": {1.0: {0: 2.0}, 2.0: {0: 1.0}},
            "steeper": steeper,
        },
        "standard",
        draws=20,
    )
    assert scalings[0].miss == pytest.approx(
        max(abs(TRUE.loss(c) + off[c] - scalings[0].fit.loss(c)) for c in BUDGETS)
    )
    assert scalings[0].miss == pytest.approx(0.041, abs=0.01)
    assert scalings[1].miss < 1e-3
    assert scalings[2].miss is None
    assert scalings[3].miss > 0.2
    lines = table(scalings, "standard").splitlines()
    assert lines[2] == f"  at most {scalings[0].miss:.4f} from the mean of a budget"
    of_three = [
        line
        for line in lines
        if line.endswith("near three says nothing, as a curve has three numbers")
    ]
    assert [line.split()[2] for line in of_three] == [f"{scalings[i].miss:.4f}" for i in (1, 3)]


def test_curves_without_the_largest_and_the_smallest_budget_tell_what_hangs_on_them():
    """A residual that is worth a quarter more compute but for its last size, which has operations of its own."""
    better = {1.05 * c: {0: TRUE.loss(1.25 * c)} for c in BUDGETS}
    better[1.05e17] = {0: TRUE.loss(1e17)}
    points = {
        "standard": sampled(TRUE, 0, 1),
        "better": better,
        "short": {c: better[1.05 * c] for c in BUDGETS[2:]},
    }
    scalings = compare_scaling(points, "standard")
    last, first = without_ends(scalings, "standard").values()
    assert [list(curve.points) for curve in last] == [
        BUDGETS[:-1],
        [1.05 * c for c in BUDGETS[:-1]],
    ]  # short has two
    assert [len(curve.points) for curve in first] == [4, 4, 3]
    assert all(
        worth.value == pytest.approx(1.25 / 1.05, rel=1e-3)
        for worth in last[1].multipliers.values()
    )
    assert first[1].multipliers[1e17].value < 1.1
    text = table(scalings, "standard")
    assert (
        "\nWithout 1e+17 operations:\n  better: 1.19 at 1e+15, 1.19 at 3e+15, 1.19 at 1e+16, 1.19 at 3e+16\n"
        in text
    )
    assert "\nWithout 1e+15 operations:\n  better: " in text
    three = {
        name: {c: at for c, at in each.items() if c < 2e16}
        for name, each in points.items()
        if name != "short"
    }
    assert not without_ends(compare_scaling(three, "standard"), "standard")


def test_a_residual_with_too_few_budgets_is_left_out_and_said_to_be():
    points = {
        name: sampled(TRUE, 0.002, 2, seed=seed)
        for seed, name in enumerate(("standard", "same", "short"))
    }
    two, one = ({c: points["short"][c] for c in BUDGETS[:count]} for count in (2, 1))
    scalings = compare_scaling({**points, "short": two}, "standard", draws=20)
    assert scalings[:2] == compare_scaling(
        {name: points[name] for name in ("standard", "same")}, "standard", draws=20
    )
    text = table(scalings, "standard")
    assert "\nshort: left out, for it has runs at 2 budgets and a fit needs three" in text
    curves, worth = ElementTree.fromstring(plot(scalings, "standard")).findall(f"{SVG}g")
    shown = {
        each.find(f"{SVG}text[@class='named']").text: each for each in curves.findall(f"{SVG}g")
    }
    assert [each.text for each in worth.iterfind(f".//{SVG}text[@class='named']")] == ["same"]
    assert len(shown["short, no fit"].findall(f"{SVG}circle")) == 4
    assert [
        bool(shown[name].find(f"{SVG}polyline").get("points")) for name in ("same", "short, no fit")
    ] == [1, 0]
    needs = r"needs runs of standard and of another residual at three budgets at least:"
    for few, words in (
        ({"standard": two}, "standard has 2"),
        ({"same": two, "short": one}, "same has 2, short has 1"),
    ):
        with pytest.raises(UserError, match=f"{needs} {words}$"):
            compare_scaling(points | few, "standard")


@pytest.mark.parametrize("alpha", [0.001, 0.25, 9.0])
def test_an_exponent_that_the_search_ends_with_is_said_to_be_unknown(alpha):
    curve = Fit(floor=1.2, scale=0.4, alpha=alpha, unit=1e16)
    text = table(compare_scaling({"standard": sampled(curve, 0.0, 1)}, "standard"), "standard")
    assert ("alpha is the edge of what is tried, so not known" in text) == (alpha != 0.25)


def test_the_plot_has_a_dot_for_each_run_the_curves_and_what_each_is_worth_with_its_interval(
    tmp_path,
):
    points = {
        "standard": sampled(TRUE, 0.002, 3),
        "attnres-block": sampled(TRUE, 0.002, 3, seed=1, shift=1.25),
        "mine:<b>": sampled(TRUE, 0.002, 3, seed=2),
    }
    scalings = compare_scaling(points, "standard", draws=100)
    curves, worth = ElementTree.fromstring(plot(scalings, "standard")).findall(f"{SVG}g")
    assert len(curves.findall(f".//{SVG}circle")) == 3 * 5 * 3
    assert {each.text for each in curves.findall(f".//{SVG}text[@class='named']")} == set(points)
    by_class = {group.get("class"): group for group in worth.findall(f"{SVG}g")}
    assert set(by_class) == {"block", "other0"}, "the baseline is worth itself"
    assert [len(group.findall(f"{SVG}path")) for group in by_class.values()] == [5, 5]
    for group, scaling in zip((by_class["block"], by_class["other0"]), scalings[1:]):
        heights = [float(dot.get("cy")) for dot in group.findall(f"{SVG}circle")]
        for height, span in zip(heights, group.findall(f"{SVG}path"), strict=True):
            low, high = re.fullmatch(r"M[\d.]+ ([\d.]+)V([\d.]+)", span.get("d")).groups()
            assert float(high) < height < float(low)
        values = [scaling.multipliers[c].value for c in BUDGETS]
        assert sorted(range(5), key=lambda n: -heights[n]) == sorted(
            range(5), key=lambda n: values[n]
        )
    file = tmp_path / "scaling.svg"
    for _ in range(2):
        assert write_plot(scalings, "standard", file) == file
    file.write_text("mine")
    with pytest.raises(UserError, match="is no picture of this kind, and would be overwritten"):
        write_plot(scalings, "standard", file)


def test_intervals_at_one_place_stand_side_by_side():
    lines = [
        Line(name, "plain", {1: [y], 2: [y]}, spans={1: (0, 3)})
        for name, y in (("a", 1.0), ("b", 2.0))
    ]
    drawn = picture(
        [Panel("worth", "operations", [*lines, Line("c", "plain", {1: [3.0], 2: [3.0]})])], "label"
    )
    dots = {
        group.find(f"{SVG}text").text: float(group.find(f"{SVG}circle").get("cx"))
        for group in groups(drawn)
    }
    assert (dots["a"] + dots["b"]) / 2 == dots["c"], "a line without intervals stays where it is"
    assert dots["b"] - dots["a"] == 5
    spans = [group.find(f"{SVG}path").get("d").partition(" ")[0] for group in groups(drawn)[1:]]
    assert {f"M{dots['a']}", f"M{dots['b']}"} == {*spans}
    curves = {
        group.find(f"{SVG}text").text: group.find(f"{SVG}polyline").get("points")
        for group in groups(drawn)
    }
    assert all(float(points.partition(",")[0]) == dots[name] for name, points in curves.items())
    crowd = [Line(name, "plain", {1: [1.0], 2: [1.0]}, spans={1: (0, 3)}) for name in "abcdefgh"]
    drawn = ElementTree.fromstring(picture([Panel("worth", "operations", crowd)], "label"))
    axis, places = (
        next(drawn.iter(f"{SVG}line")),
        [float(dot.get("cx")) for dot in drawn.iter(f"{SVG}circle")],
    )
    within = float(axis.get("x1")) < min(places) < max(places) < float(axis.get("x2"))
    assert within, "however many there are, none leaves the axis"


def groups(drawn):
    return ElementTree.fromstring(drawn).findall(f"{SVG}g/{SVG}g")


def test_names_beside_lines_neither_overlap_nor_leave_the_picture():
    lines = lines_of(
        {f"arm {n}": {1: [1.0], 2: [1.0 + n / 1000]} for n in range(6)}
        | {"attnres-full": {1: [9.0], 2: [9.0]}}
    )
    drawn = ElementTree.fromstring(picture([Panel("bits", "rate", lines)], "label"))
    places = sorted(
        float(each.get("y")) for each in drawn.iterfind(f".//{SVG}text[@class='named']")
    )
    assert all(after - before >= 12.9 for before, after in itertools.pairwise(places))
    (end,) = (
        line.get("points").split(",")[-1]
        for line in drawn.iterfind(f".//{SVG}g[@class='full']/{SVG}polyline")
    )
    assert places[0] == pytest.approx(float(end) + 4), "beside its line"
    assert places[-1] <= FLOOR, "above the numbers across"
    crowd = lines_of({f"arm {n}": {1: [1.0], 2: [1.0]} for n in range(19)})
    drawn = ElementTree.fromstring(picture([Panel("bits", "rate", crowd)], "label"))
    places = [float(each.get("y")) for each in drawn.iterfind(f".//{SVG}text[@class='named']")]
    assert TOP <= min(places) < max(places) < HIGH


def test_the_plot_of_one_seed_has_no_intervals_and_none_of_an_interval_without_end_leaves_it():
    one = {"standard": sampled(TRUE, 0, 1), "better": sampled(TRUE, 0, 1, shift=1.25)}
    assert "stroke-opacity" not in plot(compare_scaling(one, "standard"), "standard")
    endless = [
        replace(each, multipliers={1e16: Interval(1.5, 1.2, math.inf)})
        for each in compare_scaling(one, "standard")
    ]
    (span,) = re.findall(r'd="M[\d.]+ ([\d.]+)V([\d.]+)"', plot(endless, "standard"))
    assert float(span[1]) == TOP
    vague = [replace(each, multipliers={1e16: Interval(1.5, 1.2, 140.0)}) for each in endless]
    assert plot(vague, "standard") == plot(endless, "standard")
