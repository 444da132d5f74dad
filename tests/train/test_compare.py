"""A comparison runs every pair once, keeps what is finished, and reports means with their spread."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from processes import Forked, start
from rich.console import Console
from tinyrun import fingerprint, tiny

from headwater import cli
from headwater.analyze.groups import group_runs
from headwater.analyze.runs import read_runs
from headwater.cli.flags import CompareFlags, TrainFlags, parse
from headwater.errors import Interrupted, UserError
from headwater.residuals import names
from headwater.runs.tables import print_table
from headwater.train import CompareResult, Spread, TrainResult, compare, loop, train
from headwater.train.arms import parse_arm
from headwater.train.comparison import expand, job_of, plan, slug, try_out
from headwater.train.config import load_file
from headwater.train.data.dataset import prepare
from headwater.train.files import locked, write_json
from headwater.train.jobs import Active, Job, conclude, launch, record_company, side_by_side
from headwater.train.monitor.interrupts import PARENT
from headwater.train.monitor.progress import Tasks
from headwater.train.table import spread, table_of, tabulate


def result(residual: str, seed: int, bits: float) -> TrainResult:
    counts = {
        "parameters": 1000,
        "residual_parameters": 10,
        "flops_per_token": 6000,
        "tokens": 64,
        "steps": 4,
    }
    costs = {"seconds": 2.0, "peak_memory_bytes": 2**20, "loss": bits, "bits_per_byte": bits}
    where = {"folder": Path(residual), "device": "cpu", "torch": "2.10.0", "headwater": "0.1.0"}
    return TrainResult(residual=residual, seed=seed, **counts, **costs, **where)


def text_of(table) -> str:
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    print_table(table, console)
    return console.export_text()


def test_rows_have_mean_spread_and_paired_difference(tmp_path):
    values = {
        ("standard", 0): 3.0,
        ("standard", 1): 4.0,
        ("attnres-full", 0): 2.5,
        ("attnres-full", 1): 3.7,
    }
    finished = {
        (residual, seed): result(residual, seed, bits) for (residual, seed), bits in values.items()
    }
    rows = tabulate(finished, ["standard", "attnres-full", "attnres-block"], {})
    assert [row.residual for row in rows] == ["standard", "attnres-full"]
    assert asdict(rows[0].bits_per_byte) == pytest.approx({"mean": 3.5, "spread": 0.5**0.5})
    assert asdict(rows[1].difference) == pytest.approx({"mean": -0.4, "spread": 0.02**0.5})
    assert rows[1].seeds == (0, 1)
    shown = text_of(table_of(rows, 12))
    assert "3.5000 ± 0.7071" in shown
    assert "−0.4000 ± 1.2706" in shown  # Student's t of one degree of freedom, 12.706, times 0.1
    assert "not told apart" in shown
    assert "With 2 seeds, a difference is told from chance when it exceeds 9 times" in " ".join(
        shown.split()
    )
    assert rows[1].interval == pytest.approx((-1.6706205, 0.8706205))
    assert [row.verdict for row in rows] == ["baseline", "not told apart"]
    assert "attnres-full" in shown
    assert "how many runs were made side by side is unknown" in " ".join(shown.split())
    rows = tabulate(finished, ["standard", "attnres-full"], {"standard": 1, "attnres-full": 3})
    assert [row.side_by_side for row in rows] == [1, 3]
    assert "up to 3 runs were made at a time" in " ".join(text_of(table_of(rows, 12)).split())
    assert "not comparable" not in text_of(table_of(rows[:1], 12))
    unpaired = tabulate(
        {("attnres-full", 0): finished["attnres-full", 0]}, ["standard", "attnres-full"], {}
    )
    assert [row.verdict for row in unpaired] == [None]
    assert "baseline" not in text_of(table_of(unpaired, 12))
    assert spread([2.0]) == Spread(2.0, None)


def test_table_json_has_the_keys_that_readers_know(tmp_path):
    rows = tabulate({("standard", 0): result("standard", 0, 3.0)}, ["standard"], {"standard": 1})
    (row,) = CompareResult(folder=tmp_path, rows=rows, runs=()).table()
    numbers = "loss bits_per_byte seconds peak_memory_bytes difference"
    counts = "parameters residual_parameters flops_per_token tokens"
    judged = ["pairs", "interval", "verdict", "side_by_side"]
    assert list(row) == ["residual", "seeds", *counts.split(), *numbers.split(), *judged]
    assert all(row[key] == {"mean": row[key]["mean"], "spread": None} for key in numbers.split())


def test_all_means_every_registered_name_and_each_is_taken_once(tmp_path):
    everything = expand(["all"])
    assert everything[0] == "standard"
    assert sorted(everything) == sorted(names())
    mixed = expand(
        ["attnres-full", "all", "attnres-block:block=2,heads=2", "attnres-block:heads=2,block=2"]
    )
    assert mixed[:2] == ["attnres-full", "standard"]
    assert sorted(mixed) == sorted([*names(), "attnres-block:block=2,heads=2"])
    assert expand(["standard", "standard:", "standard"]) == ["standard"]
    with pytest.raises(UserError, match=r"unknown residual 'standrad'.*standard"):
        expand(["standrad"])
    config = tiny(tmp_path)
    with pytest.raises(UserError, match="does not fit: "):
        try_out(["attnres-block:heads=3"], config, prepare(config.data))


def test_an_arm_is_a_residual_with_switches_of_the_model(tmp_path):
    """The command of its process makes the configuration that it stands for."""
    config, text = (
        tiny(tmp_path),
        "depth-window:window=2+shortswa=4+value_residual=true+rope_theta=1e+3",
    )
    arm = parse_arm(text)
    assert arm.switches == {"shortswa": 4, "value_residual": True, "rope_theta": 1000.0}
    write_json(tmp_path / "settings.json", asdict(config))
    job = job_of(text, 1, tmp_path, 4)
    flags = parse(
        TrainFlags, list(job.arguments), cli.train, TrainFlags(settings=load_file(job.arguments[1]))
    )
    expected = replace(arm.apply(config), train=replace(config.train, seed=1))
    assert flags.settings == replace(expected, data=flags.settings.data)
    assert flags.settings.model.residual == "depth-window:window=2"
    assert (job.folder.name, job.arm) == (f"{text.replace(':', '_')}-seed1", text)
    assert job_of("depth-window:window=2", 1, tmp_path, 4).arm is None
    launched = Job(label="a", folder=tmp_path / "run", arguments=(), steps=1, arm=text)
    launched.folder.mkdir()
    record_company(launched, 2)
    assert json.loads((launched.folder / "launch.json").read_text()) == {
        "side_by_side": 2,
        "arm": text,
    }


def test_arms_are_told_apart_and_tried_out(tmp_path):
    spellings = [
        "standard",
        "standard+shortswa=4+qk_norm=true",
        "standard+qk_norm=True+shortswa=4",
        "standard+shortswa=3",
    ]
    assert expand(spellings) == [spellings[0], spellings[1], spellings[3]]
    config = tiny(tmp_path)
    with pytest.raises(
        UserError, match=r"arm 'standard\+shortswa=99' does not fit: .* the context of 32, got 99"
    ):
        try_out(["standard", "standard+shortswa=99"], config, prepare(config.data))
    try_out(
        ["laurel:form=previous,states=6+shortswa=2"], config, prepare(config.data)
    )  # 6 sublayers, not 4
    for text, message in {
        "standard+shortswa": "'shortswa' needs a value, for example standard+shortswa=4",
        "standard+shortswa=2+shortswa=3": "'shortswa' is given twice",
        "standard+context=64": "'context' is no setting that an arm may change; Valid: ",
        "standard+short=4": "did you mean 'shortswa'",
        "standard+shortswa=four": "shortswa must be an integer or null; got 'four'",
        "standrad+shortswa=4": "unknown residual 'standrad'",
        "attnres-full:block=2+shortswa=4": "has no option 'block'",
    }.items():
        with pytest.raises(UserError, match=re.escape(message)):
            parse_arm(text)


@pytest.mark.parametrize("word", ["--residuals", "--arms"])
def test_arms_are_another_word_for_residuals(word):
    flags = parse(
        CompareFlags, [word, "standard", "standard+shortswa=4", "--seeds", "0"], cli.compare
    )
    assert flags.residuals == ("standard", "standard+shortswa=4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"residuals": []}, "--residuals needs at least one name, or `all`. Valid: standard, "),
        ({"residuals": "standard"}, r"a list of names; got 'standard': write \['standard'\]"),
        ({"seeds": []}, "--seeds needs at least one seed"),
        ({"seeds": 0}, r"seeds takes a list of numbers; got 0: write \[0\]"),
        ({"seeds": [0, -1]}, "seed must be at least 0; got -1"),
        ({"jobs": 0}, "--jobs must be a whole number from 1; got 0"),
        ({"jobs": 1.5}, "--jobs must be a whole number from 1; got 1.5"),
        (
            {"jobs": np.int64(2), "seeds": np.int64(0)},
            r"seeds takes a list of numbers; got 0: write \[0\]",
        ),
        ({"jobs": np.int64(2), "seeds": [0], "resume": True}, "no comparison at .* to resume"),
    ],
)
def test_arguments_that_ask_for_nothing_are_refused_at_the_door(tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        compare(
            tiny(tmp_path),
            tmp_path / "out",
            **{"residuals": ["standard"], "seeds": [0], **arguments},
        )
    assert not (tmp_path / "out").exists()


def test_a_comparison_goes_on_where_its_text_and_tokenizer_were_taken_away(tmp_path):
    """And its report has one arm still."""
    pytest.importorskip("tokenizers", reason="the extra headwater[bpe] is not installed")
    config, out = tiny(tmp_path, steps=2), tmp_path / "compare"
    text = replace(config.data, tokenizer="bpe", bpe_vocab=300)
    (tmp_path / "first").mkdir()
    prepare(text).tokenizer.save(tmp_path / "first")
    taken = replace(config, data=replace(text, tokenizer=str(tmp_path / "first")))
    compare(taken, out, residuals=["standard"], seeds=[0], progress=False)
    shutil.rmtree(tmp_path / "first")
    (tmp_path / "corpus").rename(tmp_path / "moved")
    moved = replace(taken, data=replace(taken.data, source=(str(tmp_path / "moved"),)))
    rows = compare(moved, out, residuals=["standard"], seeds=[1], resume=True, progress=False).rows
    assert [row.seeds for row in rows] == [(0, 1)]
    summary = out / "runs" / "standard-seed1" / "summary.json"
    saved = json.loads(summary.read_text())
    write_json(summary, {**saved, "source_hash": "of a text that changed meanwhile"})
    with pytest.raises(
        UserError,
        match=r"the text has changed while runs were made: .*standard-seed1 saw another than",
    ):
        compare(moved, out, residuals=["standard"], seeds=[1], resume=True, progress=False)
    assert [len(group.runs) for group in group_runs(read_runs([out]))] == [1, 1], "not one arm"
    write_json(summary, saved)
    for known in (True, False):
        if not known:  # each run by itself
            (out / "compare.json").unlink()
        assert [(group.label, len(group.runs)) for group in group_runs(read_runs([out]))] == [
            ("standard", 2)
        ]


def test_a_changed_corpus_is_refused(tmp_path):
    config = tiny(tmp_path)
    config = replace(config, optim=replace(config.optim, query_lr=1.0))
    out = tmp_path / "out"
    out.mkdir()
    before = prepare(config.data).identity
    assert plan(config, out, ["standard"], [0], before, resume=False) == (["standard"], [0])
    assert plan(config, out, ["attnres-full"], [1], before, resume=True) == (
        ["standard", "attnres-full"],
        [0, 1],
    )
    moved = replace(config, data=replace(config.data, source=("elsewhere",)))
    assert plan(moved, out, [], [], before, resume=True) == (["standard", "attnres-full"], [0, 1])
    plan(config, out, [], [], before, resume=True)
    held = (out / "compare.json").read_text()
    (tmp_path / "corpus" / "0.txt").write_text("another river altogether")
    with pytest.raises(
        UserError,
        match=r"another corpus: .*corpus has changed since it began \(source_hash: \w+ there",
    ):
        compare(config, out, residuals=["standard"], seeds=[0], resume=True)
    assert (out / "compare.json").read_text() == held

    unrecorded = {key: value for key, value in json.loads(held).items() if key != "corpus"}
    del unrecorded["config"]["optim"]["query_lr"]  # it is older than that, too
    write_json(out / "compare.json", unrecorded)
    now = prepare(config.data).identity
    with pytest.raises(UserError, match=r"another configuration:\n  data.source: .*elsewhere"):
        plan(moved, out, ["standard"], [0], now, resume=True)
    plan(config, out, ["standard"], [0], now, resume=True)
    assert json.loads((out / "compare.json").read_text())["corpus"] == now


def job_in(folder):
    return Job(label="a run", folder=folder, arguments=("--residual", "standard"), steps=1)


def test_a_run_is_resumed_only_where_one_began_and_knows_its_parent(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **others: started.append((command, others["env"]))
    )
    job = job_in(tmp_path / "run")
    launch(job, 1)
    (job.folder / "config.json").write_text("{}")
    launch(job, 1)
    assert ["--resume" in command for command, _ in started] == [False, True]
    assert started[0][1][PARENT] == str(os.getpid())


def test_runs_share_the_cores(tmp_path, monkeypatch):
    threads = []
    started = lambda command, **others: threads.append(others["env"].get("OMP_NUM_THREADS"))  # noqa: E731
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for jobs in (1, 2, 5, 30):
        launch(job_in(tmp_path / "run"), jobs)
    assert threads == [None, "6", "2", "1"]


def test_a_row_has_the_mean_of_each_of_its_numbers():
    """Each of its own, so that none can stand for another."""
    numbers = {
        "loss": (2.0, 4.0),
        "bits_per_byte": (1.0, 1.5),
        "seconds": (10.0, 20.0),
        "peak_memory_bytes": (100, 300),
    }
    finished = {
        ("ddl", seed): replace(
            result("ddl", seed, 0.0), tokens=64, parameters=70, residual_parameters=7, flops_per_token=700,
            **{key: values[seed] for key, values in numbers.items()},
        )
        for seed in (0, 1)
    }  # fmt: skip
    (row,) = tabulate(finished, ["ddl"], {"ddl": 3})
    for key, (one, other) in numbers.items():
        expected = {"mean": (one + other) / 2, "spread": (other - one) / 2**0.5}
        assert asdict(getattr(row, key)) == pytest.approx(expected), key
    assert (row.tokens, row.parameters, row.residual_parameters, row.flops_per_token) == (
        64,
        70,
        7,
        700,
    )
    assert (row.seeds, row.side_by_side, row.pairs) == ((0, 1), 3, 2)


def test_a_run_records_how_many_ran_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda command, **others: None)
    job = job_in(tmp_path / "run")
    assert side_by_side([job]) is None
    for jobs, most in ((2, 2), (1, 2), (3, 3)):  # attempts of one run
        launch(job, jobs)
        assert side_by_side([job]) == most
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "config.json").write_text("{}")  # begun before anybody recorded it
    older = job_in(tmp_path / "older")
    launch(older, 1)
    launch(older, 1)
    assert side_by_side([older]) is None
    assert side_by_side([job, older]) is None


PROGRESS = (
    "step 3/12  loss 2.5000  1,000 tokens/s  2 s left\nstep 4: validation 2.5000 bits per byte\n"
)
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\nMemoryError: no room\n'


@pytest.mark.parametrize(
    ("said", "code", "cause"),
    [
        (
            "warning\nheadwater: a checkpoint differs:\n  lr: 1\nChoose another\n",
            1,
            "a checkpoint differs:\n.*lr: 1\n.*other$",
        ),
        (TRACEBACK + PROGRESS, 1, ": MemoryError: no room$"),
        (
            'Traceback (most recent call last):\n  File "x.py"\nKeyError: 3\n\nDuring it another:\n\n'
            + TRACEBACK.replace("no room", "no room\n  for 3\n\nIt is a note"),
            1,
            r"txt\): MemoryError: no room\n    It is a note$",
        ),
        ("sh: no python\n", 127, "sh: no python$"),
        (TRACEBACK.partition("MemoryError")[0], 1, 'File "x.py", line 1$'),  # the disk is full
        (PROGRESS, -9, r"killed by signal 9 \(Killed\), as the system does when memory runs out$"),
        (PROGRESS, 1, "it left no message$"),
    ],
)
def test_the_cause_of_a_failed_run_is_told_whole(tmp_path, said, code, cause):
    """And the log of an earlier attempt, which failed for another reason, is not taken for it."""
    job = job_in(tmp_path)
    earlier = "headwater: an earlier failure\n"
    job.log.write_text(earlier + said)
    active = Active(job, SimpleNamespace(returncode=code), 0, len(earlier), 0.0)
    (message,) = conclude(active, Tasks(Console())).values()
    assert re.search(cause, message, re.DOTALL)
    assert f"exit code {code}" in message
    assert "earlier" not in message


def test_runs_of_one_seed_see_the_same_batches(tmp_path, monkeypatch):
    """What reaches the model is recorded, whatever the residual and whatever it draws at its start."""
    real = loop.token_losses

    def batches_of(residual: str) -> list:
        batches = []

        def token_losses(run, forward, windows):
            batches.append(windows.tolist())
            return real(run, forward, windows)

        monkeypatch.setattr(loop, "token_losses", token_losses)
        train(tiny(tmp_path, residual=residual, steps=4), tmp_path / slug(residual, 0))
        return batches

    assert batches_of("standard") == batches_of("attnres-full:query=projected")


def test_a_comparison_that_ends_in_its_warm_up_says_so(tmp_path, monkeypatch, capsys):
    """Its runs write what they say to files."""

    monkeypatch.setattr("headwater.train.comparison.run_all", lambda *_, **__: {})
    for steps in (1, 2):
        config, out = tiny(tmp_path, steps=steps), tmp_path / str(steps)
        compare(config, out, residuals=["standard"], seeds=[0])
        said = "the run ends at step 1 of a warm-up of 2, at 50 % of its learning rate: raise --steps or lower --warmup"
        assert (said in capsys.readouterr().out) == (steps == 1)
        train(config, out / "runs" / slug("standard", 0), progress=False)
        compare(config, out, residuals=["standard"], seeds=[0], resume=True)
        assert "warm-up" not in capsys.readouterr().out, "nothing is left that could be changed"


def test_an_interrupted_comparison_has_a_table_of_what_is_done(tmp_path, monkeypatch):
    config, out = tiny(tmp_path), tmp_path / "compare"

    def interrupted(*_, **__):
        train(config, out / "runs" / slug("standard", 0), progress=False)
        raise Interrupted("stopped by SIGINT", signal.SIGINT)

    monkeypatch.setattr("headwater.train.comparison.run_all", interrupted)
    with pytest.raises(Interrupted):
        compare(config, out, residuals=["standard", "mhc"], seeds=[0])
    rows = json.loads((out / "table.json").read_text())
    assert [(row["residual"], row["seeds"]) for row in rows] == [("standard", [0])]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"source_hash": "of a text that changed meanwhile"},
            "the text has changed while runs were made: {run} saw",
        ),
        (
            {"steps": 24},
            "runs of this comparison end after 12 steps, and {run} after 24, so a table",
        ),
    ],
)
def test_a_table_is_of_runs_that_are_alike_or_is_not_written(tmp_path, monkeypatch, changed, told):
    """What is not alike when the runs are to begin is told before they do."""
    config, out = tiny(tmp_path), tmp_path / "compare"
    run, ran = out / "runs" / slug("standard", 0), []

    def runs_meanwhile(*_, **__):
        ran.append(train(config, run, progress=False))
        write_json(
            run / "summary.json", {**json.loads((run / "summary.json").read_text()), **changed}
        )
        return {}

    monkeypatch.setattr("headwater.train.comparison.run_all", runs_meanwhile)
    for resume in (False, True):
        with pytest.raises(UserError, match=re.escape(told.format(run=run))):
            compare(config, out, residuals=["standard"], seeds=[0], resume=resume, progress=False)
        assert not (out / "table.json").exists()
    assert len(ran) == 1


@pytest.mark.slow
def test_compare_runs_resumes_and_survives_a_failing_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("headwater.train.jobs.subprocess.Popen", Forked)
    config = tiny(tmp_path, residual="standard")
    out = tmp_path / "compare"
    result = compare(config, out, residuals=["standard", "attnres-full"], seeds=[0], jobs=2)
    assert [row.residual for row in result.rows] == ["standard", "attnres-full"]
    assert result.folder == out
    assert [row.side_by_side for row in result.rows] == [2, 2]
    assert [run.folder.name for run in result.runs] == ["standard-seed0", "attnres-full-seed0"]
    assert json.loads((out / "table.json").read_text()) == json.loads(json.dumps(result.table()))
    assert json.loads((out / "compare.json").read_text())["config"] == json.loads(
        json.dumps(asdict(config))
    )
    shown = capsys.readouterr().out
    assert "standard seed 0: " in shown
    assert "bits/byte" in shown
    alone = train(
        replace(config, model=replace(config.model, residual="attnres-full")), tmp_path / "alone"
    )
    assert result.rows[1].loss.mean == result.runs[1].loss == alone.loss
    assert fingerprint(out / "runs" / "attnres-full-seed0") == fingerprint(tmp_path / "alone")

    with pytest.raises(UserError, match="already holds a comparison"):
        compare(config, out, residuals=["standard"], seeds=[0])
    with pytest.raises(
        UserError, match=r"another configuration:\n  train.batch_size: 4 there, 8 asked for"
    ):
        compare(
            tiny(tmp_path, residual="standard", batch_size=8),
            out,
            residuals=["standard"],
            seeds=[0],
            resume=True,
        )
    config = replace(
        config, train=replace(config.train, skip_nonfinite=1)
    )  # as a run that was stopped tells to

    # One run is damaged and a new residual is added: the first fails alone, the second is run, the rest is kept.
    damaged = out / "runs" / "attnres-full-seed0"
    (damaged / "summary.json").unlink()
    (damaged / "checkpoints" / "step-00000012" / "model.safetensors").write_bytes(b"")
    kept = (out / "runs" / "standard-seed0" / "summary.json").stat().st_mtime_ns
    monkeypatch.setattr("headwater.train.jobs.POLL_SECONDS", 0.05)
    capsys.readouterr()
    with pytest.raises(
        UserError, match=r"1 of 3 runs failed:\n  attnres-full seed 0 .*step-00000012 is damaged"
    ):
        compare(
            config, out, residuals=["attnres-block"], seeds=[0], jobs=2, resume=True, progress=False
        )
    assert capsys.readouterr().out == ""
    assert [row["residual"] for row in json.loads((out / "table.json").read_text())] == [
        "standard",
        "attnres-block",
    ]
    assert (out / "runs" / "standard-seed0" / "summary.json").stat().st_mtime_ns == kept


@pytest.mark.slow
def test_ctrl_c_asks_every_run_to_save_and_end(tmp_path):
    config = tiny(
        tmp_path,
        residual="standard",
        steps=20_000,
        eval_every=20_000,
        depth_every=20_000,
        save_every=20_000,
    )
    out = tmp_path / "my compare"
    prepare(config.data)
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    flags = [
        "--config",
        str(tmp_path / "config.json"),
        "--residuals",
        "standard",
        "--seeds",
        "0",
        "--jobs",
        "2",
    ]
    process = start(tmp_path, "-m", "headwater", "compare", "--out", str(out), *flags)
    metrics = out / "runs" / "standard-seed0" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 500)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    message = (tmp_path / "stderr").read_text()
    assert process.exitcode == 130
    assert message.startswith("headwater: stopped by SIGINT after 0 of 1 runs")
    assert f"headwater compare --out '{out}' --resume" in message
    assert len(message.strip().splitlines()) == 1
    assert list((out / "runs" / "standard-seed0" / "checkpoints").glob("step-*"))
    assert "stopped by SIGTERM" in (out / "runs" / "standard-seed0" / "log.txt").read_text()


@pytest.mark.slow
def test_orphans_save_and_end(tmp_path):
    config = tiny(
        tmp_path,
        residual="standard",
        steps=20_000,
        eval_every=20_000,
        depth_every=20_000,
        save_every=20_000,
    )
    out = tmp_path / "compare"
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    flags = ["--config", str(tmp_path / "config.json"), "--residuals", "standard", "--seeds", "0"]
    run = out / "runs" / "standard-seed0"
    process = start(tmp_path, "-m", "headwater", "compare", "--out", str(out), *flags)
    try:
        wait_until(
            lambda: (
                (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 500
            )
        )
        with (
            pytest.raises(UserError, match=r"working in .*standard-seed0 \(process \d+ on "),
            locked(run),
        ):
            pass
    finally:
        process.kill()
        process.join()
    wait_until(
        lambda: (
            "stopped because what started it is gone after step" in (run / "log.txt").read_text()
        )
    )
    assert list((run / "checkpoints").glob("step-*"))


def wait_until(condition, seconds: float = 60) -> None:
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it did not happen in time")
