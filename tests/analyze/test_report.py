"""What the report says, read from its file; test_page.py has how it behaves in a browser."""

import html
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from runfolder import make_comparison, make_run, write_json

from headwater.analyze import report
from headwater.analyze.curves import curves, draw_curves, draw_depth, smooth, thin
from headwater.analyze.matrix import write_matrix
from headwater.analyze.report import make_page, write_report
from headwater.errors import UserError
from headwater.runs.groups import group_runs, telling, words_of
from headwater.runs.record import find_order, find_runs, read_run, read_runs


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def visible(page: str) -> str:
    """The words of a page: without scripts, styles and tags, each space a plain one."""
    bare = re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S))
    return " ".join(html.unescape(bare).split())


def arms(folder: Path, losses: dict[str, list[float]], **settings) -> Path:
    """A comparison whose residuals end at given losses, seed by seed."""
    seeds = list(range(max(map(len, losses.values()))))
    make_comparison(folder, list(losses), seeds, **({"layers": 1, "steps": 5} | settings))
    for number, values in enumerate(losses.values()):
        for seed, value in enumerate(values):
            rewrite(folder / "runs" / f"{number}-seed{seed}" / "summary.json", loss=value)
    return folder


def said_of(folder: Path) -> str:
    return visible(write_report([folder]).read_text())


def test_lands_in_the_folder_or_where_asked(comparison, tmp_path):
    assert write_report([comparison]) == comparison / "report.html"
    assert write_report([comparison], tmp_path / "new" / "page.html").is_file()


@pytest.mark.parametrize("write", [write_report, write_matrix])
def test_a_page_replaces_a_page_and_nothing_else(tmp_path, write):
    run = make_run(tmp_path / "run", layers=1, steps=5)
    page = write([run])
    first = page.read_text()
    assert write([run]) == page  # a second time is fine
    held = (run / "config.json").read_text()
    with pytest.raises(
        UserError,
        match=r"config.json is no web page, and would be overwritten: choose another out",
    ):
        write([run], run / "config.json")
    assert (run / "config.json").read_text() == held
    (tmp_path / "precious.html").write_text(first.replace("headwater", "mine"))
    precious = (tmp_path / "precious.html").read_text()
    page.unlink()
    page.symlink_to(tmp_path / "precious.html")
    write([run])
    assert (tmp_path / "precious.html").read_text() == precious
    assert not page.is_symlink()
    assert [path.name for path in run.iterdir() if path.name.startswith(".tmp")] == []


def test_the_first_residual_of_a_comparison_is_the_baseline(tmp_path):
    folder = make_comparison(
        tmp_path / "compare", ["attnres-full", "rezero"], [0, 1], layers=2, steps=20
    )
    words = visible(write_report([folder]).read_text())
    assert "rezero against attnres-full" in words
    assert re.search(r"rezero ends at .* attnres-full", words)


def test_the_headline_has_bits_per_byte_where_they_are_known(tmp_path):
    folder = make_comparison(
        tmp_path / "compare", ["standard", "rezero"], [0, 1], layers=2, steps=20
    )
    ends = {0: (2.0, 1.9), 1: (2.2, 2.2)}  # of both residuals, with each seed
    for index in (0, 1):
        for seed, losses in ends.items():
            path = folder / f"runs/{index}-seed{seed}/summary.json"
            rewrite(path, loss=losses[index], bits_per_byte=1.5 * losses[index])
    words = visible(write_report([folder]).read_text())
    assert "rezero ends at 2.0500 nats per token, 0.0500 below standard (95 % interval" in words
    assert "not told apart. In bits per byte: 3.0750, 0.0750 below." in words
    rewrite(folder / "runs/0-seed1/summary.json", bits_per_byte=None)
    assert "bits per byte:" not in visible(write_report([folder]).read_text()).lower(), (
        "of other runs than the nats"
    )


def test_rows_stand_in_the_order_of_the_comparison(tmp_path):
    named = ["standard", "rezero", "highway", "attnres-full"]
    folder = make_comparison(tmp_path / "compare", named, [0], layers=1, steps=5)
    order = [*named[:2], named[3], named[2]]
    rewrite(folder / "compare.json", residuals=order)  # runs are found in another order
    extra = make_run(tmp_path / "extra", "mhc", 0, layers=1, steps=5)
    page = write_report([folder, extra], tmp_path / "r.html").read_text()
    assert re.findall(r'<th scope="row"><i [^>]*></i><code>([^<]+)</code>', page) == [*order, "mhc"]


def test_table_holds_mean_spread_and_paired_difference(comparison, written):
    losses = {}
    for folder in sorted((comparison / "runs").iterdir()):
        summary = json.loads((folder / "summary.json").read_text())
        losses.setdefault(summary["residual"], []).append(summary["loss"])
    words = visible(written.read_text())
    for values in losses.values():
        assert f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}" in words
    paired = [a - b for a, b in zip(losses["attnres-full"], losses["standard"])]
    assert f"−{-statistics.fmean(paired):.4f} lower" in words
    assert "9 of 9 finished, one at a time" in words


# Five per cent of t with one and two degrees of freedom: 12.706 and 4.303; of two comparisons, 25.452 and 6.205.
@pytest.mark.parametrize(
    ("shifts", "said"),
    [
        (
            (-0.03, -0.031, -0.029),
            "0.0300 below standard (95 % interval −0.0325 to −0.0275, over 3 seeds): lower.",
        ),
        (
            (0.03, 0.031, 0.029),
            "0.0300 above standard (95 % interval +0.0275 to +0.0325, over 3 seeds): higher.",
        ),
        (
            (-0.03, -0.05, -0.02),
            "0.0333 below standard (95 % interval −0.0713 to +0.0046, over 3 seeds): not told",
        ),
        (
            (-0.03, -0.04),
            "0.0350 below standard (95 % interval −0.0985 to +0.0285, over 2 seeds): not told apart.",
        ),
        ((-0.03,), "0.0300 below standard, on one seed: that may be chance."),
    ],
)
def test_a_difference_is_judged_by_its_paired_interval(tmp_path, shifts, said):
    base = [2.0 + seed for seed, _ in enumerate(shifts)]  # seeds far apart: only pairs can tell
    folder = arms(
        tmp_path / "c", {"standard": base, "attnres-full": [b + s for b, s in zip(base, shifts)]}
    )
    words = said_of(folder)
    assert said in words
    verdict = {"lower.": "lower", "higher.": "higher", "chance.": "one seed"}.get(
        said.split()[-1], "not told apart"
    )
    assert re.search(
        rf"attnres-full {len(shifts)} seeds? [\d.± ]+ (lowest )?[+−][\d.]+ {verdict} ", words
    )


def test_few_seeds_say_what_they_can_tell(tmp_path):
    one = said_of(arms(tmp_path / "one", {"standard": [2.0], "rezero": [1.9]}))
    assert "it shows that a residual trains, and cannot tell any difference from chance" in one
    assert "95 % interval" not in one
    two = said_of(
        arms(
            tmp_path / "two", {"standard": [2.0, 2.1], "rezero": [1.9, 2.05], "highway": [2.0, 2.2]}
        )
    )
    assert (
        two.count(
            "With 2 seeds and 2 residuals, a difference is told from chance when it exceeds 18 times"
        )
        == 1
    )
    assert "95 % intervals (Student's t) that hold for all 2 residuals at once (Bonferroni)" in two


def test_many_residuals_widen_every_interval(tmp_path):
    """Alone this difference is told; among nineteen like it, one would be by chance."""
    base, rival = [2.0, 2.1, 2.2], [1.97, 2.065, 2.174]
    alone = said_of(arms(tmp_path / "alone", {"standard": base, "rezero": rival}))
    assert ": lower." in alone
    others = {f"attnres-full:window={n}": [2.01, 2.12, 2.19] for n in range(2, 20)}
    many = said_of(arms(tmp_path / "many", {"standard": base, "rezero": rival} | others))
    assert "Of 19 residuals against standard, 19 are not told apart." in many
    assert "lower" not in many


def test_lowest_is_said_only_where_every_pair_is_told_apart(tmp_path):
    base = [2.0, 3.0, 4.0]

    def shifted(*shifts):
        return [value + shift for value, shift in zip(base, shifts)]

    clear = {
        "standard": base,
        "rezero": shifted(-0.1, -0.101, -0.099),
        "highway": shifted(-0.05, -0.051, -0.049),
    }
    page = write_report([arms(tmp_path / "clear", clear)]).read_text()
    assert page.count('class="best"') == 1
    assert "lowest" in visible(page.split('class="best"')[1][:80])
    # Both are below the baseline, but which of the two is lower is left open.
    close = clear | {"highway": shifted(-0.101, -0.099, -0.1)}
    assert 'class="best"' not in write_report([arms(tmp_path / "close", close)]).read_text()
    # Below the baseline by t = 7.56: told (4.30) if that were the only pair, not (7.65) as one of three.
    chosen = {
        "standard": base,
        "rezero": shifted(-0.03, -0.038, -0.024),
        "highway": shifted(1, 1.001, 0.999),
    }
    assert 'class="best"' not in write_report([arms(tmp_path / "chosen", chosen)]).read_text()
    noise = {"standard": base, "rezero": shifted(0.01, -0.03, 0.01)}
    assert 'class="best"' not in write_report([arms(tmp_path / "noise", noise)]).read_text()
    assert (
        'class="best"'
        not in write_report(
            [arms(tmp_path / "one", {"standard": [2.0], "rezero": [1.0]})]
        ).read_text()
    )


def test_the_first_lines_name_the_lowest_of_many(tmp_path):
    ends = {
        "standard": 2.0,
        "rezero": 2.3,
        "highway": 1.7,
        "mhc": 2.2,
        "laurel": 1.9,
        "ddl": 1.8,
        "deepnorm": 2.4,
    }
    words = said_of(
        arms(tmp_path / "c", {name: [value, value + 0.01] for name, value in ends.items()})
    )
    assert words.count(" ends at ") == 3
    assert re.findall(r"(\w+) ends at", words) == ["highway", "ddl", "laurel"]
    assert (
        "Of 6 residuals against standard, 3 end lower and 3 end higher. The lowest three:" in words
    )
    ends |= {"rezero": 1.6, "mhc": 1.65}
    words = said_of(
        arms(tmp_path / "one", {name: [value, value + 0.01] for name, value in ends.items()})
    )
    assert "5 end lower and 1 ends higher." in words


def test_a_baseline_without_rivals_has_a_page(tmp_path):
    """As a study of learning rates leaves it."""
    for lr in (0.001, 0.01):
        make_run(tmp_path / "runs" / f"lr-{lr}", layers=1, steps=5, lr=lr)
    assert "<title>standard, lr 0.001 and standard, lr 0.01" in write_report([tmp_path]).read_text()


def test_the_first_lines_of_several_sizes_name_the_lowest_differences(tmp_path):
    """The lowest losses would be those of the largest models."""
    for layers, base in ((1, 3.0), (2, 2.0), (3, 1.0)):
        losses = {
            "standard": base,
            "rezero": base - 0.1 * (layers == 1),
            "highway": base + layers / 100,
        }
        for residual, loss in losses.items():
            run = make_run(
                tmp_path / "runs" / f"{residual}-{layers}", residual, layers=layers, steps=5
            )
            rewrite(run / "summary.json", loss=loss)
    words = said_of(tmp_path)
    assert (
        "6 have one seed. The three with the lowest difference: rezero, layers 1 ends at 2.9000"
        in words
    )
    assert re.findall(r"(\w+), layers (\d) ends at", words) == [
        ("rezero", "1"),
        ("rezero", "2"),
        ("rezero", "3"),
    ]


def test_the_sizes_of_a_study_stand_side_by_side(tmp_path):
    for layers, dim in ((1, 8), (2, 8), (3, 16)):
        make_run(tmp_path / "runs" / f"layers-{layers}", layers=layers, dim=dim, steps=5)
    assert "Model 1 × 8, 2 × 8, 3 × 16 (layers × width) Corpus" in said_of(tmp_path)
    config = json.loads((tmp_path / "runs" / "layers-1" / "config.json").read_text())
    rewrite(
        tmp_path / "runs" / "layers-1" / "config.json",
        model=config["model"] | {"pattern": "kda", "experts": 4},
    )
    assert "(layers × width), kda, 4 experts or attention Corpus" in said_of(tmp_path)


def test_a_study_names_the_digest_of_its_text(tmp_path):
    make_run(tmp_path / "runs" / "a", layers=1, steps=5)
    make_run(tmp_path / "runs" / "b", layers=1, steps=5, lr=0.1)
    for name in "ab":
        launch = {"corpus": {"source_hash": "0123456789abcdef"}}
        write_json(tmp_path / "runs" / name / "launch.json", launch)
    assert "Corpus stdlib, bytes tokens, 0123456789ab Training" in said_of(tmp_path)


def test_one_residual_in_several_sizes_is_counted_once(tmp_path):
    for layers in (1, 2, 3):
        for residual in ("standard", "rezero", "highway"):
            make_run(
                tmp_path / "runs" / f"{residual}-{layers}", residual, seed=0, layers=layers, steps=5
            )
    page = write_report([tmp_path]).read_text()
    assert "<title>9 arms" in page
    assert "Of 6 arms against standard at the same settings, 6 have one seed." in visible(page)
    assert f"headwater study RECIPE --out {tmp_path.name}-again" in visible(page)
    for layers in (1, 2, 3):
        for residual in ("standard", "rezero"):
            make_run(
                tmp_path / "two" / "runs" / f"{residual}-{layers}",
                residual,
                seed=0,
                layers=layers,
                steps=5,
            )
            make_run(
                tmp_path / "two" / "runs" / f"{residual}-{layers}-1",
                residual,
                seed=1,
                layers=layers,
                steps=5,
            )
    words = said_of(tmp_path / "two")
    assert "With 2 seeds and 3 arms, a difference" in words
    assert "that hold for all 3 arms at once" in words
    assert "Seeds 2 per arm " in words


def test_a_time_that_an_archive_has_dropped_is_not_shown(tmp_path):
    run = make_run(tmp_path / "run", layers=1, steps=5)
    assert "Last written" in said_of(run)
    for path in run.rglob("*"):
        os.utime(path, (0, 0))
    assert "Last written" not in said_of(run)


def test_seeds_and_intervals_are_drawn_on_one_scale(tmp_path):
    losses = {"standard": [2.0, 2.0, 2.0], "rezero": [1.9, 1.92, 1.94], "highway": [2.1, 2.0, 2.05]}
    page = write_report([arms(tmp_path / "c", losses)]).read_text()
    strips = re.findall(r'<svg class="strip c.*?</svg>', page)
    assert [strip.count('class="seed"') for strip in strips] == [0, 3, 3]
    zeros = {re.search(r'class="zero" x1="([\d.]+)"', strip).group(1) for strip in strips}
    assert len(zeros) == 1
    dots = [
        [float(x) for x in re.findall(r'class="seed" cx="([\d.]+)"', strip)] for strip in strips
    ]
    zero = float(zeros.pop())
    assert all(x < zero for x in dots[1])
    assert dots[2][0] - dots[2][2] == pytest.approx(
        dots[2][2] - dots[2][1], abs=0.11
    )  # evenly apart, as the losses
    assert (zero - dots[1][0]) == pytest.approx(
        dots[2][0] - zero, abs=0.11
    )  # a tenth below, a tenth above
    assert "Differences by seed −0.1000, −0.0800, −0.0600; 95 % interval" in strips[1]


def test_an_interval_that_would_hide_the_seeds_ends_in_an_arrow(tmp_path):
    page = write_report(
        [arms(tmp_path / "c", {"standard": [2.0, 2.0], "rezero": [1.9, 1.96]})]
    ).read_text()
    strip = re.findall(r'<svg class="strip c1.*?</svg>', page)[0]
    low, high = (
        float(x) for x in re.search(r'class="interval" x1="([\d.]+)" x2="([\d.]+)"', strip).groups()
    )
    assert 0 < low < high < 190
    assert len(re.findall(r"M[\d.]+,[\d.]+l", strip)) == 2  # both ends go on
    dots = [float(x) for x in re.findall(r'class="seed" cx="([\d.]+)"', strip)]
    assert dots[1] - dots[0] > 10


@pytest.mark.parametrize(
    ("jobs", "said", "compared"),
    [
        (1, "Runs were made one at a time.", True),
        (2, "Wall-clock is not compared: up to 2 runs were made at a time.", False),
        (
            None,
            "Wall-clock is not compared: how many runs were made side by side is unknown.",
            False,
        ),
    ],
)
def test_wall_clock_is_compared_only_where_runs_had_the_machine_alone(
    tmp_path, jobs, said, compared
):
    folder = make_comparison(
        tmp_path / "c", ["standard", "attnres-full"], [0, 1], jobs, layers=1, steps=100
    )
    words = said_of(folder)
    assert said in words
    assert ("× 1.10" in words) is compared  # 21 s against 19 s


def test_a_page_of_some_runs_that_had_the_machine_alone_says_which_times_it_compares(tmp_path):
    folder = make_comparison(
        tmp_path / "c", ["standard", "attnres-full", "rezero"], [0, 1], layers=1, steps=100
    )
    write_json(folder / "runs" / "2-seed1" / "launch.json", {"side_by_side": 2})
    words = said_of(folder)
    assert words.count("× 1.10") == 1, "of Full's row, not of ReZero's"
    assert "Wall-clock is compared only where the runs of both were made one at a time." in words
    assert "not compared" not in words


def test_where_the_numbers_come_from_is_said(tmp_path, monkeypatch):
    folder = make_comparison(
        tmp_path / "my runs", ["standard", "attnres-full:window=2"], [0, 1], layers=2, steps=20
    )
    words = said_of(folder)
    for fact in (
        "2 layers, width 192",
        "stdlib, bytes tokens, 7d69e0bf02c6",
        "20 steps of 16 × 256 tokens",
        "adamw, learning rate 0.001, cosine",
        "headwater 0.1.0, torch 2.10.0",
        "headwater compare --config 'my runs/settings.json' --residuals standard attnres-full:window=2",
        "--seeds 0 1 --out 'my runs-again'",
        "train.batch_size 16",
    ):
        assert fact in words, fact
    alone = make_run(tmp_path / "alone", layers=2, steps=20)
    assert "headwater train --config alone/config.json --out alone-again" in said_of(alone)
    monkeypatch.chdir(tmp_path.parent)
    below = Path(tmp_path.name, "alone")
    assert f"headwater train --config {below}/config.json --out {below}-again" in said_of(below), (
        "as it was asked for"
    )
    monkeypatch.chdir(tmp_path / "my runs")
    for elsewhere in (Path("../alone"), Path("../my runs/../alone")):
        assert "headwater train --config alone/config.json --out alone-again" in said_of(elsewhere)
    assert "headwater compare --config 'my runs/settings.json'" in said_of(Path("."))
    assert "--plugin" not in said_of(folder) + said_of(alone)


def test_the_command_that_makes_a_page_again_imports_what_its_residuals_are_in(tmp_path):
    mine = "leaky@my.residuals:start=0.5"
    compared = make_comparison(tmp_path / "c", ["standard", mine], [0, 1], layers=1, steps=5)
    rewrite(compared / "compare.json", residuals=["standard", "leaky:start=0.5"])
    assert "leaky:start=0.5 --seeds 0 1 --out c-again --plugin my.residuals " in said_of(compared)
    make_run(tmp_path / "study" / "runs" / "one", mine, layers=1, steps=5)
    assert "headwater study RECIPE --out study-again --plugin my.residuals " in said_of(
        tmp_path / "study"
    )
    alone = make_run(tmp_path / "alone", mine, layers=1, steps=5)
    assert "--out alone-again --plugin my.residuals " in said_of(alone)
    made_up = make_run(tmp_path / "made-up", "leaky@rm -r;x", layers=1, steps=5)
    assert "--out made-up-again data" in said_of(made_up), (
        "a command is not put together from what is no module"
    )


@pytest.mark.parametrize(
    ("saved", "vocabulary", "told"),
    [
        (
            {"type": "bytes"},
            4096,
            "study, bytes tokens",
        ),  # a model of a size with a larger vocabulary
        ({"model": {"type": "BPE"}}, 4096, "study, bpe tokens, a vocabulary of 4,096"),
        (None, 320, "study, bytes tokens"),
        (None, 4096, "study, a vocabulary of 4,096"),
    ],
)
def test_tokens_that_were_made_before_are_not_called_by_the_settings_default(
    tmp_path, saved, vocabulary, told
):
    """A folder of tokens has a tokenizer of its own; an archive of runs may have dropped it."""
    run = make_run(tmp_path / "run", layers=1, steps=5)
    config = json.loads((run / "config.json").read_text())
    config["data"]["source"], config["model"]["vocab_size"] = ["data/study"], vocabulary
    write_json(run / "config.json", config)
    (run / "tokenizer.json").unlink() if saved is None else write_json(
        run / "tokenizer.json", saved
    )
    assert f"Corpus {told} Training" in said_of(run)


def test_a_run_that_stopped_is_not_just_unfinished(tmp_path):
    folder = make_comparison(tmp_path / "c", ["standard", "rezero"], [0, 1], layers=1, steps=5)
    run = folder / "runs" / "1-seed1"
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"kind": "skip", "step": 6, "reason": "nonfinite", "loss": None}) + "\n"
        )
    words = said_of(folder)
    assert (
        "1-seed1: stopped at step 6: the loss or the gradient was not finite; the table counts only finished"
        in words
    )
    assert "rezero 1 seed, 1 stopped" in words
    assert "1 step was left out of training (1 not finite), at step 6" in words
    assert "unreadable" not in words
    assert "nfinished" not in words


def test_a_run_that_stopped_before_its_first_evaluation_has_none_to_show(tmp_path):
    folder = make_comparison(tmp_path / "c", ["standard", "rezero"], [0], layers=1, steps=5)
    run = folder / "runs" / "1-seed0"
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_text(
        '{"kind": "skip", "step": 1, "reason": "nonfinite", "loss": null}\n'
    )
    words = said_of(folder)
    assert (
        "1-seed0: stopped at step 1: the loss or the gradient was not finite; it was never evaluated."
        in words
    )
    assert "Tokens 20.5 k per run" in words


def test_a_run_that_goes_on_without_a_bad_step_stays_with_its_seeds(tmp_path):
    folder = make_comparison(tmp_path / "c", ["standard", "rezero"], [0, 1], layers=1, steps=5)
    run = folder / "runs" / "1-seed1"
    config = json.loads((run / "config.json").read_text())
    rewrite(run / "config.json", train=config["train"] | {"skip_nonfinite": 1})
    assert [len(group.runs) for group in group_runs(read_runs([folder]))] == [2, 2]


def test_labels_say_what_tells_groups_apart_and_no_more():
    """Heads go with the width; what is left are rates, which must not be cut off."""
    settings = [
        {"model.dim": dim, "model.heads": heads, "model.window": "None", "optim.lr": lr}
        for dim, heads, lr in (
            ("8", "1", "0.1"),
            ("8", "1", "0.2"),
            ("16", "2", "0.1"),
            ("16", "2", "0.2"),
        )
    ]
    assert telling(settings) == ["model.dim", "optim.lr"]
    assert telling(
        [{"a": "1", "b": x, "c": y} for x, y in (("1", "1"), ("1", "2"), ("2", "1"))]
    ) == ["b", "c"]
    assert telling(settings[:1]) == []
    assert [words_of(key, settings[0]) for key in ("model.window", "optim.lr")] == [
        "no window",
        "lr 0.1",
    ]


def test_runs_with_other_settings_are_told_apart(tmp_path):
    folders = [
        make_run(tmp_path / f"lr{lr}", "attnres-full", 0, layers=1, steps=5, lr=lr)
        for lr in (0.001, 0.002)
    ]
    groups = group_runs([read_run(folder) for folder in folders])
    assert [group.label for group in groups] == ["attnres-full, lr 0.001", "attnres-full, lr 0.002"]
    assert "Settings differ beyond the residual: optim.lr." in visible(
        write_report(folders, tmp_path / "r.html").read_text()
    )


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
    path = folders[1] / "config.json"
    config = json.loads(path.read_text())
    config[section][setting] = value
    path.write_text(json.dumps(config))
    _, arm = group_runs(read_runs(folders))
    assert (arm.difference() is not None) == judged
    _, plain = group_runs(
        read_runs(folders), order=("attnres-full",)
    )  # whose queries feel their rate
    assert (plain.difference() is not None) == (judged and setting != "query_lr")


def test_an_arm_with_a_switch_of_the_model_is_judged_against_the_baseline(tmp_path):
    folder = make_comparison(
        tmp_path / "c", ["standard", "depth-window"], [0, 1], layers=1, steps=5
    )
    for seed in (0, 1):
        run = make_run(
            folder / "runs" / f"switched-seed{seed}", "standard", seed, layers=1, steps=5
        )
        model = json.loads((run / "config.json").read_text())["model"]
        rewrite(run / "config.json", model={**model, "shortswa": 4})
        (run / "launch.json").write_text(
            json.dumps({"side_by_side": 1, "arm": "standard+shortswa=4"})
        )
    rewrite(folder / "compare.json", residuals=["standard", "standard+shortswa=4", "depth-window"])
    plain, switched, window = group_runs(
        [read_run(run) for run in find_runs([folder])], find_order([folder])
    )
    assert [group.label for group in (plain, switched, window)] == [
        "standard",
        "standard+shortswa=4",
        "depth-window",
    ]
    assert switched.baseline is plain
    assert len(switched.difference().values) == 2
    words = visible(write_report([folder]).read_text())
    assert "standard+shortswa=4 and depth-window against standard" in words
    assert "--residuals standard standard+shortswa=4 depth-window" in words
    rewrite(
        run / "config.json", optim={"lr": 1}
    )  # what the arm does not name still keeps groups apart
    assert group_runs([read_run(run)] + plain.runs)[-1].baseline is None


def test_one_seed_twice_is_one_run(tmp_path):
    folder = make_comparison(tmp_path / "c", ["standard"], [0], layers=1, steps=5)
    words = visible(write_report([folder, folder / "runs" / "0-seed0"]).read_text())
    assert "1 of 1 finished" in words
    assert "at a time" not in words  # of one run there is nothing to say


def test_a_run_made_again_with_its_seed_is_no_second_seed(tmp_path):
    """Two of one seed say nothing of the noise of seeds; the last counts, in means, pairs, curves and maps alike."""
    folder = make_comparison(
        tmp_path / "c", ["standard", "attnres-full"], [0, 1], layers=1, steps=5
    )
    again = make_run(tmp_path / "again", "attnres-full", 1, layers=1, steps=5)
    rewrite(again / "summary.json", loss=9.0)
    rewrite(again / "config.json", log={"tensorboard": True})
    _, twice = group_runs(read_runs([folder, again]))
    first, _, last = twice.runs
    assert twice.results == [first, last]
    assert twice.label == "attnres-full"
    assert twice.final("loss").mean == pytest.approx((first.final("loss") + 9.0) / 2)
    assert draw_depth(twice, 1, 4)["seeds"] == 2
    last.evals[-1]["loss"] = 9.0
    drawn = draw_curves(twice, "eval", 9)
    assert drawn["mean"]["y"][-1] == pytest.approx((first.evals[-1]["loss"] + 9.0) / 2, abs=1e-4)
    assert len(drawn["runs"]) == 3
    words = visible(write_report([folder, again]).read_text())
    assert "1-seed1: again has its settings and its seed, and is the one that counts." in words
    assert "Seeds 2 per residual" in words
    assert "3 seeds" not in words


def test_unequal_tokens_are_said(tmp_path):
    folder = make_comparison(tmp_path / "c", ["standard", "attnres-full"], [0], layers=1, steps=5)
    rewrite(folder / "runs" / "1-seed0" / "summary.json", tokens=999_000)
    assert "not a fair comparison" in visible(write_report([folder]).read_text())


def test_a_row_speaks_of_its_longest_run_and_differences_are_drawn_seed_by_seed(tmp_path):
    folder = make_comparison(
        tmp_path / "c", ["standard", "attnres-full"], [3, 5], layers=1, steps=10
    )
    rewrite(folder / "runs" / "1-seed5" / "summary.json", tokens=999_000)
    base, other = group_runs([read_run(run) for run in find_runs([folder])])
    assert (base.tokens(), other.tokens()) == (10 * 4096, 999_000)
    drawn = curves(other, "difference")
    assert len(drawn) == 2
    for position, points in drawn.items():
        run = other.runs[position]
        rival = next(each for each in base.runs if each.seed == run.seed)
        expected = [
            mine["loss"] - its["loss"] for mine, its in zip(run.evals, rival.evals, strict=True)
        ]
        assert [value for _, _, value in points] == pytest.approx(expected)


def test_smoothing_keeps_gaps_and_thinning_keeps_ends():
    curve = [(i, float(i), None if i == 50 else float(i)) for i in range(400)]
    smoothed = smooth(curve)
    assert smoothed[50][2] is None
    assert smoothed[0][2] == 0.0
    assert smoothed[200][2] == pytest.approx(
        200.0
    )  # the average of a straight line around its middle
    near = [i for i in range(45, 66) if i != 50]  # ten on each side, the missing one left out
    assert smoothed[55][2] == pytest.approx(sum(near) / 20)
    kept = thin(curve, 7)
    assert len(kept) == 7
    assert (kept[0], kept[-1]) == (curve[0], curve[-1])


def test_not_a_run_is_one_clear_error(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"dim": 8}')
    (tmp_path / "empty").mkdir()
    for folder, words in [
        ("absent", "is not a folder"),
        ("empty", "is not a run"),
        ("model", "is not a run"),
    ]:
        with pytest.raises(UserError, match=words) as caught:
            write_report([tmp_path / folder])
        assert folder in str(caught.value)
        assert "metrics.jsonl" in str(caught.value)
    with pytest.raises(UserError, match="at least one folder"):
        write_report([])


def test_large_comparison_stays_small_and_says_it_is_thinned(tmp_path):
    folder = make_comparison(
        tmp_path / "large",
        ["standard", "attnres-block:block=4", "attnres-full"],
        list(range(5)),
        layers=24,
        steps=4000,
        records=25,
    )
    page = write_report([folder])
    assert page.stat().st_size < 2_000_000
    drawn = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text()).group(1))
    longest = max(
        len(run["y"]) for group in drawn["groups"] for run in group["curves"]["train"]["runs"]
    )
    assert longest == drawn["points"] < 4000
    assert len(drawn["groups"][0]["depth"]["frames"]) < 25


def test_maps_are_left_out_when_nothing_else_helps(comparison, monkeypatch):
    monkeypatch.setattr(report, "LIMIT", 1000)
    page = make_page([read_run(folder) for folder in sorted((comparison / "runs").iterdir())])
    assert "depth-mixing maps are left out" in visible(page)
    assert '"mixing":[' not in page


def test_needs_no_torch(comparison, tmp_path):
    code = (
        "import sys; from pathlib import Path; from headwater.analyze.report import write_report;"
        f"write_report([Path({str(comparison)!r})], Path({str(tmp_path / 'r.html')!r}));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
