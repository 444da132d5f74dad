"""The mutation run on a small tree: what it draws, and what it says of a mutant."""

import ast
import functools
import json
import subprocess
import tomllib

import mutants
import mutate
import pytest

FAULTS = []
for path in sorted((mutate.ROOT / "tests" / "faults").glob("*.toml")):
    FAULTS += tomllib.loads(path.read_text(encoding="utf-8"))["fault"]

SUMS = '''"""Sums."""


def total(prices, fee=2):
    if not prices:
        raise ValueError(f"no prices, {1 + 1}")
    amounts = sorted(prices, reverse=True)
    return sum(amounts) + fee
'''
TESTS = """from package.sums import total

def test_a_fee_is_added():
    assert total([3, 4]) == 9
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "package" / "sums.py").write_text(SUMS)
    (tmp_path / "tests" / "test_sums.py").write_text(TESTS)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def fault(name, old, new):
    tests = ["tests/test_sums.py"]
    values = {"name": name, "file": "package/sums.py", "old": old, "new": new, "tests": tests}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(["[[fault]]", *lines, ""])


def test_one_fault_is_noticed_and_one_survives(tree, capfd):
    (tree / "faults.toml").write_text(
        fault("minus", ") + fee", ") - fee")
        + fault("unsorted", "sorted(prices, reverse=True)", "list(prices)")
    )
    faults = mutants.read_faults(tree, [tree / "faults.toml"])
    counts = mutate.run(tree, faults, jobs=1, seconds=60)
    assert counts == {"noticed": 1, "survived": 1}
    noticed, survivor, *diff = capfd.readouterr().out.splitlines()
    assert noticed.endswith("minus  tests/test_sums.py::test_a_fee_is_added")
    assert "unsorted" in survivor
    assert [line.strip() for line in diff] == [
        "-     amounts = sorted(prices, reverse=True)",
        "+     amounts = list(prices)",
    ]
    assert (tree / "package" / "sums.py").read_text() == SUMS


def test_a_test_that_fails_anyway_notices_nothing(tree):
    (tree / "tests" / "test_sums.py").write_text(TESTS.replace("9", "8"))
    (mutant,) = mutants.draw(tree, "package", 1, seed=0)
    assert mutate.run(tree, [mutant], jobs=1, seconds=60) == {"unsound": 1}


@pytest.mark.parametrize(
    ("old", "new", "error"), [("gone", "here", ValueError), ("sum(", "sum((", SyntaxError)]
)
def test_a_fault_without_its_place_or_that_does_not_compile_is_refused(tree, old, new, error):
    (tree / "faults.toml").write_text(fault("odd", old, new))
    with pytest.raises(error):
        mutants.read_faults(tree, [tree / "faults.toml"])


def test_every_kind_of_mutant_is_drawn_from_code_alone():
    tree = ast.parse(SUMS)
    texts = {
        mutants.replaced(SUMS, *change)
        for node in mutants.nodes(tree)
        for change in mutants.changes(node)
    }
    expected = [
        ("fee=2", "fee=3"),
        ("if not prices", "if prices"),
        ("if not prices", "if (not not prices)"),
        ('raise ValueError(f"no prices, {1 + 1}")', "pass"),
        ("prices, reverse=True", "prices"),
        ("reverse=True", "reverse=False"),
        ("sum(amounts) + fee", "(sum(amounts) - fee)"),
    ]
    assert texts == {SUMS.replace(*pair) for pair in expected}


def test_the_same_seed_draws_the_same_lines_and_each_line_once(tree):
    drawn = mutants.draw(tree, "package", 9, seed=3)
    assert drawn == mutants.draw(tree, "package", 9, seed=3)
    assert sorted(mutant.name for mutant in drawn) == [
        f"package/sums.py:{n}" for n in (4, 5, 6, 7, 8)
    ]
    assert {mutant.tests for mutant in drawn} == {("tests/test_sums.py",)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_fault_has_its_place_and_its_tests(fault):
    """After a refactoring: say where the fault lies now. A fault that nobody can make any more goes."""
    for test in mutants.fault_of(mutate.ROOT, fault).tests:
        file, _, name = test.partition("::")
        assert not name or name.partition("[")[0] in functions_of(file), test


@functools.cache
def functions_of(file):
    tree = ast.parse((mutate.ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
