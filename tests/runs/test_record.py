"""A run's folder is read as it is meant: steps left out, runs that stopped, runs made beside others."""

import json

import pytest
from runfolder import append_rows, make_comparison, make_run, rewrite, write_json
from tinyrun import tiny

from headwater.errors import UserError
from headwater.runs.files import with_hash
from headwater.runs.launch import most_at_a_time
from headwater.runs.record import find_runs, read_run
from headwater.runs.results import TrainResult
from headwater.train.loop import train

BARE = {"layers": 1, "steps": 5, "depth": False, "evals": False}


def skip(step, reason="nonfinite"):
    """Return a record of the trainer: a step that was left out has no tokens."""
    row = {"kind": "skip", "step": step, "reason": reason}
    return row | dict.fromkeys(("loss", "threshold", "grad_norm"))


def trained(step, loss, **others):
    return {"kind": "train", "step": step, "tokens": 1, "loss": loss} | others


def unfinished(folder, **settings):
    """A run of five steps that ends before its summary, with these settings."""
    make_run(folder, finished=False, **BARE)
    config = json.loads((folder / "config.json").read_text())
    rewrite(folder / "config.json", train=config["train"] | settings)
    return folder


def test_a_folder_of_runs_stands_for_the_runs_in_it(tmp_path):
    """Commands with `--out runs/a` and `--out runs/b` leave such runs."""
    for name in ("runs/b-seed10", "runs/a-seed0", "runs/a-seed0/kept"):
        make_run(tmp_path / name, **BARE)
    assert [run.name for run in find_runs([tmp_path / "runs"])] == ["a-seed0", "b-seed10"]
    assert find_runs([tmp_path / "runs" / "a-seed0", tmp_path]) == find_runs([tmp_path])
    (tmp_path / "runs" / "b-seed10").rename(tmp_path / "c")
    # As of a comparison, whatever lies beside runs/
    assert [run.name for run in find_runs([tmp_path])] == ["a-seed0"]


def test_resumed_steps_count_once_and_damaged_lines_are_noted(tmp_path):
    folder = make_run(tmp_path / "run", **BARE)
    append_rows(folder, trained(3, 7.0), {"kind": "train", "step": 6, "loss": 1.0})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    run = read_run(folder)
    assert [row["step"] for row in run.train] == [1, 2, 3, 4, 5]
    assert run.train[2]["loss"] == 7.0
    # One without tokens, and one that was cut off.
    assert run.notes == ["2 unreadable lines of metrics.jsonl left out"]


def test_a_flipped_bit_in_the_summary_is_noticed(tmp_path):
    folder = make_run(tmp_path / "run", **BARE)
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) | {"loss": 1.5, "bits_per_byte": 0.8}
    write_json(path, with_hash(summary))
    assert read_run(folder).summary["loss"] == TrainResult.read(folder).loss == 1.5
    path.write_text(path.read_text().replace("1.5", "1.7"))
    run = read_run(folder)
    assert run.summary is None
    assert "summary.json cannot be read or has changed since it was written" in run.notes[0]
    with pytest.raises(UserError, match="values do not fit their hash"):
        TrainResult.read(folder)


def test_steps_left_out_are_counted_by_reason(tmp_path):
    folder = make_run(tmp_path / "run", **BARE)
    append_rows(folder, skip(2), skip(3), skip(4, "spike"))
    run = read_run(folder)
    reasons = "(2 not finite, 1 a spike in the loss), at step 2, 3, 4"
    assert run.notes == [f"3 steps were left out of training {reasons}"]
    assert run.stopped == ""  # it has a summary: it went on


NOT_FINITE = "the loss or the gradient was not finite"


@pytest.mark.parametrize(
    ("limits", "rows", "reason"),
    [
        ({}, [skip(6)], f"6: {NOT_FINITE}"),
        ({"skip_nonfinite": 1}, [skip(6)], ""),  # it may still be running
        ({"skip_nonfinite": 1}, [skip(6), skip(7)], f"7: {NOT_FINITE}"),
        ({"skip_nonfinite": 1}, [skip(4), skip(6)], ""),  # not in a row
        ({"skip_nonfinite": 1}, [skip(6, "spike"), skip(7)], ""),  # each kind has its own limit
        ({"skip_spikes": 1}, [skip(6, "spike"), skip(7, "spike")], "7: the loss was a spike"),
        ({}, [skip(4), trained(6, 1.0)], ""),  # it went on
        (
            {},
            [trained(6, None, kind="eval")],
            "6: the validation loss was not finite",
        ),
        ({}, [trained(6, 9.01, grad_norm=0.0)], "6: the gradient was zero"),
        ({}, [trained(6, 0.0, grad_norm=0.0)], ""),  # nothing left to learn
    ],
)
def test_a_run_that_stopped_by_itself_says_why(tmp_path, limits, rows, reason):
    folder = unfinished(tmp_path / "run", **limits)
    append_rows(folder, *rows)
    assert read_run(folder).stopped == (f"stopped at step {reason}" if reason else "")


def test_else_the_log_has_its_last_words(tmp_path):
    folder = unfinished(tmp_path / "run")
    (folder / "log.txt").write_text("step 5/9  loss 2.5\nheadwater: no room left.\n  Free some\n")
    assert read_run(folder).stopped == "its last words were: no room left. Free some"


@pytest.mark.parametrize(("jobs", "beside"), [(1, 1), (3, 3), (None, None)])
def test_what_started_a_run_knows_its_text_and_its_neighbours(tmp_path, jobs, beside):
    folder = make_comparison(tmp_path / "compare", ["standard"], [0], jobs, layers=1, steps=5)
    run = read_run(folder / "runs" / "0-seed0")
    assert (run.beside, run.corpus["source_hash"]) == (beside, "7d69e0bf02c6e71c")
    alone = make_run(tmp_path / "alone", **BARE)
    assert read_run(alone).corpus == {}
    rewrite(alone / "summary.json", source_hash="1a2b")
    assert read_run(alone).corpus == {"source_hash": "1a2b"}
    (alone / "launch.json").write_text("{")
    with pytest.raises(UserError, match=r"launch.json is damaged"):
        read_run(alone)
    most = [most_at_a_time(counts) for counts in ([1, 3, 2], [3, None], [])]
    assert most == [3, None, None]


def test_the_trainer_leaves_word_of_a_validation_loss_that_is_not_finite(tmp_path):
    config = tiny(tmp_path, eval_every=1, steps=3, lr=1e30, warmup=0)
    with pytest.raises(UserError, match="the validation loss is not finite"):
        train(config, tmp_path / "run")
    stopped = read_run(tmp_path / "run").stopped
    assert stopped == "stopped at step 1: the validation loss was not finite"
