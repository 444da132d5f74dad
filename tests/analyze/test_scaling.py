"""Scaling fits on curves that are known, with noise that is known."""

import itertools
import math
import re
from dataclasses import replace
from datetime import UTC, datetime
from xml.etree import ElementTree

import numpy as np
import pytest
from runfolder import append_rows, write_json

from headwater.analyze import scaling_of, write_report
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


def sampled(curve=TRUE, sigma=0.002, seeds=2, seed=0, shift=1.0):
    """Losses of a curve by budget and seed; with `shift` the residual saves so much compute."""
    random = np.random.default_rng(seed)
    points = {}
    for c in BUDGETS:
        loss = curve.loss(c * shift)
        points[c] = {s: loss + sigma * random.standard_normal() for s in range(seeds)}
    return points


def beside(other, plain=None, **options):
    """The scalings of the plain residual and of another one."""
    plain = sampled() if plain is None else plain
    return compare_scaling({"standard": plain, "other": other}, "standard", **options)


def width(points, compute=1e16, **options):
    """The width of the second residual's interval at a budget."""
    interval = compare_scaling(points, "standard", **options)[1].multipliers[compute]
    return interval.high - interval.low


def firsts(points, count=1):
    """The points without all but the first seeds."""
    return {c: {s: losses[s] for s in range(count)} for c, losses in points.items()}


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
    better = sampled(sigma=5e-4, seeds=5, seed=1, shift=1.25)
    plain, scaling = beside(better, sampled(sigma=5e-4, seeds=5), draws=200)
    for c in BUDGETS[1:-1]:
        assert 1 < scaling.multipliers[c].low < 1.25 < scaling.multipliers[c].high
    assert all(interval.value == pytest.approx(1) for interval in plain.multipliers.values())

    # A curve is not asked far beyond its own runs.
    short = {c * 1.1: losses for c, losses in better.items() if c != BUDGETS[-1]}
    scalings = beside(short, draws=20)
    assert [[*scaling.multipliers] for scaling in scalings] == [BUDGETS, BUDGETS[:-1]]
    assert table(scalings, "standard").count("times the compute") == len(BUDGETS) - 1


@pytest.mark.parametrize(
    ("seeds", "noise"), [([2] * 5, [0.002] * 5), ([6, 3, 3, 2, 1], [0.01, *[0.002] * 4])]
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
                losses = {s: TRUE.loss(c) + random.normal(0, sigma) for s in range(n)}
                points[name][c] = losses
        scaling = compare_scaling(points, "standard", draws=100, seed=seed)[1]
        interval = scaling.multipliers[1e17]
        hits += interval.low <= 1 <= interval.high
    assert hits >= 92


def test_the_study_of_intervals_draws_runs_that_vary_as_it_says(script):
    study = script("studies/scaling-intervals/run.py")
    random = np.random.default_rng(0)
    still = {"standard": ((3, 1, 1, 1), (0.0,) * 4), "better": ((2, 1, 1, 1), (0.0,) * 4)}
    quiet, smallest = study.drawn(still, 0.0, random), study.BUDGETS[0]
    assert quiet["better"][smallest] == dict.fromkeys(range(2), study.BETTER.loss(smallest))
    assert quiet["standard"][smallest] == dict.fromkeys(range(3), study.PLAIN.loss(smallest))
    sigmas = {"standard": (3.0,) * 4, "better": (1.0, 2.0, 2.0, 2.0)}
    arms = {name: ((8,) * 4, sigma) for name, sigma in sigmas.items()}
    cases = [study.drawn(arms, 0.8, random) for _ in range(200)]
    for i, c in enumerate(study.BUDGETS):
        losses = {name: [case[name][c][s] for case in cases for s in range(8)] for name in arms}
        for name, values in losses.items():
            assert np.std(values) == pytest.approx(sigmas[name][i], rel=0.1)
        assert np.corrcoef(*losses.values())[0, 1] == pytest.approx(0.8, abs=0.05)


def test_with_little_noise_an_interval_is_students():
    """The interval follows from how far a fitted curve moves with each loss, and the noise of pairs."""
    seeds = 2
    plain, random = sampled(sigma=3e-4), np.random.default_rng(7)
    other = {}
    for c, losses in plain.items():
        other[c] = {s: y + 3e-4 * random.standard_normal() for s, y in losses.items()}
    interval = beside(other, plain, draws=4000)[1].multipliers[1e16]
    c = np.array(BUDGETS) / TRUE.unit
    falls = TRUE.scale * c**-TRUE.alpha
    # By floor, log scale and alpha, at each budget
    moved = np.stack((np.ones(5), falls, -falls * np.log(c)))
    # Of the losses, in the curve at 1e16
    weights = np.array([1, TRUE.scale, 0]) @ np.linalg.pinv(moved.T)
    freedom = len(BUDGETS) * (seeds - 1)
    pairs = [np.var([other[c][s] - plain[c][s] for s in range(seeds)]) * seeds for c in BUDGETS]
    sigma = math.sqrt(sum(pairs) / freedom / seeds)
    half = t_quantile(0.05, freedom) * sigma * np.linalg.norm(weights)
    expected = 2 * half / (TRUE.scale * TRUE.alpha)
    assert math.log(interval.high / interval.low) == pytest.approx(expected, rel=0.06)


def test_a_budget_with_seeds_enough_has_noise_of_its_own():
    """The smallest model's, ten times that of the others, does not reach them, nor theirs it."""
    quiet = {"standard": sampled(sigma=3e-4, seeds=4), "other": sampled(TRUE, 3e-4, 4, seed=1)}
    loud, mean = {}, TRUE.loss(1e15)
    for name, points in quiet.items():
        smallest = {seed: mean + 10 * (loss - mean) for seed, loss in points[1e15].items()}
        loud[name] = points | {1e15: smallest}
    for c, low, high in ((1e15, 4, math.inf), (1e17, 0, 1.6)):
        assert low < width(loud, c, draws=1000) / width(quiet, c, draws=1000) < high


def test_budgets_share_their_noise_from_the_largest_down_until_there_are_seeds_enough():
    assert noise_groups([{1: 3, 2: 2, 3: 1, 4: 0}, {1: 5, 2: 2, 3: 0, 4: 0}]) == [[1], [2, 3, 4]]
    assert noise_groups([{1: 1, 2: 3, 3: 3}]) == [[1, 2], [3]]
    assert noise_groups([{1: 1, 2: 0, 3: 0}]) == [[1, 2, 3]]
    # A budget with one seed has the noise of the others, and a curve less sure of itself.
    points = sampled(seeds=3)
    fewer = points | {1e17: {0: points[1e17][0]}}
    alphas = []
    for at in (fewer, points):
        alphas.append(compare_scaling({"standard": at}, "standard", draws=400)[0].alpha)
    one, three = alphas
    assert one.high - one.low > three.high - three.low


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
    points = {}
    for seed, (name, sigma) in enumerate({"standard": 1e-4, "quiet": 1e-4, "loud": 3e-3}.items()):
        points[name] = sampled(sigma=sigma, seeds=4, seed=seed)
    for name, apart in (("near", 1e-5), ("far", 1e-2)):
        points[name] = {c: {0: TRUE.loss(c) - apart, 1: TRUE.loss(c) + apart} for c in BUDGETS}
    widths = {}
    for scaling in compare_scaling(points, "standard", draws=400):
        interval = scaling.multipliers[1e16]
        widths[scaling.residual] = interval.high - interval.low
    assert widths["loud"] > 15 * widths["quiet"]
    assert widths["near"] > 5 * widths["quiet"], "two seeds that happen to end close say little"
    assert widths["far"] > 3 * widths["near"], "two that end far apart say enough"


def test_few_pairs_do_not_tell_that_runs_vary_together():
    """Two pairs always lie on a line."""
    plain = sampled(sigma=1e-3, seeds=4)
    few = firsts(plain) | {1e15: firsts(plain, 2)[1e15]}
    unpaired = {c: {s + 9: y for s, y in losses.items()} for c, losses in few.items()}
    widths = []
    for points in (few, unpaired, plain):
        widths.append(width({"standard": plain, "other": points}, draws=1000))
    assert widths[0] == pytest.approx(widths[1], rel=0.1)
    assert widths[2] < 1e-3


def test_runs_that_do_not_tell_a_curve_are_said_not_to():
    flat = Fit(floor=1.2, scale=0.001, alpha=0.25, unit=1e16)
    scalings = compare_scaling({"standard": sampled(flat, 0.05)}, "standard", draws=400)
    words = "alpha may be anything that is tried, so these runs do not tell the curve; 5 budgets"
    assert words in table(scalings, "standard")
    scalings = compare_scaling({"standard": sampled(sigma=5e-4)}, "standard", draws=400)
    assert re.search(r"\(alpha 0\.2\d+ to 0\.\d+; 5 budgets", table(scalings, "standard"))
    # Where the search ends, nobody knows further.
    ends = {"0.500 to 2 or more": (0.5, 2.11), "0.01 or less to 0.500": (0.0095, 0.5)}
    for words, (low, high) in ends.items():
        half = replace(scalings[0], alpha=Interval(0.5, low, high))
        assert f"(alpha {words}; 5 budgets" in table([half], "standard")


@pytest.mark.parametrize("alpha", [0.001, 0.25, 9.0])
def test_an_exponent_that_the_search_ends_with_is_said_to_be_unknown(alpha):
    curve = Fit(floor=1.2, scale=0.4, alpha=alpha, unit=1e16)
    text = table(compare_scaling({"standard": sampled(curve, 0.0, 1)}, "standard"), "standard")
    assert ("alpha is the edge of what is tried, so not known" in text) == (alpha != 0.25)


def test_without_a_second_seed_there_is_no_interval():
    scalings = beside(sampled(seeds=1, seed=1), sampled(seeds=1))
    assert (scalings[1].alpha.low, scalings[1].multipliers[1e16].high) == (None, None)
    text = table(scalings, "standard")
    assert text.count("one seed: no interval") == len(BUDGETS)
    assert "alpha" not in text


def test_a_curve_that_may_never_be_reached_leaves_the_interval_open():
    """So near to the baseline's floor that in some draws no compute brings the baseline so low."""
    steep, low = (Fit(floor=1.2, scale=scale, alpha=0.5, unit=1e16) for scale in (0.4, 0.001))
    scalings = beside(sampled(low, 0.001, 3, seed=9), sampled(steep, 0.003, 3, seed=1), draws=200)
    assert scalings[1].multipliers[1e16].high == math.inf
    assert math.isfinite(scalings[1].multipliers[1e16].low)
    assert "to inf" in table(scalings, "standard")


def recorded(residual, per_token, tokens, bits, seed=0, lr=1e-3):
    summary = {"flops_per_token": per_token, "tokens": tokens, "bits_per_byte": bits, "loss": 9.0}
    model = {"residual": residual, "dim": per_token}
    return RecordedRun(
        name=f"{residual}-{bits}",
        residual=residual,
        seed=seed,
        config={"model": model, "optim": {"lr": lr}, "train": {"seed": seed}},
        summary=summary,
        train=[],
        evals=[],
        depth=[],
        notes=[],
        written=datetime.now(UTC),
    )


def sweep(residual, per_token, losses):
    """Runs of one size, from the losses of its seeds by learning rate."""
    runs = []
    for lr, values in losses.items():
        runs += [recorded(residual, per_token, 1000, y, s, lr) for s, y in enumerate(values)]
    return runs


def test_points_are_operations_times_tokens():
    """Budgets within three per cent are one, that of the run that came first."""
    runs = [
        recorded("a", 10, 1000, 1.0),
        recorded("a", 10, 2000, 2.0),
        recorded("a", 10.2, 1000, 3.0, 1),
        recorded("b", 20, 1000, 4.0, lr=3e-3),
    ]
    unfinished = replace(runs[0], summary=None)
    a = {10_000: {0: 1.0, 1: 3.0}, 20_000: {0: 2.0}}
    assert points_of([*runs, unfinished]) == {"a": a, "b": {20_000: {0: 4.0}}}
    assert points_of(runs[:1], "loss") == {"a": {10_000: {0: 9.0}}}
    words = "a-2.0 and a-5.0 are both a at .* with seed 0: .* they differ in optim.lr. There are a "
    words += "with 0.001 and 0.002, b with 0.003: choose one, as with lr 0.002, or lr best"
    with pytest.raises(UserError, match=words):
        points_of([*runs, recorded("a", 10, 2000, 5.0, lr=2e-3)])
    with pytest.raises(UserError, match=r"they differ in nothing, so name its folder once$"):
        points_of([runs[0], recorded("a", 10, 1000, 1.0)])


def test_of_several_learning_rates_one_is_taken_or_the_best_of_each_residual_and_size():
    """The best by the mean over seeds, not by the luckiest; unfinished runs have no say."""
    runs = sweep("a", 10, {0.001: (2.0, 2.1), 0.002: (1.9, 2.4)})
    runs += sweep("a", 20, {0.001: (1.8,), 0.002: (1.7,)})
    runs += sweep("b", 10, {0.001: (2.3,), 0.002: (2.2,)})
    unfinished = replace(recorded("b", 10, 1000, 1.0, 0, 0.004), summary=None)

    def names(runs, lr):
        return [run.name for run in at_rate(runs, lr)]

    assert names(runs, 0.002) == ["a-1.9", "a-2.4", "a-1.7", "b-2.2"]
    assert names([*runs, unfinished], "best") == ["a-2.0", "a-2.1", "a-1.7", "b-2.2"]
    # It has no queries, so this is one sweep.
    plain = sweep("standard", 10, {0.001: (1.5,), 0.002: (1.4,)})
    plain[1].config["optim"]["query_lr"] = 1.0
    assert names(plain, "best") == ["standard-1.4"]
    words = r"rate 0.003; there are a with 0.001 and 0.002, b with 0.001 and 0.002$"
    with pytest.raises(UserError, match=words):
        at_rate(runs, 0.003)


def test_the_best_rates_are_told_with_their_seeds_and_whether_one_beyond_was_tried():
    """A rate may be the best by one lucky seed, or because the next was not tried."""
    runs = sweep("a", 10, {0.001: (2.0, 2.1), 0.002: (1.9,), 0.004: (2.4, 2.4)})
    runs += sweep("a", 20, {0.001: (1.8,), 0.002: (1.7,)})
    runs += sweep("b", 10, {0.001: (2.3,)}) + sweep("b", 20, {0.001: (1.9,), 0.002: (2.2,)})
    assert rates_by_budget(runs, operations).splitlines() == [
        "  a 0.002 at 1e+04 (1 of 2 seeds), 0.002 at 2e+04 (1 seed; the largest that was tried)",
        "  b 0.001 at 1e+04 (1 seed; no other was tried), "
        "0.001 at 2e+04 (1 seed; the smallest that was tried)",
    ]
    # Rates that diverged were tried.
    diverged = sweep("a", 20, {0.002: (0.0, 0.0), 0.004: (0.0,)})[1:]
    runs += [replace(run, summary=None) for run in diverged]
    assert "0.002 at 2e+04 (1 of 2 seeds)" in rates_by_budget(runs, operations)


def test_runs_on_different_text_or_windows_are_not_fitted_together():
    """The name of a text does not count if its hash is known."""
    first, same, changed, alone = (recorded("a", 10, 1000 * n, 1.0 / n) for n in (1, 2, 3, 4))
    texts = {"in/x": "1" * 64, "y": "1" * 64, "x": "2" * 64, "/of/x": None}
    for run, (source, digest) in zip((first, same, changed, alone), texts.items()):
        run.config["data"] = {"source": [source]}
        run.corpus.update({"source_hash": digest} if digest else {})
    assert len(points_of([first, same])["a"]) == len(points_of([first, alone])["a"]) == 2
    words = (
        r"a-1.0 \(x, 1{12}\) and a-0.33.* \(x, 2{12}\) have seen different text, .* by themselves$"
    )
    for runs in ([first, changed], [alone, first, changed]):  # the first does not know
        with pytest.raises(UserError, match=words):
            points_of(runs)
    with pytest.raises(UserError, match="different text"):
        points_of([same, alone])

    # Of a longer context the windows are others anyway.
    runs = [recorded("a", 10, 1000 * n, 1.0 / n) for n in (1, 2, 4)]
    for run, context, windows in zip(runs, (64, 128, 64), (8, 4, 4)):
        run.config["model"]["context"], run.config["train"]["eval_windows"] = context, windows
    assert len(points_of(runs[:2])["a"]) == 2
    with pytest.raises(
        UserError, match=r"a-1.0 ends with its loss on 8 windows .* and a-0.25 on 4"
    ):
        points_of(runs)


def test_settings_that_come_with_a_residual_are_named():
    """Beside the baseline's run of the same budget, and of the same seed where there is one."""
    plain, fair = [], []
    for size, seed in itertools.product((10, 20), (0, 1)):
        plain.append(recorded("standard", size, 1000, 1.0, seed, size * 1e-4))
        fair.append(recorded("a", size, 1000, 1.0, seed, size * 1e-4))
        plain[-1].config["optim"]["query_lr"], plain[-1].config["train"]["steps"] = 1.0, seed
    for run in (plain[1], fair[1]):
        run.config["train"]["init_from"] = "x"
    alike = {"standard": (), "a": ()}
    assert confounders_of(plain + fair, "standard") == alike
    size_by_itself = recorded("a", 40, 1000, 0.9, lr=1.0)
    assert confounders_of([*plain, *fair, size_by_itself], "standard") == alike
    unfair = recorded("b", 20, 1000, 0.9)
    assert confounders_of([*plain, *fair, unfair], "standard") == {**alike, "b": ("optim.lr",)}
    assert confounders_of([*plain, *fair, replace(unfair, summary=None)], "standard") == alike


def written(folder, name, curve=TRUE, lr=1e-3, **optim):
    """Write the folders of a residual's runs at every budget."""
    for size, c in enumerate(BUDGETS):
        run = recorded(name, c / 1000, 1000, curve.loss(c), lr=lr)
        run.config["optim"].update(optim)
        (folder / f"{name}-{lr}-{size}").mkdir(parents=True)
        write_json(folder / f"{name}-{lr}-{size}" / "config.json", run.config)
        write_json(folder / f"{name}-{lr}-{size}" / "summary.json", run.summary)


def test_from_folders_come_the_settings_that_share_in_what_each_residual_saves(tmp_path, capsys):
    """The rates are a line of their own where each residual has its best."""
    for name, optim in {"standard": {}, "rezero": {}, "ddl": {"clip": 2.0}, "laurel": {}}.items():
        written(tmp_path, name, lr=2e-3 if name == "rezero" else 1e-3, **{"clip": 1.0} | optim)
    for lr, words in (
        (None, "ddl in optim.clip; rezero in optim.lr"),
        ("best", "ddl in optim.clip"),
    ):
        found = {scaling.residual: scaling.confounders for scaling in scaling_of([tmp_path], lr=lr)}
        assert (found["rezero"], found["ddl"]) == (("optim.lr",), ("optim.clip",))
        assert found["standard"] == found["laurel"] == ()
        assert main(["scaling", str(tmp_path), *(["--lr", lr] if lr else [])]) == 0
        shown = capsys.readouterr().out
        assert f"explain a part of it too: {words}\n" in shown
        assert "Counted" not in shown
    names = ["ddl-0.001-2", "standard-0.001-1"]
    for name in names:
        extension = {"kind": "extend", "step": 4, "tokens": 8, "planned": 4, "steps": 8}
        append_rows(tmp_path / name, extension)
    assert main(["scaling", str(tmp_path)]) == 0
    line = "Counted, though they went on to other steps than planned, under no single schedule: "
    assert line + ", ".join(names) in capsys.readouterr().out.splitlines()


def test_from_folders_come_the_curves_of_the_rate_that_is_asked_for(tmp_path):
    floors = {0.001: 1.2, 0.002: 1.3}
    for lr, floor in floors.items():
        written(tmp_path / "runs", "standard", replace(TRUE, floor=floor), lr)
    with pytest.raises(UserError, match=r"There are standard with 0.001 and 0.002: choose one"):
        scaling_of([str(tmp_path)])
    for takes_folders in (scaling_of, write_report):
        with pytest.raises(UserError, match=f"folders takes a list; got '{tmp_path}': write"):
            takes_folders(str(tmp_path))
    for lr, floor in (("best", 1.2), (0.002, 1.3)):
        (scaling,) = scaling_of([str(tmp_path)], lr=lr)
        assert scaling.fit.floor == pytest.approx(floor, rel=0.01)


def test_the_table_has_intervals_and_verdicts_and_bad_input_is_named():
    points = {"standard": sampled(seeds=3), "same": sampled(seeds=3, seed=1)}
    text = table(compare_scaling(points, "standard", draws=100), "standard")
    assert "each by itself\nstandard: L = 1." in text
    assert "3 seeds at least" in text
    ratio = r"standard needs \d\.\d+ times the compute \(\d\.\d+ to \d\.\d+\)"
    assert re.search(rf"operations: {ratio}: no significant difference\n", text)
    with pytest.raises(UserError, match="three budgets at least, and got 2"):
        fit([1, 2, 2], [3.0, 2.0, 2.1])
    with pytest.raises(UserError, match=r"finished: take another; did you mean 'standard'\?"):
        compare_scaling(points, "standrad")
    with pytest.raises(UserError, match="'plain' has finished, nor has any other"):
        compare_scaling({}, "plain")


def test_a_curve_says_how_far_it_misses_its_budgets():
    """Means count, which seeds that differ do not move; three budgets test no curve."""
    off = dict(zip(BUDGETS, (0.0, 0.02, -0.05, 0.02, 0.0)))
    bent = {c: {s: TRUE.loss(c) + off[c] + 0.3 - 0.6 * s for s in range(2)} for c in BUDGETS}
    points = {
        "standard": bent,
        "three": {c: bent[c] for c in BUDGETS[::2]},
        "two": {1.0: {0: 2.0}, 2.0: {0: 1.0}},
        "steeper": {1e15: {0: 3.0}, 1e16: {0: 2.9}, 1e17: {0: 2.0}},  # no curve goes through it
    }
    scalings = compare_scaling(points, "standard", draws=20)
    distances = [abs(TRUE.loss(c) + off[c] - scalings[0].fit.loss(c)) for c in BUDGETS]
    assert scalings[0].miss == pytest.approx(max(distances))
    assert scalings[0].miss == pytest.approx(0.041, abs=0.01)
    assert scalings[1].miss < 1e-3
    assert scalings[2].miss is None
    assert scalings[3].miss > 0.2
    lines = table(scalings, "standard").splitlines()
    assert lines[2] == f"  at most {scalings[0].miss:.4f} from the mean of a budget"
    three = [line.split()[2] for line in lines if line.endswith("as a curve has three numbers")]
    assert three == [f"{scalings[i].miss:.4f}" for i in (1, 3)]


def test_curves_without_the_largest_and_the_smallest_budget_tell_what_hangs_on_them():
    """A residual that saves a fifth of the compute but for its last size, whose budgets differ."""
    better = {1.05 * c: {0: TRUE.loss(1.25 * c)} for c in BUDGETS}
    better[1.05e17] = {0: TRUE.loss(1e17)}
    short = {c: better[1.05 * c] for c in BUDGETS[2:]}
    points = {"standard": sampled(sigma=0, seeds=1), "better": better, "short": short}
    scalings = compare_scaling(points, "standard")
    last, first = without_ends(scalings, "standard").values()
    # Short has two
    assert [[*curve.points] for curve in last] == [BUDGETS[:-1], [*better][:-1]]
    assert [len(curve.points) for curve in first] == [4, 4, 3]
    ratios = [interval.value for interval in last[1].multipliers.values()]
    assert ratios == pytest.approx([1.25 / 1.05] * 4, rel=1e-3)
    assert first[1].multipliers[1e17].value < 1.1
    text = table(scalings, "standard")
    ratios = "1.19 at 1e+15, 1.19 at 3e+15, 1.19 at 1e+16, 1.19 at 3e+16\n"
    assert f"\nWithout 1e+17 operations:\n  better: {ratios}" in text
    assert "\nWithout 1e+15 operations:\n  better: " in text
    few = {
        name: {c: points[name][c] for c in [*points[name]][:3]} for name in ("standard", "better")
    }
    assert not without_ends(compare_scaling(few, "standard"), "standard")


def drawn_groups(svg):
    return ElementTree.fromstring(svg).findall(f"{SVG}g/{SVG}g")


def name_of(group):
    return group.find(f"{SVG}text[@class='named']").text


def across(svg):
    """Return the place of each line's first dot."""
    return {
        name_of(group): float(group.find(f"{SVG}circle").get("cx")) for group in drawn_groups(svg)
    }


def heights_of_names(svg):
    names = ElementTree.fromstring(svg).iterfind(f".//{SVG}text[@class='named']")
    return sorted(float(name.get("y")) for name in names)


def test_a_residual_with_too_few_budgets_is_left_out_and_said_to_be():
    points = {name: sampled(seed=i) for i, name in enumerate(("standard", "same", "short"))}
    two, one = ({c: points["short"][c] for c in BUDGETS[:count]} for count in (2, 1))
    scalings = compare_scaling({**points, "short": two}, "standard", draws=20)
    both = {name: points[name] for name in ("standard", "same")}
    assert scalings[:2] == compare_scaling(both, "standard", draws=20)
    text = table(scalings, "standard")
    assert "\nshort: left out, for it has runs at 2 budgets and a fit needs three" in text
    *curves, ratio = drawn_groups(plot(scalings, "standard"))
    by_name = {name_of(group): group for group in curves}
    assert by_name.keys() == {"standard", "same", "short, no fit"}
    assert name_of(ratio) == "same"
    bare = by_name["short, no fit"]
    assert len(bare.findall(f"{SVG}circle")) == 4
    assert not bare.find(f"{SVG}polyline").get("points")
    needs = r"needs runs of standard and of another residual at three budgets at least:"
    refused = {
        "standard has 2": {"standard": two},
        "same has 2, short has 1": {"same": two, "short": one},
    }
    for words, few in refused.items():
        with pytest.raises(UserError, match=f"{needs} {words}$"):
            compare_scaling(points | few, "standard")


def test_the_plot_has_a_dot_for_each_run_the_curves_and_what_each_saves_with_its_interval(tmp_path):
    points = {
        "standard": sampled(seeds=3),
        "attnres-block": sampled(seeds=3, seed=1, shift=1.25),
        "mine:<b>": sampled(seeds=3, seed=2),
    }
    scalings = compare_scaling(points, "standard", draws=100)
    curves, ratios = ElementTree.fromstring(plot(scalings, "standard")).findall(f"{SVG}g")
    assert len(curves.findall(f".//{SVG}circle")) == 3 * 5 * 3
    assert {name_of(group) for group in curves.findall(f"{SVG}g")} == set(points)
    groups = ratios.findall(f"{SVG}g")
    assert [group.get("class") for group in groups] == ["block", "other0"], "without the baseline"
    for group, scaling in zip(groups, scalings[1:], strict=True):
        heights = [float(dot.get("cy")) for dot in group.findall(f"{SVG}circle")]
        for height, span in zip(heights, group.findall(f"{SVG}path"), strict=True):
            low, high = re.fullmatch(r"M[\d.]+ ([\d.]+)V([\d.]+)", span.get("d")).groups()
            assert float(high) < height < float(low)
        values = [scaling.multipliers[c].value for c in BUDGETS]
        assert np.argsort(heights).tolist()[::-1] == np.argsort(values).tolist()
    file = tmp_path / "scaling.svg"
    for _ in range(2):
        assert write_plot(scalings, "standard", file) == file
    file.write_text("mine")
    with pytest.raises(UserError, match="is no picture of this kind, and would be overwritten"):
        write_plot(scalings, "standard", file)


def spanned(name, y):
    return Line(name, "plain", {1: [y], 2: [y]}, spans={1: (0, 3)})


def test_intervals_at_one_place_stand_side_by_side():
    bare = Line("c", "plain", {1: [3.0], 2: [3.0]})
    svg = picture([Panel("ratio", "operations", [spanned("a", 1.0), spanned("b", 2.0), bare])], "")
    dots = across(svg)
    assert (dots["a"] + dots["b"]) / 2 == dots["c"], "a line without intervals stays where it is"
    assert dots["b"] - dots["a"] == 5
    for group in drawn_groups(svg):
        x = dots[name_of(group)]
        assert group.find(f"{SVG}polyline").get("points").startswith(f"{x},")
        assert all(path.get("d").startswith(f"M{x} ") for path in group.findall(f"{SVG}path"))
    crowd = [spanned(name, 1.0) for name in "abcdefgh"]
    drawn = ElementTree.fromstring(picture([Panel("ratio", "operations", crowd)], ""))
    axis, places = (
        next(drawn.iter(f"{SVG}line")),
        [float(dot.get("cx")) for dot in drawn.iter(f"{SVG}circle")],
    )
    assert float(axis.get("x1")) < min(places) < max(places) < float(axis.get("x2"))


def test_names_beside_lines_neither_overlap_nor_leave_the_picture():
    points = {f"arm {n}": {1: [1.0], 2: [1.0 + n / 1000]} for n in range(6)}
    lines = lines_of(points | {"attnres-full": {1: [9.0], 2: [9.0]}})
    svg = picture([Panel("bits", "rate", lines)], "label")
    places = heights_of_names(svg)
    assert all(after - before >= 12.9 for before, after in itertools.pairwise(places))
    (full,) = (group for group in drawn_groups(svg) if group.get("class") == "full")
    end = full.find(f"{SVG}polyline").get("points").split(",")[-1]
    assert places[0] == pytest.approx(float(end) + 4), "beside its line"
    assert places[-1] <= FLOOR, "above the numbers across"
    crowd = lines_of({f"arm {n}": {1: [1.0], 2: [1.0]} for n in range(19)})
    places = heights_of_names(picture([Panel("bits", "rate", crowd)], "label"))
    assert TOP <= min(places) < max(places) < HIGH


def test_the_plot_of_one_seed_has_no_intervals_and_an_endless_interval_ends_at_its_edge():
    scalings = beside(sampled(sigma=0, seeds=1, shift=1.25), sampled(sigma=0, seeds=1))
    assert "stroke-opacity" not in plot(scalings, "standard")
    plots = []
    for high in (math.inf, 140.0):
        multipliers = {1e16: Interval(1.5, 1.2, high)}
        changed = [replace(scaling, multipliers=multipliers) for scaling in scalings]
        plots.append(plot(changed, "standard"))
    assert plots[0] == plots[1]
    (span,) = re.findall(r'd="M[\d.]+ ([\d.]+)V([\d.]+)"', plots[0])
    assert float(span[1]) == TOP
