"""Planted faults stay plantable, and the command that tries them says what is not found."""

import ast
import functools
import json
import subprocess
import sys

import plant
import pytest

FAULTS = plant.read_faults(sorted(plant.FAULTS.glob("*.toml")))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_tests_are_there(fault):
    """After a refactoring: say where the fault lies now. What nobody can get wrong any more may go."""
    fault.plant(plant.ROOT)
    assert fault.tests
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert not name or name.partition("[")[0] in functions_of(path), test


@functools.cache
def functions_of(path):
    tree = ast.parse((plant.ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_room_has_its_faults():
    for room in ("analyze", "hf", "models", "ops", "residuals", "train", "cli"):
        assert sum(fault.file.startswith(f"headwater/{room}") for fault in FAULTS) >= 10, room
    assert len(FAULTS) >= 190


PAIRS = "tests/test_stats.py::test_pairs_are_of_equal_seeds"


def written(name: str, old: str, new: str) -> str:
    given = {"name": name, "breaks": "", "file": "headwater/stats.py", "old": old, "new": new}
    lines = [f"{key} = {json.dumps(value)}" for key, value in given.items()]
    return "\n".join(["[[fault]]", *lines, f'tests = ["{PAIRS}"]', ""])


def test_the_command_finds_what_its_test_sees_and_names_what_it_does_not(tmp_path):
    """Of three faults one is found, one breaks nothing, and one keeps the tests from being collected."""
    minus = "tuple(a - b for a, b in pairs"
    faults = [
        written("wrong", minus, "tuple(b - a for a, b in pairs"),
        written("harmless", minus, "tuple(a + -b for a, b in pairs"),
        written("gone", "import statistics\n", "import statistics_\n"),
    ]
    (tmp_path / "faults.toml").write_text("\n".join(faults))
    command = [sys.executable, plant.__file__, str(tmp_path / "faults.toml"), "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    *lines, total = done.stdout.splitlines()
    verdicts = {name: line for name in ("wrong", "harmless", "gone") for line in lines if f" {name} " in f"{line} "}
    assert verdicts["wrong"].startswith("found "), done.stdout + done.stderr
    assert verdicts["harmless"].startswith("SURVIVED ")
    assert verdicts["gone"].startswith("NOT COLLECTED ")
    assert total.startswith("1 of 3 faults found in ")
    assert done.returncode == 1


def test_a_fault_that_does_not_fit_is_an_error():
    fault = FAULTS[0]
    with pytest.raises(ValueError, match=r"must stand in .* once, and does so 0 times"):
        plant.Fault(**{**vars(fault), "old": "no such text"}).plant(plant.ROOT)
    with pytest.raises(ValueError, match="old and new text are the same"):
        plant.Fault(**{**vars(fault), "new": fault.old}).plant(plant.ROOT)
