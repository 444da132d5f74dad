"""What a run's folder says is read as it is meant: steps left out, runs that stopped, runs made beside others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from runfolder import make_comparison, make_run, write_json
from tinyrun import tiny

from headwater.errors import UserError
from headwater.runs.launch import most_at_a_time
from headwater.runs.record import find_runs, read_run
from headwater.train.loop import train


def append(folder, *rows):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def skip(step, reason="nonfinite"):
    """As the trainer writes it: a step that was left out has no tokens."""
    return {
        "kind": "skip",
        "step": step,
        "reason": reason,
        "loss": None,
        "threshold": None,
        "grad_norm": None,
    }


def unfinished(folder, **train):
    """A run of five steps that ends before its summary, with these settings."""
    make_run(folder, layers=1, steps=5, depth=False, evals=False, finished=False)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"train": config["train"] | train})
    return folder


def test_a_folder_of_runs_stands_for_the_runs_in_it(tmp_path):
    """As `--out runs/a` and `--out runs/b` leave them; what lies in a run is part of it."""
    for name in ("runs/b-seed10", "runs/a-seed0", "runs/a-seed0/kept"):
        make_run(tmp_path / name, layers=1, steps=5)
    assert [run.name for run in find_runs([tmp_path / "runs"])] == ["a-seed0", "b-seed10"]
    assert find_runs([tmp_path / "runs" / "a-seed0", tmp_path]) == find_runs([tmp_path])
    (tmp_path / "runs" / "b-seed10").rename(tmp_path / "c")
    assert [run.name for run in find_runs([tmp_path])] == [
        "a-seed0"
    ]  # as of a comparison, whatever lies beside runs/


def test_resumed_steps_count_once_and_a_cut_line_is_noted(tmp_path):
    folder = make_run(tmp_path / "run", layers=1, steps=5, depth=False, evals=False)
    append(folder, {"kind": "train", "step": 3, "tokens": 3 * 4096, "loss": 7.0})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    run = read_run(folder)
    assert [row["step"] for row in run.train] == [1, 2, 3, 4, 5]
    assert run.train[2]["loss"] == 7.0
    assert run.notes == ["1 unreadable line of metrics.jsonl left out"]


def test_a_record_without_tokens_is_unreadable_unless_it_is_of_a_step_left_out(tmp_path):
    folder = make_run(tmp_path / "run", layers=1, steps=5, depth=False, evals=False)
    append(folder, {"kind": "train", "step": 6, "loss": 1.0})
    assert read_run(folder).notes == ["1 unreadable line of metrics.jsonl left out"]


def test_steps_left_out_are_counted_by_reason(tmp_path):
    folder = make_run(tmp_path / "run", layers=1, steps=5, depth=False, evals=False)
    append(folder, skip(2), skip(3), skip(4, "spike"))
    said = (
        "3 steps were left out of training (2 not finite, 1 a spike in the loss), at step 2, 3, 4"
    )
    assert read_run(folder).notes == [said]
    assert read_run(folder).stopped == ""  # it has a summary: it went on


@pytest.mark.parametrize(
    ("limits", "rows", "said"),
    [
        ({}, [skip(6)], "stopped at step 6: the loss or the gradient was not finite"),
        ({"skip_nonfinite": 1}, [skip(6)], ""),  # it may still be running
        (
            {"skip_nonfinite": 1},
            [skip(6), skip(7)],
            "stopped at step 7: the loss or the gradient was not finite",
        ),
        ({"skip_nonfinite": 1}, [skip(4), skip(6)], ""),  # not in a row
        ({"skip_nonfinite": 1}, [skip(6, "spike"), skip(7)], ""),  # each kind has its own limit
        (
            {"skip_spikes": 1},
            [skip(6, "spike"), skip(7, "spike")],
            "stopped at step 7: the loss was a spike",
        ),
        ({}, [skip(4), {"kind": "train", "step": 6, "tokens": 1, "loss": 1.0}], ""),  # it went on
        (
            {},
            [{"kind": "eval", "step": 6, "tokens": 1, "loss": None}],
            "stopped at step 6: the validation loss was not finite",
        ),
        (
            {},
            [{"kind": "train", "step": 6, "tokens": 1, "loss": 9.01, "grad_norm": 0.0}],
            "stopped at step 6: the gradient was zero",
        ),
        (
            {},
            [{"kind": "train", "step": 6, "tokens": 1, "loss": 0.0, "grad_norm": 0.0}],
            "",
        ),  # nothing left to learn
    ],
)
def test_a_run_that_stopped_by_itself_says_why(tmp_path, limits, rows, said):
    folder = unfinished(tmp_path / "run", **limits)
    append(folder, *rows)
    assert read_run(folder).stopped == said


def test_else_the_log_has_its_last_words(tmp_path):
    folder = unfinished(tmp_path / "run")
    log = folder / "log.txt"
    log.write_text(
        "step 5/9  loss 2.5\nheadwater: the validation loss is not finite after step 5.\n  Try a lower --lr\n"
    )
    said = "its last words were: the validation loss is not finite after step 5. Try a lower --lr"
    assert read_run(folder).stopped == said
    log.write_text(log.read_text() + "step 6/9  loss 2.4\n")  # it was started again and goes on
    assert read_run(folder).stopped == ""
    log.write_text("headwater: " + "x" * 1000)
    assert len(read_run(folder).stopped) < 400


def test_the_most_runs_at_a_time_are_unknown_where_one_does_not_say():
    def most(*counts):
        return most_at_a_time(counts)

    assert (most(1, 3, 2), most(3, None), most()) == (3, None, None)


@pytest.mark.parametrize(("jobs", "beside"), [(1, 1), (3, 3), (None, None)])
def test_how_many_ran_side_by_side_is_read_or_unknown(tmp_path, monkeypatch, jobs, beside):
    folder = make_comparison(tmp_path / "compare", ["standard"], [0], jobs, layers=1, steps=5)
    assert read_run(folder / "runs" / "0-seed0").beside == beside
    assert read_run(folder / "runs" / "0-seed0").corpus["source_hash"] == "7d69e0bf02c6e71c"
    alone = make_run(tmp_path / "alone", layers=1, steps=5)
    assert read_run(alone).corpus == {}
    summary = json.loads((alone / "summary.json").read_text())
    (alone / "summary.json").write_text(json.dumps({**summary, "source_hash": "1a2b"}))
    assert read_run(alone).corpus == {"source_hash": "1a2b"}
    monkeypatch.chdir(folder / "runs" / "0-seed0")
    assert read_run(Path()).corpus["source_hash"] == "7d69e0bf02c6e71c"
    assert read_run(make_run(folder / "others" / "alone", layers=1, steps=5)).corpus == {}


def test_a_damaged_record_of_the_launch_is_named(tmp_path):
    folder = make_run(tmp_path / "run", layers=1, steps=5)
    (folder / "launch.json").write_text("{")
    with pytest.raises(UserError, match=r"launch.json is not valid JSON"):
        read_run(folder)


def test_the_trainer_leaves_word_of_a_validation_loss_that_is_not_finite(tmp_path):
    config = tiny(tmp_path, eval_every=1, steps=3)
    with pytest.raises(UserError, match="the validation loss is not finite"):
        train(replace(config, optim=replace(config.optim, lr=1e30, warmup=0)), tmp_path / "run")
    assert (
        read_run(tmp_path / "run").stopped
        == "stopped at step 1: the validation loss was not finite"
    )
