"""Runs as points of a scaling fit: budgets, learning rates, texts and settings."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from runfolder import append_rows, write_json

from headwater.analyze import scaling_of, write_report
from headwater.analyze.power_law import Fit
from headwater.analyze.rates import at_rate, rates_by_budget
from headwater.analyze.scaling_points import confounders_of, operations, points_of
from headwater.cli import main
from headwater.errors import UserError
from headwater.runs.record import RecordedRun

BUDGETS = [1e15, 3e15, 1e16, 3e16, 1e17]
TRUE = Fit(floor=1.2, scale=0.4, alpha=0.25, unit=1e16)


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


def unfinished(run):
    return replace(run, summary=None)


def sweep(residual, per_token, losses):
    """Runs of one size, from the losses of its seeds by learning rate."""
    runs = []
    for lr, values in losses.items():
        for seed, bits in enumerate(values):
            runs.append(recorded(residual, per_token, 1000, bits, seed, lr))
    return runs


def test_points_are_operations_times_tokens():
    """Budgets within three per cent are one, that of the run that came first."""
    runs = [
        recorded("a", 10, 1000, 1.0),
        recorded("a", 10, 2000, 2.0),
        recorded("a", 10.2, 1000, 3.0, 1),
        recorded("b", 20, 1000, 4.0, lr=3e-3),
    ]
    a = {10_000: {0: 1.0, 1: 3.0}, 20_000: {0: 2.0}}
    b = {20_000: {0: 4.0}}
    assert points_of([*runs, unfinished(runs[0])]) == {"a": a, "b": b}
    (losses,) = points_of(runs[:1], "loss")["a"].values()
    assert losses == {0: 9.0}
    words = "a-2.0 and a-5.0 are both a at .* with seed 0: .* they differ in optim.lr. There are a "
    words += "with 0.001 and 0.002, b with 0.003: choose one"
    with pytest.raises(UserError, match=words):
        points_of([*runs, recorded("a", 10, 2000, 5.0, lr=2e-3)])
    with pytest.raises(UserError, match=r"they differ in nothing, so name its folder once$"):
        points_of([runs[0], recorded("a", 10, 1000, 1.0)])


def test_of_several_learning_rates_one_is_taken_or_the_best_of_each_residual_and_size():
    """The best by the mean over seeds, not by the luckiest; unfinished runs have no say."""
    runs = sweep("a", 10, {0.001: (2.0, 2.1), 0.002: (1.9, 2.4)})
    runs += sweep("a", 20, {0.001: (1.8,), 0.002: (1.7,)})
    runs += sweep("b", 10, {0.001: (2.3,), 0.002: (2.2,)})
    lower = unfinished(recorded("b", 10, 1000, 1.0, 0, 0.004))

    def names(runs, lr):
        return [run.name for run in at_rate(runs, lr)]

    assert names(runs, 0.002) == ["a-1.9", "a-2.4", "a-1.7", "b-2.2"]
    assert names([*runs, lower], "best") == ["a-2.0", "a-2.1", "a-1.7", "b-2.2"]
    # The plain residual has no queries, so their rate makes no sweep of its own.
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
    runs += sweep("b", 10, {0.001: (2.3,)})
    runs += sweep("b", 20, {0.001: (1.9,), 0.002: (2.2,)})
    assert rates_by_budget(runs, operations).splitlines() == [
        "  a 0.002 at 1e+04 (1 of 2 seeds), 0.002 at 2e+04 (1 seed; the largest that was tried)",
        "  b 0.001 at 1e+04 (1 seed; no other was tried), "
        "0.001 at 2e+04 (1 seed; the smallest that was tried)",
    ]
    # Rates that diverged were tried.
    diverged = sweep("a", 20, {0.002: (0.0, 0.0), 0.004: (0.0,)})[1:]
    runs += map(unfinished, diverged)
    assert "0.002 at 2e+04 (1 of 2 seeds)" in rates_by_budget(runs, operations)


def test_runs_on_different_text_are_not_fitted_together():
    """The name of a text does not count if its hash is known."""

    def run_on(text, digest, n):
        run = recorded("a", 10, 1000 * n, 1.0 / n)
        run.config["data"] = {"source": [text]}
        run.corpus["source_hash"] = digest
        return run

    first, same = run_on("in/x", "1" * 64, 1), run_on("y", "1" * 64, 2)
    changed, alone = run_on("x", "2" * 64, 3), run_on("/of/x", None, 4)
    assert len(points_of([first, same])["a"]) == 2
    assert len(points_of([first, alone])["a"]) == 2
    words = r"a-1.0 \(x, 1{12}\) and a-0.33.* \(x, 2{12}\) have seen different text"
    for runs in ([first, changed], [alone, first, changed]):  # the first does not know
        with pytest.raises(UserError, match=words):
            points_of(runs)
    with pytest.raises(UserError, match="different text"):
        points_of([same, alone])


def test_runs_evaluated_on_different_windows_are_not_fitted_together():
    """The windows of a longer context are others anyway."""
    runs = []
    for n, context, windows in ((1, 64, 8), (2, 128, 4), (4, 64, 4)):
        run = recorded("a", 10, 1000 * n, 1.0 / n)
        run.config["model"]["context"] = context
        run.config["train"]["eval_windows"] = windows
        runs.append(run)
    assert len(points_of(runs[:2])["a"]) == 2
    with pytest.raises(UserError, match=r"a-1.0 ends with its loss on 8 .* and a-0.25 on 4"):
        points_of(runs)


def test_settings_that_come_with_a_residual_are_named():
    """Beside the baseline's run of the same budget, and of the same seed where there is one."""
    runs = []
    for size in (10, 20):
        for seed in (0, 1):
            plain = recorded("standard", size, 1000, 1.0, seed, size * 1e-4)
            fair = recorded("a", size, 1000, 1.0, seed, size * 1e-4)
            # The plain residual feels no rate of queries; steps make the budget.
            plain.config["optim"]["query_lr"] = 1.0
            plain.config["train"]["steps"] = seed
            if (size, seed) == (10, 1):
                plain.config["train"]["init_from"] = fair.config["train"]["init_from"] = "x"
            runs += [plain, fair]
    fair_only = {"standard": (), "a": ()}
    assert confounders_of(runs, "standard") == fair_only
    size_by_itself = recorded("a", 40, 1000, 0.9, lr=1.0)
    assert confounders_of([*runs, size_by_itself], "standard") == fair_only
    unfair = recorded("b", 20, 1000, 0.9)
    assert confounders_of([*runs, unfair], "standard") == {**fair_only, "b": ("optim.lr",)}
    assert confounders_of([*runs, unfinished(unfair)], "standard") == fair_only


def write_runs(folder, name, curve=TRUE, lr=1e-3, **optim):
    """Write the folders of a residual's runs at every budget."""
    for size, c in enumerate(BUDGETS):
        run = recorded(name, c / 1000, 1000, curve.loss(c), lr=lr)
        run.config["optim"].update(optim)
        path = folder / f"{name}-{lr}-{size}"
        path.mkdir(parents=True)
        write_json(path / "config.json", run.config)
        write_json(path / "summary.json", run.summary)


def test_from_folders_come_the_settings_that_share_in_what_each_residual_saves(tmp_path, capsys):
    """The rates are a line of their own where each residual has its best."""
    for name in ("standard", "laurel"):
        write_runs(tmp_path, name, clip=1.0)
    write_runs(tmp_path, "rezero", lr=2e-3, clip=1.0)
    write_runs(tmp_path, "ddl", clip=2.0)
    expected = {"standard": (), "laurel": (), "rezero": ("optim.lr",), "ddl": ("optim.clip",)}
    for lr, words in (
        (None, "ddl in optim.clip; rezero in optim.lr"),
        ("best", "ddl in optim.clip"),
    ):
        scalings = scaling_of([tmp_path], lr=lr)
        assert {scaling.residual: scaling.confounders for scaling in scalings} == expected
        flags = ["--lr", lr] if lr else []
        assert main(["scaling", str(tmp_path), *flags]) == 0
        output = capsys.readouterr().out
        assert f"explain a part of it too: {words}\n" in output
        assert "Counted" not in output

    names = ["ddl-0.001-2", "standard-0.001-1"]
    for name in names:
        extension = {"kind": "extend", "step": 4, "tokens": 8, "planned": 4, "steps": 8}
        append_rows(tmp_path / name, extension)
    assert main(["scaling", str(tmp_path)]) == 0
    line = "Counted, though they went on to other steps than planned, under no single schedule: "
    assert line + ", ".join(names) in capsys.readouterr().out.splitlines()


def test_from_folders_come_the_curves_of_the_rate_that_is_asked_for(tmp_path):
    for lr, floor in ((0.001, 1.2), (0.002, 1.3)):
        write_runs(tmp_path / "runs", "standard", replace(TRUE, floor=floor), lr)
    with pytest.raises(UserError, match=r"There are standard with 0.001 and 0.002: choose one"):
        scaling_of([str(tmp_path)])
    assert write_report(str(tmp_path)) == tmp_path / "report.html"
    for lr, floor in (("best", 1.2), (0.002, 1.3)):
        (scaling,) = scaling_of([str(tmp_path)], lr=lr)
        assert scaling.fit.floor == pytest.approx(floor, rel=0.01)
