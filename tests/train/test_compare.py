"""A comparison runs every pair once, keeps what is finished, and resumes."""

import json
import signal

import pytest
from tinyrun import changed, checkpoint_of, fingerprint, tiny

from headwater.errors import Interrupted, UserError
from headwater.runs.files import read_json, with_hash
from headwater.runs.groups import group_runs
from headwater.runs.record import read_runs
from headwater.train import compare, loop, train
from headwater.train.data.dataset import prepare
from headwater.train.files import write_json


def compared(config, out, residuals=("standard",), seeds=(0,), **options):
    options = {"progress": False, **options}
    return compare(config, out, residuals=[*residuals], seeds=[*seeds], **options)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"residuals": []}, "residuals and seeds need at least one value each"),
        ({"seeds": []}, "residuals and seeds need at least one value each"),
        ({"seeds": [0, -1]}, "seed must be at least 0"),
        ({"resume": True}, "no comparison at .* to resume"),
        ({"residuals": ["attnres-block:heads=3"]}, "attnres-block:heads=3-seed0 does not fit: "),
        ({"residuals": ["standard+shortswa=99"]}, "shortswa must be at most the context, 32; got"),
        ({"jobs": 0}, "jobs must be at least 1; got 0"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(tmp_path, out, arguments, message):
    with pytest.raises(UserError, match=message):
        compared(tiny(tmp_path), out, **arguments)
    assert not (out / "runs").exists()


def test_a_comparison_goes_on_where_its_text_and_tokenizer_were_taken_away(tmp_path, out, forked):
    """The runs stay where they are, and the report has one arm still."""
    config = tiny(tmp_path, steps=2, tokenizer="bpe", bpe_vocab=300)
    place = tmp_path / "tokenizer.json"
    prepare(config.data).tokenizer.save(tmp_path)
    config = changed(config, tokenizer=str(place))
    compared(config, out)
    place.unlink()
    (tmp_path / "corpus").rename(tmp_path / "moved")
    moved = changed(config, source=(str(tmp_path / "moved"),))
    (row,) = compared(moved, out, seeds=[1], resume=True).rows
    assert row.seeds == (0, 1)
    arms = [(group.label, len(group.runs)) for group in group_runs(read_runs([out]))]
    assert arms == [("standard", 2)]


def test_another_configuration_or_text_is_refused(tmp_path, out, engine):
    config = tiny(tmp_path)
    compared(config, out)
    with pytest.raises(UserError, match="already holds a comparison"):
        compared(config, out)
    saved = (out / "compare.json").read_text()
    with pytest.raises(UserError, match=r"other settings, .*\n  train.batch_size: 4 there, 8"):
        compared(changed(config, batch_size=8), out, resume=True)
    (tmp_path / "corpus" / "0.txt").write_text("another river altogether")
    with pytest.raises(UserError, match=r"other text:\n  corpus.source_hash"):
        compared(config, out, resume=True)
    assert (out / "compare.json").read_text() == saved


def test_resuming_adds_arms_and_seeds(tmp_path, out, engine):
    config, jobs = tiny(tmp_path), []
    compared(config, out)
    engine.append(lambda asked, **_: jobs.extend(asked))
    # As a run that was stopped advises
    compared(changed(config, skip_nonfinite=1), out, ["mhc"], [1], resume=True)
    labels = ["standard-seed0", "mhc-seed0", "standard-seed1", "mhc-seed1"]
    assert [job.label for job in jobs] == labels
    # A result is shown with its difference to the baseline of its seed.
    first, second = jobs[0].folder, jobs[2].folder
    assert [job.baseline for job in jobs] == [None, first, None, second]
    saved = read_json(out / "compare.json")
    assert (saved["residuals"], saved["seeds"]) == (["standard", "mhc"], [0, 1])


def test_runs_of_one_seed_see_the_same_batches(tmp_path, monkeypatch):
    """Batches are recorded as they reach the model, whatever the residual draws at its start."""
    real, batches = loop.token_losses, {}

    def token_losses(run, forward, windows):
        batches.setdefault(run.folder.name, []).append(windows.tolist())
        return real(run, forward, windows)

    monkeypatch.setattr(loop, "token_losses", token_losses)
    for name, residual in {"plain": "standard", "drawn": "attnres-full:query=projected"}.items():
        train(tiny(tmp_path, residual=residual, steps=4), tmp_path / name)
    assert batches["plain"] == batches["drawn"]


def test_an_interrupted_comparison_has_a_table_of_what_is_done(tmp_path, out, engine):
    def interrupted(jobs, **_):
        train(jobs[0].config, jobs[0].folder, progress=False)
        raise Interrupted("stopped by SIGINT", signal.SIGINT)

    engine.append(interrupted)
    with pytest.raises(Interrupted):
        compared(tiny(tmp_path), out, ["standard", "mhc"])
    (row,) = read_json(out / "table.json")
    assert (row["residual"], row["seeds"]) == ("standard", [0])


def other_text(folder):
    summary = read_json(folder / "summary.json")
    write_json(folder / "summary.json", with_hash({**summary, "source_hash": "another"}))


def other_steps(folder):
    config = read_json(folder / "config.json")
    config["train"]["steps"] = 24
    write_json(folder / "config.json", config)


@pytest.mark.parametrize("change", [other_text, other_steps])
def test_a_table_is_of_runs_that_are_what_they_began_as(tmp_path, out, engine, change):
    def changed_meanwhile(jobs, **_):
        for job in jobs:
            if not job.finished:
                train(job.config, job.folder, progress=False)
                change(job.folder)

    engine.append(changed_meanwhile)
    for resume in (False, True):  # known before anything runs, the second time
        with pytest.raises(UserError, match=r"not the runs that they began as: .*standard-seed0-"):
            compared(tiny(tmp_path), out, resume=resume)
        assert not (out / "table.json").exists()


@pytest.mark.slow
def test_compare_runs_resumes_and_survives_a_failing_run(
    tmp_path, out, forked, monkeypatch, capsys
):
    monkeypatch.setattr("headwater.train.jobs.POLL_SECONDS", 0.05)
    config, residuals = tiny(tmp_path, residual="standard"), ["standard", "attnres-full"]
    done = compared(config, out, residuals, jobs=2, progress=True)
    assert [(row.residual, row.side_by_side) for row in done.rows] == [(r, 2) for r in residuals]
    plain, full = (run.folder for run in done.runs)
    assert [folder.name.rpartition("-")[0] for folder in (plain, full)] == [
        f"{residual}-seed0" for residual in residuals
    ]
    assert read_json(out / "table.json") == json.loads(json.dumps(done.table()))
    output = capsys.readouterr().out
    assert "standard-seed0: " in output
    assert "bits/byte" in output
    alone = train(changed(config, residual="attnres-full"), tmp_path / "alone")
    assert done.rows[1].loss.mean == done.runs[1].loss == alone.loss
    assert fingerprint(full) == fingerprint(tmp_path / "alone")

    # One run is damaged and an arm is added: the first fails alone, the second is run, the rest is kept.
    (full / "summary.json").unlink()
    (checkpoint_of(full) / "model.safetensors").write_bytes(b"")
    written = (plain / "summary.json").stat().st_mtime_ns
    with pytest.raises(UserError, match=r"1 of 3 runs failed:\n  attnres-full-seed0 .*is damaged"):
        compared(config, out, ["attnres-block"], jobs=2, resume=True)
    rows = read_json(out / "table.json")
    assert [row["residual"] for row in rows] == ["standard", "attnres-block"]
    assert (plain / "summary.json").stat().st_mtime_ns == written
