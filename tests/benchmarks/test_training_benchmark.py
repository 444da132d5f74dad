"""The training benchmark on its tiny preset: the numbers mean nothing here, that there are some does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import python

from benchmarks import training
from benchmarks.training import check

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_arms_of_the_tiny_preset(tmp_path, monkeypatch, capsys):
    """Each arm is a process that has imported torch already."""
    real = subprocess.run

    def run(command, **options):
        if command[0] != sys.executable:  # git
            return real(command, **options)
        return subprocess.CompletedProcess(
            command, 0, python(*command[1:], cwd=ROOT, timeout=options["timeout"])
        )

    flags = ["--preset", "tiny", "--residuals", "attnres-block", "--only", "fsdp", "async-save"]
    monkeypatch.setattr(sys, "argv", ["training.py", *flags, "--out", str(tmp_path / "out.json")])
    monkeypatch.setattr(subprocess, "run", run)
    training.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((tmp_path / "out.json").read_text())
    wrapped, saving = result["arms"]
    assert wrapped["tokens_per_second"] > 0, wrapped
    assert saving["loss"] == pytest.approx(wrapped["loss"], rel=1e-6)
    assert saving["save"]["bytes"] > 3 * 4 * saving["parameters"]  # weights and two moments in fp32
    assert len(saving["save"]["seconds"]) == 6
    assert all(0 < found["blocked"] < found["with"] for found in saving["save"]["seconds"])


def test_another_first_loss_shows_no_speed():
    arms = [
        {"arm": "standard/plain", "loss": 5.0},
        {"arm": "standard/fsdp", "loss": 5.1, "tokens_per_second": 9.0},
    ]
    check(arms)
    assert arms[1]["arm"] == "standard/fsdp"
    assert "first loss differs" in arms[1]["failed"]
    assert "tokens_per_second" not in arms[1]


def test_every_size_of_the_speed_benchmark_has_arms_and_a_plain_one_among_them():
    """Else a size by itself would be a KeyError, on a GPU. In a process of its own: it registers a residual."""
    sizes = "import json; from benchmarks.speed import *; print(json.dumps([DEFAULT, list(SIZES), PLAIN]))"
    arms, names, plain = json.loads(python("-c", sizes, cwd=ROOT).splitlines()[-1])
    assert set(arms) == set(names)
    assert all(set(some) & set(plain) for some in arms.values())


def test_the_speed_benchmark_takes_a_residual_of_ones_own():
    command = "-m benchmarks.speed --sizes tiny --device cpu --rounds 1 --plugin examples.new_residual --arms standard"
    found = json.loads(python(*command.split(), "embedding-skip", cwd=ROOT).splitlines()[-1])
    assert found["tiny"]["embedding-skip"]["tokens_per_second"] > 0


@pytest.mark.slow
def test_trainers_of_a_tiny_model_take_turns():
    """Numbers mean nothing on a CPU; that each trainer has one does, and that losses and sizes agree."""
    flags = "--sizes tiny --device cpu --rounds 1 --steps 1"
    found = json.loads(
        python("-m", "benchmarks.trainers", *flags.split(), cwd=ROOT, timeout=300).splitlines()[-1]
    )
    assert all(trainer["tokens_per_second"] > 0 for trainer in found["tiny"].values())
    assert len(found["tiny"]) == 4
