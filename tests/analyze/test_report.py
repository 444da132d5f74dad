"""The words and numbers of the report's file; test_page.py tests it in a browser."""

import json
import os
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest
from runfolder import (
    RESIDUALS,
    append_rows,
    make_comparison,
    make_run,
    rewrite,
    words_of,
    write_json,
)

from headwater.analyze.curves import curves, draw_curves, draw_depth, smooth, thin
from headwater.analyze.report import write_report
from headwater.errors import UserError
from headwater.runs.groups import group_runs, telling
from headwater.runs.groups import words_of as words_of_setting
from headwater.runs.record import find_order, find_runs, read_run, read_runs

SMALL = {"layers": 1, "steps": 5}


def change(run: Path, section: str, **values) -> None:
    """Change settings of a run in a section of its configuration."""
    config = json.loads((run / "config.json").read_text())
    rewrite(run / "config.json", **{section: config[section] | values})


def arms(folder: Path, losses: dict[str, list[float]]) -> Path:
    """A comparison whose residuals end at given losses, seed by seed."""
    seeds = range(max(map(len, losses.values())))
    make_comparison(folder, list(losses), list(seeds), **SMALL)
    for number, values in enumerate(losses.values()):
        for seed, value in enumerate(values):
            rewrite(folder / "runs" / f"{number}-seed{seed}" / "summary.json", loss=value)
    return folder


def two(folder: Path, *residuals: str, seeds=(0, 1), **settings) -> Path:
    return make_comparison(folder, ["standard", *residuals], list(seeds), **SMALL | settings)


def read(*folders: Path) -> str:
    """The words of the report of these folders."""
    return words_of(write_report(folders))


def shifted(base: list[float], *shifts: float) -> list[float]:
    return [value + shift for value, shift in zip(base, shifts, strict=True)]


def test_a_page_replaces_a_page_and_nothing_else(tmp_path):
    run = make_run(tmp_path / "run", **SMALL)
    page = write_report([run])
    assert page == run / "report.html"
    assert write_report([run], tmp_path / "new" / "page.html").is_file()
    first = page.read_text()
    assert write_report([run]) == page  # a second time is fine
    content = (run / "config.json").read_text()
    with pytest.raises(UserError, match=r"config.json is no web page, and would be overwritten"):
        write_report([run], run / "config.json")
    assert (run / "config.json").read_text() == content
    precious = tmp_path / "precious.html"
    precious.write_text(first.replace("headwater", "mine"))
    content = precious.read_text()
    page.unlink()
    page.symlink_to(precious)
    write_report([run])
    assert precious.read_text() == content
    assert not page.is_symlink()
    assert not list(run.glob(".tmp*"))


def test_the_first_residual_of_a_comparison_is_the_baseline_and_gives_the_order(tmp_path):
    names = ["attnres-full", "rezero", "highway", "standard"]
    folder = make_comparison(tmp_path / "compare", names, [0], **SMALL)
    order = [*names[:2], names[3], names[2]]
    rewrite(folder / "compare.json", residuals=order)  # runs are found in another order
    extra = make_run(tmp_path / "extra", "mhc", 0, **SMALL)
    page = write_report([folder, extra], tmp_path / "r.html")
    rows = re.findall(r'<th scope="row"><i [^>]*></i><code>([^<]+)</code>', page.read_text())
    assert rows == [*order, "mhc"] * 2  # of results and of measures
    assert re.search(r"rezero reaches .* attnres-full", words_of(page))


@pytest.mark.parametrize("residuals", [["standard", "rezero"], ["mhc", "rezero"]])
def test_the_baseline_is_grey_and_others_have_colours_in_their_order(tmp_path, residuals):
    """The neutral colour is the baseline's alone; runs without one begin with the first hue."""
    for residual in residuals:
        make_run(tmp_path / "runs" / residual, residual, **SMALL)
    page = write_report([tmp_path]).read_text()
    colours = re.findall(r'<i class="key (c\d)[^"]*"></i><code>(\w+)', page)
    first = 0 if "standard" in residuals else 1
    assert colours[:2] == [(f"c{first}", residuals[0]), (f"c{first + 1}", residuals[1])]


def test_the_headline_has_bits_per_byte_where_they_are_known(tmp_path):
    folder = two(tmp_path / "compare", "rezero")
    for index, losses in enumerate(((2.0, 2.2), (1.9, 2.2))):
        for seed, loss in enumerate(losses):
            path = folder / f"runs/{index}-seed{seed}/summary.json"
            rewrite(path, loss=loss, bits_per_byte=1.5 * loss)
    words = read(folder)
    assert (
        "rezero reaches a loss of 2.0500 nats per token, 0.0500 below standard: no significant"
        in words
    )
    assert "over 2 seeds). In bits per byte: 3.0750, 0.0750 below." in words
    rewrite(folder / "runs/0-seed1/summary.json", bits_per_byte=None)
    assert "bits per byte:" not in read(folder).lower(), "of other runs than the nats"


def test_table_holds_mean_spread_and_paired_difference(comparison, written):
    losses = {}
    for folder in sorted((comparison / "runs").iterdir()):
        summary = json.loads((folder / "summary.json").read_text())
        losses.setdefault(summary["residual"], []).append(summary["loss"])
    words = words_of(written)
    for values in losses.values():
        assert f"{fmean(values):.4f} ± {stdev(values):.4f}" in words
    difference = fmean(losses["attnres-full"]) - fmean(losses["standard"])
    assert f"−{-difference:.4f} significant (95 %)" in words
    assert "9 of 9 finished, one at a time" in words


# Five per cent of t with one and two degrees of freedom: 12.706 and 4.303.
@pytest.mark.parametrize(
    ("shifts", "verdict", "evidence"),
    [
        ((-0.03, -0.031, -0.029), "significant", "−0.0325 to −0.0275, over 3 seeds"),
        ((0.03, 0.031, 0.029), "significant", "+0.0275 to +0.0325, over 3 seeds"),
        ((-0.03, -0.05, -0.02), "no significant difference", "−0.0713 to +0.0046, over 3 seeds"),
        ((-0.03, -0.04), "no significant difference", "−0.0985 to +0.0285, over 2 seeds"),
        ((-0.03,), "one seed", ""),
    ],
)
def test_a_difference_is_judged_by_its_paired_interval(tmp_path, shifts, verdict, evidence):
    base = [2.0 + seed for seed, _ in enumerate(shifts)]  # seeds far apart: only pairs can tell
    losses = {"standard": base, "attnres-full": shifted(base, *shifts)}
    words = read(arms(tmp_path / "c", losses))
    side = "below" if fmean(shifts) < 0 else "above"
    finding = f"{abs(fmean(shifts)):.4f} {side} standard: {verdict} (95 % interval {evidence})."
    if not evidence:
        finding = "0.0300 below standard, on one seed: that may be chance."
    assert finding in words
    cell = (
        verdict.replace("significant", r"significant \(95 %\)") if len(verdict) == 11 else verdict
    )
    row = rf"attnres-full {len(shifts)} seeds? [\d.± ]+ (lowest )?[+−][\d.]+ {cell} "
    assert re.search(row, words)


def test_few_seeds_say_what_they_can_tell(tmp_path):
    one_seed = {"standard": [2.0], "rezero": [1.9]}
    words = read(arms(tmp_path / "one", one_seed))
    assert "it shows that a residual trains, but no difference can be significant" in words
    assert "95 % interval" not in words
    two_seeds = {"standard": [2.0, 2.1], "rezero": [1.9, 2.05], "highway": [2.0, 2.2]}
    words = read(arms(tmp_path / "two", two_seeds))
    limit = "With 2 seeds and 2 residuals, a difference is significant if it exceeds 18 times"
    assert words.count(limit) == 1
    assert "(Student's t) that hold for all 2 residuals at once (Bonferroni)" in words


def test_many_residuals_widen_every_interval(tmp_path):
    """Alone this difference is significant; among nineteen like it, one would be by chance."""
    losses = {"standard": [2.0, 2.1, 2.2], "rezero": [1.97, 2.065, 2.174]}
    assert ": significant (95" in read(arms(tmp_path / "alone", losses))
    losses |= {f"attnres-full:window={n}": [2.01, 2.12, 2.19] for n in range(2, 20)}
    many = read(arms(tmp_path / "many", losses))
    assert "19 residuals against standard: 19 without a significant difference." in many
    assert "significant (95" not in many


def test_lowest_is_said_only_where_every_pair_differs_significantly(tmp_path):
    base, near = [2.0, 3.0, 4.0], (-0.1, -0.101, -0.099)
    cases = {
        "clear": (near, (-0.05, -0.051, -0.049)),
        # Both are below the baseline, but which of the two is lower is left open.
        "close": (near, (-0.101, -0.099, -0.1)),
        # Below the baseline by t = 7.56: significant (4.30) alone, not (7.65) as one of three.
        "chosen": ((-0.03, -0.038, -0.024), (1, 1.001, 0.999)),
        "noise": ((0.01, -0.03, 0.01), (1, 1, 1)),
    }
    for name, (rezero, highway) in cases.items():
        losses = {"standard": base}
        losses |= {"rezero": shifted(base, *rezero), "highway": shifted(base, *highway)}
        page = write_report([arms(tmp_path / name, losses)]).read_text()
        assert page.count('class="best"') == (name == "clear"), name
        assert ("<small>lowest</small>" in page) == (name == "clear")
    one_seed = arms(tmp_path / "one", {"standard": [2.0], "rezero": [1.0]})
    assert 'class="best"' not in write_report([one_seed]).read_text()


def test_the_first_lines_name_the_lowest_of_many(tmp_path):
    ends = {"standard": 2.0, "rezero": 2.3, "highway": 1.7, "mhc": 2.2}
    ends |= {"laurel": 1.9, "ddl": 1.8, "deepnorm": 2.4}
    losses = {name: [end, end + 0.01] for name, end in ends.items()}
    words = read(arms(tmp_path / "c", losses))
    assert re.findall(r"(\w+) reaches", words) == ["highway", "ddl", "laurel"]
    counts = "3 significantly lower and 3 significantly higher. The lowest three:"
    assert f"6 residuals against standard: {counts}" in words


def test_the_first_lines_of_several_sizes_name_the_lowest_differences(tmp_path):
    """The lowest losses would be those of the largest models."""
    for layers in (1, 2, 3):
        base = 4.0 - layers
        losses = {"standard": base, "rezero": base, "highway": base + layers / 100}
        losses["rezero"] -= 0.1 * (layers == 1)
        for residual, loss in losses.items():
            folder = tmp_path / "runs" / f"{residual}-{layers}"
            run = make_run(folder, residual, layers=layers, steps=5)
            rewrite(run / "summary.json", loss=loss)
    page = write_report([tmp_path])
    assert "<title>9 variants" in page.read_text()
    words = words_of(page)
    assert "6 variants against standard at the same settings: 6 with one seed." in words
    assert (
        "The three with the lowest difference: rezero, layers 1 reaches a loss of 2.9000" in words
    )
    lowest = [("rezero", "1"), ("rezero", "2"), ("rezero", "3")]
    assert re.findall(r"(\w+), layers (\d) reaches", words) == lowest
    assert f"headwater study RECIPE --out {tmp_path.name}-again" in words


def test_variants_of_several_sizes_are_judged_together(tmp_path):
    for layers in (1, 2, 3):
        two(tmp_path / f"layers-{layers}", "rezero", layers=layers)
    words = read(*sorted(tmp_path.iterdir()))
    assert "With 2 seeds and 3 variants, a difference" in words
    assert "that hold for all 3 variants at once" in words
    assert "Seeds 2 per variant " in words


def test_a_baseline_without_rivals_has_a_page(tmp_path):
    """A study of learning rates leaves such runs."""
    for lr in (0.001, 0.01):
        make_run(tmp_path / "runs" / f"lr-{lr}", lr=lr, **SMALL)
    title = "<title>standard, lr 0.001 and standard, lr 0.01"
    assert title in write_report([tmp_path]).read_text()


def test_the_sizes_of_a_study_stand_side_by_side(tmp_path):
    for layers, dim in enumerate((8, 8, 16), 1):
        run = make_run(tmp_path / "runs" / f"layers-{layers}", layers=layers, dim=dim, steps=5)
        write_json(run / "launch.json", {"corpus": {"source_hash": "0123456789abcdef"}})
    words = read(tmp_path)
    assert "Model 1 × 8, 2 × 8, 3 × 16 (layers × width) Corpus" in words
    assert "Corpus stdlib, bytes tokens, 0123456789ab Training" in words
    change(tmp_path / "runs" / "layers-1", "model", pattern="kda", experts=4)
    assert "(layers × width), kda, 4 experts or attention Corpus" in read(tmp_path)


def test_a_time_that_an_archive_has_dropped_is_not_shown(tmp_path):
    run = make_run(tmp_path / "run", **SMALL)
    assert "Last written" in read(run)
    for path in run.rglob("*"):
        os.utime(path, (0, 0))
    assert "Last written" not in read(run)


def numbers(pattern: str, text: str) -> list[float]:
    return [float(value) for value in re.findall(pattern, text)]


def test_seeds_and_intervals_are_drawn_on_one_scale(tmp_path):
    losses = {"standard": [2.0, 2.0, 2.0], "rezero": [1.9, 1.92, 1.94], "highway": [2.1, 2.0, 2.05]}
    page = write_report([arms(tmp_path / "c", losses)]).read_text()
    strips = re.findall(r'<svg class="strip c.*?</svg>', page)
    zeros = {zero for strip in strips for zero in numbers(r'class="zero" x1="([\d.]+)"', strip)}
    (zero,) = zeros
    no_seeds, lower, around = (numbers(r'class="seed" cx="([\d.]+)"', strip) for strip in strips)
    assert no_seeds == []
    assert all(x < zero for x in lower)
    # Evenly apart, as the losses; a tenth below, a tenth above
    steps = around[0] - around[2], around[2] - around[1]
    assert steps[0] == pytest.approx(steps[1], abs=0.11)
    assert zero - lower[0] == pytest.approx(around[0] - zero, abs=0.11)
    assert "Differences by seed −0.1000, −0.0800, −0.0600; 95 % interval" in strips[1]


def test_an_interval_that_would_hide_the_seeds_ends_in_an_arrow(tmp_path):
    losses = {"standard": [2.0, 2.0], "rezero": [1.9, 1.96]}
    page = write_report([arms(tmp_path / "c", losses)]).read_text()
    (strip,) = re.findall(r'<svg class="strip c1.*?</svg>', page)
    ends = re.search(r'class="interval" x1="([\d.]+)" x2="([\d.]+)"', strip).groups()
    assert 0 < float(ends[0]) < float(ends[1]) < 190
    assert len(re.findall(r"M[\d.]+,[\d.]+l", strip)) == 2  # both ends go on
    first, second = numbers(r'class="seed" cx="([\d.]+)"', strip)
    assert second - first > 10


ALONE, SHARED = (
    "Runs were made one at a time.",
    "Wall-clock is not compared: up to 2 runs were made",
)
UNKNOWN = "Wall-clock is not compared: how many runs were made side by side is unknown."


@pytest.mark.parametrize(
    ("jobs", "words", "compared"),
    [(1, ALONE, True), (2, SHARED, False), (None, UNKNOWN, False)],
)
def test_wall_clock_is_compared_only_where_runs_had_the_machine_alone(
    tmp_path, jobs, words, compared
):
    folder = two(tmp_path / "c", "attnres-full", "rezero", jobs=jobs, steps=100)
    page = read(folder)
    assert words in page
    assert page.count("× 1.10") == 2 * compared  # 21 s against 19 s
    write_json(folder / "runs" / "2-seed1" / "launch.json", {"side_by_side": 2})
    if compared:  # of Full's row, not of ReZero's
        page = read(folder)
        assert page.count("× 1.10") == 1
        assert "Wall-clock is compared only where the runs of both were made one at a time." in page


def test_where_the_numbers_come_from_is_said(tmp_path, monkeypatch):
    folder = two(tmp_path / "my runs", "attnres-full:window=2", layers=2, steps=20)
    words = read(folder)
    for fact in (
        "2 layers, width 192",
        "stdlib, bytes tokens, 7d69e0bf02c6",
        "20 steps of 16 × 256 tokens",
        "adamw, learning rate 0.001, cosine",
        "headwater 0.1.0, torch 2.10.0",
        "headwater compare --config 'my runs/settings.json' --residuals standard "
        "attnres-full:window=2 --seeds 0 1 --out 'my runs-again'",
        "train.batch_size 16",
    ):
        assert fact in words, fact
    alone = make_run(tmp_path / "alone", **SMALL)
    command = "headwater train --config {0}/config.json --out {0}-again"
    assert command.format("alone") in read(alone)
    monkeypatch.chdir(tmp_path.parent)
    below = Path(tmp_path.name, "alone")
    assert command.format(below) in read(below), "as it was asked for"
    monkeypatch.chdir(tmp_path / "my runs")
    for elsewhere in (Path("../alone"), Path("../my runs/../alone")):
        assert command.format("alone") in read(elsewhere)
    assert "--plugin" not in words


def test_the_command_that_makes_a_page_again_imports_what_its_residuals_are_in(tmp_path):
    plugged_in = "leaky@my.residuals:start=0.5"
    folder = two(tmp_path / "c", plugged_in)
    rewrite(folder / "compare.json", residuals=["standard", "leaky:start=0.5"])
    assert "leaky:start=0.5 --seeds 0 1 --out c-again --plugin my.residuals " in read(folder)
    make_run(tmp_path / "study" / "runs" / "one", plugged_in, **SMALL)
    command = "headwater study RECIPE --out study-again --plugin my.residuals "
    assert command in read(tmp_path / "study")
    # A command is not put together from what is no module.
    run = make_run(tmp_path / "made-up", "leaky@rm -r;x", **SMALL)
    assert "--out made-up-again data" in read(run)


@pytest.mark.parametrize(
    ("saved", "vocabulary", "words"),
    [
        ({"type": "bytes"}, 4096, "bytes tokens"),  # a model of a size with a larger vocabulary
        ({"model": {"type": "BPE"}}, 4096, "bpe tokens, a vocabulary of 4,096"),
        (None, 320, "bytes tokens"),
        (None, 4096, "a vocabulary of 4,096"),
    ],
)
def test_tokens_that_were_made_before_are_not_called_by_the_settings_default(
    tmp_path, saved, vocabulary, words
):
    """A folder of tokens has a tokenizer of its own; an archive of runs may have dropped it."""
    run = make_run(tmp_path / "run", **SMALL)
    change(run, "data", source=["data/study"])
    change(run, "model", vocab_size=vocabulary)
    (run / "tokenizer.json").unlink()
    if saved is not None:
        write_json(run / "tokenizer.json", saved)
    assert f"Corpus study, {words} Training" in read(run)


def test_a_run_that_stopped_is_not_just_unfinished(tmp_path):
    folder = two(tmp_path / "c", "rezero")
    first, second = (folder / "runs" / f"1-seed{seed}" for seed in (0, 1))
    (second / "summary.json").unlink()
    append_rows(second, {"kind": "skip", "step": 6, "reason": "nonfinite", "loss": None})
    words = read(folder)
    stop = "1-seed{}: stopped at step {}: the loss or the gradient was not finite; {}"
    assert stop.format(1, 6, "the table counts only finished runs.") in words
    assert "rezero 1 seed, 1 stopped" in words
    assert "1 step was left out of training (1 not finite), at step 6" in words
    assert "unreadable" not in words
    assert "nfinished" not in words
    # A run that stopped before its first evaluation has no_seeds to show.
    (first / "summary.json").unlink()
    (first / "metrics.jsonl").unlink()
    append_rows(first, {"kind": "skip", "step": 1, "reason": "nonfinite", "loss": None})
    (second / "metrics.jsonl").unlink()
    words = read(folder)
    assert stop.format(0, 1, "it was never evaluated.") in words
    assert "Tokens 20.5 k per run" in words


def test_labels_say_what_tells_groups_apart_and_no_more():
    """Heads go with the width; what is left are rates, which must not be cut off."""
    settings = []
    for dim, heads in (("8", "1"), ("16", "2")):
        for lr in ("0.1", "0.2"):
            shape = {"model.dim": dim, "model.heads": heads, "model.window": "None"}
            settings.append(shape | {"optim.lr": lr})
    assert telling(settings) == ["model.dim", "optim.lr"]
    others = [{"a": "1", "b": b, "c": c} for b, c in ("11", "12", "21")]
    assert telling(others) == ["b", "c"]
    assert telling(settings[:1]) == []
    words = [words_of_setting(key, settings[0]) for key in ("model.window", "optim.lr")]
    assert words == ["no window", "lr 0.1"]


def test_runs_with_other_settings_are_groups_of_their_own(tmp_path):
    for lr in (0.001, 0.002):
        make_run(tmp_path / f"lr{lr}", "attnres-full", lr=lr, **SMALL)
    labels = [group.label for group in group_runs(read_runs([tmp_path]))]
    assert labels == ["attnres-full, lr 0.001", "attnres-full, lr 0.002"]
    assert "Settings differ beyond the residual: optim.lr." in read(tmp_path)
    # A run that goes on without a bad step stays with its seeds.
    folder = two(tmp_path / "c", "rezero")
    change(folder / "runs" / "1-seed1", "train", skip_nonfinite=1)
    groups = group_runs(read_runs([folder]))
    assert [len(group.runs) for group in groups] == [2, 2]


@pytest.mark.parametrize(
    ("section", "setting", "value", "judged"),
    [
        ("optim", "query_lr", 0.1, True),  # the plain residual has no queries
        ("train", "compile", "model", True),
        ("model", "depth_start", False, False),
        ("optim", "lr", 0.1, False),
    ],
)
def test_settings_that_a_baseline_does_not_feel_do_not_part_an_arm_from_it(
    tmp_path, section, setting, value, judged
):
    folders = [make_run(tmp_path / residual, residual) for residual in ("standard", "attnres-full")]
    change(folders[1], section, **{setting: value})
    _, arm = group_runs(read_runs(folders))
    assert (arm.difference() is not None) == judged
    # Queries feel their rate.
    _, plain = group_runs(read_runs(folders), order=("attnres-full",))
    assert (plain.difference() is not None) == (judged and setting != "query_lr")


def test_an_arm_with_a_switch_of_the_model_is_judged_against_the_baseline(tmp_path):
    folder = two(tmp_path / "c", "depth-window")
    arm = "standard+shortswa=4"
    for seed in (0, 1):
        run = make_run(folder / "runs" / f"switched-seed{seed}", "standard", seed, **SMALL)
        change(run, "model", shortswa=4)
        write_json(run / "launch.json", {"side_by_side": 1, "arm": arm})
    rewrite(folder / "compare.json", residuals=["standard", arm, "depth-window"])
    groups = group_runs(read_runs([folder]), find_order([folder]))
    assert [group.label for group in groups] == ["standard", arm, "depth-window"]
    assert groups[1].baseline is groups[0]
    assert len(groups[1].difference().values) == 2
    words = read(folder)
    assert f"{arm} and depth-window against standard" in words
    assert f"--residuals standard {arm} depth-window" in words
    # What the arm does not name still keeps groups apart.
    rewrite(run / "config.json", optim={"lr": 1})
    runs = [read_run(run), *groups[0].runs]
    assert group_runs(runs)[-1].baseline is None


def test_a_seed_twice_is_one_draw(tmp_path):
    """Two of one seed say nothing of the noise of seeds.

    The last counts, in means, pairs, curves and maps alike.
    """
    folder = two(tmp_path / "c", "attnres-full")
    words = read(folder, folder / "runs" / "0-seed0")
    assert "4 of 4 finished" in words
    again = make_run(tmp_path / "again", "attnres-full", 1, **SMALL)
    rewrite(again / "summary.json", loss=9.0)
    rewrite(again / "config.json", log={"tensorboard": True})
    _, twice = group_runs(read_runs([folder, again]))
    first, _, last = twice.runs
    assert twice.results == [first, last]
    assert twice.label == "attnres-full"
    mean = (first.final("loss") + 9.0) / 2
    assert twice.final("loss").mean == pytest.approx(mean)
    assert draw_depth(twice, 1, 4)["seeds"] == 2
    last.evals[-1]["loss"] = 9.0
    chart = draw_curves(twice, "eval", 9)
    mean = (first.evals[-1]["loss"] + 9.0) / 2
    assert chart["mean"]["y"][-1] == pytest.approx(mean, abs=1e-4)
    assert len(chart["runs"]) == 3
    words = read(folder, again)
    assert "1-seed1: again has its settings and its seed, and is the one that counts." in words
    assert "Seeds 2 per residual" in words
    assert "3 seeds" not in words


def test_a_row_speaks_of_its_longest_run_and_unequal_tokens_are_said(tmp_path):
    folder = two(tmp_path / "c", "attnres-full", seeds=(3, 5), steps=10)
    rewrite(folder / "runs" / "1-seed5" / "summary.json", tokens=999_000)
    base, other = group_runs([read_run(run) for run in find_runs([folder])])
    assert (base.tokens(), other.tokens()) == (10 * 4096, 999_000)
    assert "not a fair comparison" in read(folder)
    # Differences are drawn seed by seed.
    data = curves(other, "difference")
    assert len(data) == 2
    for position, points in data.items():
        run = other.runs[position]
        (rival,) = (plain for plain in base.runs if plain.seed == run.seed)
        pairs = zip(run.evals, rival.evals, strict=True)
        expected = [row["loss"] - plain["loss"] for row, plain in pairs]
        assert [value for _, _, value in points] == pytest.approx(expected)


def test_smoothing_keeps_gaps_and_thinning_keeps_ends():
    curve = [(i, float(i), float(i)) for i in range(400)]
    curve[50] = (50, 50.0, None)
    smoothed = smooth(curve)
    assert smoothed[50][2] is None
    assert smoothed[0][2] == 0.0
    # The average of a straight line around its middle
    assert smoothed[200][2] == pytest.approx(200.0)
    near = [i for i in range(45, 66) if i != 50]  # ten on each side, the missing one left out
    assert smoothed[55][2] == pytest.approx(sum(near) / 20)
    first, *between, last = thin(curve, 7)
    assert (first, len(between), last) == (curve[0], 5, curve[-1])


def test_not_a_run_is_one_clear_error(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"dim": 8}')
    (tmp_path / "empty").mkdir()
    for folder in ("absent", "empty", "model"):
        with pytest.raises(UserError, match=rf"{folder}.* is not a run.*metrics.jsonl"):
            write_report([tmp_path / folder])
    with pytest.raises(UserError, match="at least one folder"):
        write_report([])


def test_large_comparison_stays_small_and_says_it_is_thinned(tmp_path):
    size = {"layers": 24, "steps": 2000, "records": 25}
    page = write_report([make_comparison(tmp_path / "c", RESIDUALS, [0, 1, 2], **size)])
    assert page.stat().st_size < 2_000_000
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text()).group(1))
    lengths = []
    for group in data["groups"]:
        lengths += [len(run["y"]) for run in group["curves"]["train"]["runs"]]
    assert max(lengths) == data["points"] < 2000
    assert len(data["groups"][0]["depth"]["frames"]) < 25
