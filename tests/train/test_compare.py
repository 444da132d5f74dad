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

import pytest
from processes import Forked, start
from rich.console import Console
from tinyrun import fingerprint, tiny

from headwater import cli
from headwater.cli.flags import CompareFlags
from headwater.cli.parser import parse
from headwater.errors import Interrupted, UserError
from headwater.residuals import names
from headwater.runs.files import with_hash
from headwater.runs.groups import group_runs
from headwater.runs.launch import read_launch
from headwater.runs.record import read_runs
from headwater.runs.tables import print_table
from headwater.train import CompareResult, Config, Spread, TrainResult, compare, loop, train
from headwater.train.arms import parse_arm
from headwater.train.comparison import admit, planned
from headwater.train.data.dataset import prepare
from headwater.train.files import locked, write_json
from headwater.train.jobs import Job, launch, record_launch
from headwater.train.monitor.interrupts import PARENT
from headwater.train.table import spread, table_of, tabulate


def result(residual: str, seed: int, bits: float, **values) -> TrainResult:
    known = {
        "parameters": 1000, "residual_parameters": 10, "flops_per_token": 6000, "tokens": 64, "steps": 4,
        "seconds": 2.0, "peak_memory_bytes": 2**20, "loss": bits, "bits_per_byte": bits,
        "device": "cpu", "torch": "2.10.0", "headwater": "0.1.0",
    }  # fmt: skip
    return TrainResult(folder=Path(residual), residual=residual, seed=seed, **(known | values))


def results(bits: dict[str, list[float]]) -> dict[tuple[str, int], TrainResult]:
    """By residual and seed."""
    return {
        (residual, seed): result(residual, seed, value)
        for residual, values in bits.items()
        for seed, value in enumerate(values)
    }


def printed(rows) -> str:
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    print_table(table_of(rows, 12), console)
    return " ".join(console.export_text().split())


def run_in(out: Path, name: str) -> Path:
    """The folder of a run, whatever its hash is."""
    (folder,) = (out / "runs").glob(f"{name}-*")
    return folder


def compared(config, out, residuals=("standard",), seeds=(0,), **options):
    return compare(config, out, residuals=[*residuals], seeds=[*seeds], progress=False, **options)


@pytest.fixture
def engine(monkeypatch):
    """Stands in for the processes of runs: `engine.append(f)` lets f(jobs) act in their place."""
    acts = []

    def run_all(jobs, *_, **__):
        return (acts[0](jobs) if acts else None) or {}

    monkeypatch.setattr("headwater.train.studies.run_all", run_all)
    return acts


def test_rows_have_mean_spread_and_paired_difference():
    finished = results({"standard": [3.0, 4.0], "attnres-full": [2.5, 3.7]})
    rows = tabulate(finished, ["standard", "attnres-full", "attnres-block"], {})
    assert [(row.residual, row.seeds) for row in rows] == [
        ("standard", (0, 1)),
        ("attnres-full", (0, 1)),
    ]
    assert asdict(rows[0].bits_per_byte) == pytest.approx({"mean": 3.5, "spread": 0.5**0.5})
    assert asdict(rows[1].difference) == pytest.approx({"mean": -0.4, "spread": 0.02**0.5})
    assert rows[1].interval == pytest.approx((-1.6706205, 0.8706205))
    assert [row.verdict for row in rows] == ["baseline", "no significant difference"]
    text = printed(rows)
    assert "3.5000 ± 0.7071" in text
    assert "−0.4000 ± 1.2706" in text  # Student's t of one degree of freedom, 12.706, times 0.1
    assert "With 2 seeds, a difference is significant if it exceeds 9 times" in text
    assert "how many runs were made side by side is unknown" in text
    alone = {("attnres-full", 0): finished["attnres-full", 0]}
    unpaired = tabulate(alone, ["standard", "attnres-full"], {})
    assert [row.verdict for row in unpaired] == [None]
    assert spread([2.0]) == Spread(2.0, None)


def test_a_row_has_the_mean_of_each_of_its_numbers():
    """Each number differs from the others, so that none can stand for another."""
    numbers = {
        "loss": (2.0, 4.0),
        "bits_per_byte": (1.0, 1.5),
        "seconds": (10.0, 20.0),
        "peak_memory_bytes": (100, 300),
    }
    counts = {"tokens": 64, "parameters": 70, "residual_parameters": 7, "flops_per_token": 700}
    finished = {}
    for seed in (0, 1):
        values = {key: pair[seed] for key, pair in numbers.items()}
        finished["ddl", seed] = result("ddl", seed, 0.0, **counts, **values)
    (row,) = tabulate(finished, ["ddl"], {"ddl": 3})
    for key, (one, other) in numbers.items():
        expected = {"mean": (one + other) / 2, "spread": (other - one) / 2**0.5}
        assert asdict(getattr(row, key)) == pytest.approx(expected), key
    assert {key: getattr(row, key) for key in counts} == counts
    assert (row.seeds, row.side_by_side, row.pairs) == ((0, 1), 3, 2)
    assert "up to 3 runs were made at a time" in printed([row])


def test_table_json_has_the_keys_that_readers_know(tmp_path):
    rows = tabulate(results({"standard": [3.0]}), ["standard"], {"standard": 1})
    (row,) = CompareResult(folder=tmp_path, rows=rows, runs=()).table()
    numbers = "loss bits_per_byte seconds peak_memory_bytes difference"
    counts = "parameters residual_parameters flops_per_token tokens"
    judged = ["pairs", "interval", "verdict", "side_by_side"]
    assert list(row) == ["residual", "seeds", *counts.split(), *numbers.split(), *judged]
    assert all(row[key] == {"mean": row[key]["mean"], "spread": None} for key in numbers.split())


def test_all_means_every_registered_name_and_each_is_taken_once():
    def expand(*residuals: str) -> list[str]:
        return admit(Config(), residuals, [0])[0]

    everything = expand("all")
    assert everything[0] == "standard"
    assert sorted(everything) == sorted(names())
    spellings = ["attnres-block:block=2,heads=2", "attnres-block:heads=2,block=2"]
    mixed = expand("attnres-full", "all", *spellings)
    assert mixed[:2] == ["attnres-full", "standard"]
    assert sorted(mixed) == sorted([*names(), spellings[0]])
    arms = ["standard+shortswa=4+qk_norm=true", "standard+qk_norm=True+shortswa=4"]
    assert expand("standard", "standard:", *arms) == ["standard", arms[0]]


def test_an_arm_is_a_residual_with_switches_of_the_model(tmp_path):
    config = tiny(tmp_path)
    text = "depth-window:window=2+shortswa=4+value_residual=true+rope_theta=1e+3"
    switches = {"shortswa": 4, "value_residual": True, "rope_theta": 1000.0}
    assert parse_arm(text).switches == switches
    run = planned(config, text, 1)
    model = replace(config.model, residual="depth-window:window=2", **switches)
    train_settings = replace(config.train, seed=1)
    assert run.config == replace(config, model=model, train=train_settings)
    assert run.arm == text
    assert planned(config, "depth-window:window=2", 1).arm == ""


def test_an_arm_that_cannot_be_is_refused():
    for text, message in {
        "standard+shortswa": "unknown residual 'standard+shortswa'",
        "standard+context=64": "'context' is no setting that an arm may change; Valid: ",
        "standard+shortswa=four": "shortswa",
        "standrad+shortswa=4": "unknown residual 'standrad'",
        "attnres-full:block=2+shortswa=4": "has no option 'block'",
    }.items():
        with pytest.raises(UserError, match=re.escape(message)):
            parse_arm(text)


def test_arms_are_tried_out_before_anything_runs(tmp_path, engine):
    config = tiny(tmp_path)
    for arm, message in {
        "attnres-block:heads=3": "attnres-block:heads=3-seed0 does not fit: ",
        "standard+shortswa=99": "model.shortswa must be at most the context, 32; got 99",
    }.items():
        with pytest.raises(UserError, match=message):
            compared(config, tmp_path / "out", ["standard", arm])
    compared(config, tmp_path / "other", ["laurel:form=previous,states=6+shortswa=2"])


def test_arms_are_another_word_for_residuals():
    argv = ["--arms", "standard", "standard+shortswa=4", "--seeds", "0"]
    assert parse(CompareFlags, argv, cli.compare).residuals == ("standard", "standard+shortswa=4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"residuals": []}, "residuals and seeds need at least one value each"),
        ({"seeds": []}, "residuals and seeds need at least one value each"),
        ({"seeds": [0, -1]}, "seed must be at least 0"),
        ({"resume": True}, "no comparison at .* to resume"),
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


def test_a_comparison_goes_on_where_its_text_and_tokenizer_were_taken_away(tmp_path, monkeypatch):
    """The runs stay where they are, and the report has one arm still."""
    monkeypatch.setattr("headwater.train.jobs.subprocess.Popen", Forked)
    config, out = tiny(tmp_path, steps=2), tmp_path / "compare"
    text = replace(config.data, tokenizer="bpe", bpe_vocab=300)
    (tmp_path / "first").mkdir()
    prepare(text).tokenizer.save(tmp_path / "first")
    data = replace(text, tokenizer=str(tmp_path / "first"))
    compared(replace(config, data=data), out)
    shutil.rmtree(tmp_path / "first")
    (tmp_path / "corpus").rename(tmp_path / "moved")
    moved = replace(config, data=replace(data, source=(str(tmp_path / "moved"),)))
    rows = compared(moved, out, seeds=[1], resume=True).rows
    assert [row.seeds for row in rows] == [(0, 1)]
    arms = [(group.label, len(group.runs)) for group in group_runs(read_runs([out]))]
    assert arms == [("standard", 2)]


def test_another_configuration_or_text_is_refused(tmp_path, engine):
    config, out = tiny(tmp_path), tmp_path / "out"
    with pytest.raises(UserError, match="jobs must be at least 1; got 0"):
        compared(config, tmp_path / "none", jobs=0)
    compared(config, out)
    with pytest.raises(UserError, match="already holds a comparison"):
        compared(config, out)
    saved = (out / "compare.json").read_text()
    with pytest.raises(UserError, match=r"other settings, .*\n  train.batch_size: 4 there, 8"):
        compared(tiny(tmp_path, batch_size=8), out, resume=True)
    (tmp_path / "corpus" / "0.txt").write_text("another river altogether")
    with pytest.raises(UserError, match=r"other text:\n  corpus.source_hash"):
        compared(config, out, resume=True)
    assert (out / "compare.json").read_text() == saved


def test_resuming_adds_arms_and_seeds(tmp_path, engine):
    config, out = tiny(tmp_path), tmp_path / "out"
    compared(config, out)
    jobs = []
    engine.append(jobs.extend)
    settings = replace(config.train, skip_nonfinite=1)  # as a run that was stopped advises
    compared(replace(config, train=settings), out, ["mhc"], [1], resume=True)
    labels = ["standard-seed0", "mhc-seed0", "standard-seed1", "mhc-seed1"]
    assert [job.label for job in jobs] == labels
    # A result is shown with its difference to the baseline of its seed.
    plain = [job.folder for job in jobs[::2]]
    assert [job.baseline for job in jobs] == [None, plain[0], None, plain[1]]
    saved = json.loads((out / "compare.json").read_text())
    assert (saved["residuals"], saved["seeds"]) == (["standard", "mhc"], [0, 1])


def job_in(folder, config) -> Job:
    return Job(label="a run", folder=folder, config=config)


def test_a_run_is_resumed_only_where_one_began_and_knows_its_parent(tmp_path, monkeypatch):
    commands, environments = [], []

    def begin(command, **options):
        commands.append(command)
        environments.append(options["env"])

    monkeypatch.setattr(subprocess, "Popen", begin)
    job = job_in(tmp_path / "run", tiny(tmp_path))
    launch(job, 1)
    (job.folder / "config.json").write_text("{}")
    launch(job, 1)
    assert ["--resume" in command for command in commands] == [False, True]
    assert environments[0][PARENT] == str(os.getpid())


def test_runs_share_the_cores(tmp_path, monkeypatch):
    threads = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **options: threads.append(options["env"]["OMP_NUM_THREADS"])
    )
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setenv("OMP_NUM_THREADS", "as it was")
    for jobs in (1, 2, 5, 30):
        launch(job_in(tmp_path / "run", tiny(tmp_path)), jobs)
    assert threads == ["as it was", "6", "2", "1"]


def test_a_run_records_how_many_ran_beside_it(tmp_path):
    job = job_in(tmp_path / "run", tiny(tmp_path))
    job.folder.mkdir()
    for jobs, most in ((2, 2), (1, 2), (3, 3)):  # attempts of one run
        record_launch(job, jobs)
        assert read_launch(job.folder).side_by_side == most
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "config.json").write_text("{}")  # it began without a comparison
    older = job_in(tmp_path / "older", job.config)
    record_launch(older, 1)
    assert read_launch(older.folder).side_by_side is None


def test_runs_of_one_seed_see_the_same_batches(tmp_path, monkeypatch):
    """Batches are recorded as they reach the model, whatever the residual draws at its start."""
    real = loop.token_losses

    def batches_of(residual: str) -> list:
        batches = []

        def token_losses(run, forward, windows):
            batches.append(windows.tolist())
            return real(run, forward, windows)

        monkeypatch.setattr(loop, "token_losses", token_losses)
        train(tiny(tmp_path, residual=residual, steps=4), tmp_path / residual.partition(":")[0])
        return batches

    assert batches_of("standard") == batches_of("attnres-full:query=projected")


def test_an_interrupted_comparison_has_a_table_of_what_is_done(tmp_path, engine):
    def interrupted(jobs):
        train(jobs[0].config, jobs[0].folder, progress=False)
        raise Interrupted("stopped by SIGINT", signal.SIGINT)

    engine.append(interrupted)
    with pytest.raises(Interrupted):
        compared(tiny(tmp_path), tmp_path / "out", ["standard", "mhc"])
    rows = json.loads((tmp_path / "out" / "table.json").read_text())
    assert [(row["residual"], row["seeds"]) for row in rows] == [("standard", [0])]


@pytest.mark.parametrize(
    ("file", "section", "changed"),
    [
        ("summary.json", None, {"source_hash": "of a text that changed meanwhile"}),
        ("config.json", "train", {"steps": 24}),
    ],
)
def test_a_table_is_of_runs_that_are_what_they_began_as_or_is_not_written(
    tmp_path, engine, file, section, changed
):
    out = tmp_path / "out"

    def changed_meanwhile(jobs):
        for job in jobs:
            if not job.finished:
                train(job.config, job.folder, progress=False)
                path = job.folder / file
                values = json.loads(path.read_text())
                (values[section] if section else values).update(changed)
                write_json(path, with_hash(values) if file == "summary.json" else values)

    engine.append(changed_meanwhile)
    for resume in (False, True):  # known before anything runs, the second time
        with pytest.raises(UserError, match=r"not the runs that they began as: .*standard-seed0-"):
            compared(tiny(tmp_path), out, resume=resume)
        assert not (out / "table.json").exists()


@pytest.mark.slow
def test_compare_runs_resumes_and_survives_a_failing_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("headwater.train.jobs.subprocess.Popen", Forked)
    monkeypatch.setattr("headwater.train.jobs.POLL_SECONDS", 0.05)
    config, out = tiny(tmp_path, residual="standard"), tmp_path / "compare"
    done = compare(config, out, residuals=["standard", "attnres-full"], seeds=[0], jobs=2)
    assert [row.residual for row in done.rows] == ["standard", "attnres-full"]
    assert [row.side_by_side for row in done.rows] == [2, 2]
    plain, full = (run_in(out, f"{name}-seed0") for name in ("standard", "attnres-full"))
    assert [run.folder for run in done.runs] == [plain, full]
    assert json.loads((out / "table.json").read_text()) == json.loads(json.dumps(done.table()))
    output = capsys.readouterr().out
    assert "standard-seed0: " in output
    assert "bits/byte" in output
    model = replace(config.model, residual="attnres-full")
    alone = train(replace(config, model=model), tmp_path / "alone")
    assert done.rows[1].loss.mean == done.runs[1].loss == alone.loss
    assert fingerprint(full) == fingerprint(tmp_path / "alone")

    # One run is damaged and an arm is added: the first fails alone, the second is run, the rest is kept.
    (full / "summary.json").unlink()
    (full / "checkpoints" / "step-00000012" / "model.safetensors").write_bytes(b"")
    written = (plain / "summary.json").stat().st_mtime_ns
    with pytest.raises(UserError, match=r"1 of 3 runs failed:\n  attnres-full-seed0 .*is damaged"):
        compared(config, out, ["attnres-block"], jobs=2, resume=True)
    rows = json.loads((out / "table.json").read_text())
    assert [row["residual"] for row in rows] == ["standard", "attnres-block"]
    assert (plain / "summary.json").stat().st_mtime_ns == written


def begin_long(tmp_path: Path):
    """A process of `headwater compare` whose run would take minutes; returns it once the run is under way."""
    often = dict.fromkeys(("steps", "eval_every", "depth_every", "save_every"), 20_000)
    config, out = tiny(tmp_path, residual="standard", **often), tmp_path / "my compare"
    prepare(config.data)
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    flags = ["--config", tmp_path / "config.json", "--residuals", "standard", "--seeds", "0"]
    process = start(tmp_path, "-m", "headwater", "compare", "--out", out, *flags, "--jobs", "2")

    def under_way() -> bool:
        sizes = [path.stat().st_size for path in out.glob("runs/*/metrics.jsonl")]
        return any(size > 500 for size in sizes)

    wait_until(under_way)
    return process, out, run_in(out, "standard-seed0")


@pytest.mark.slow
def test_ctrl_c_asks_every_run_to_save_and_end(tmp_path):
    process, out, run = begin_long(tmp_path)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    message = (tmp_path / "stderr").read_text()
    assert process.exitcode == 130
    assert message.startswith("headwater: stopped by SIGINT after 0 of 1 runs")
    assert f"headwater compare --out '{out}' --resume" in message
    assert list((run / "checkpoints").glob("step-*"))
    assert "stopped by SIGTERM" in (run / "log.txt").read_text()


@pytest.mark.slow
def test_orphans_save_and_end(tmp_path):
    process, _, run = begin_long(tmp_path)
    try:
        with pytest.raises(UserError, match=r"working in .*standard-seed0"), locked(run):
            pass
    finally:
        process.kill()
        process.join()
    words = "stopped because what started it is gone after step"
    wait_until(lambda: words in (run / "log.txt").read_text())
    assert list((run / "checkpoints").glob("step-*"))


def wait_until(condition, seconds: float = 60) -> None:
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it did not happen in time")
