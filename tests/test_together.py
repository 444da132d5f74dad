"""What forks of one pytest report is what it shows; a test whose process is gone has failed."""

import re
import textwrap

import pytest
from processes import start

CONFTEST = """
import together

def pytest_runtestloop(session):
    together.run(session, 2)
    return True
"""

FILES = {
    "a": """
        import os, time, warnings

        def test_passes():
            warnings.warn("of a fork")

        def test_fails():
            print("printed by", "test_fails")
            os.system("echo echoed")
            assert 1 == 2
    """,
    "b": """
        import os, signal, pytest

        @pytest.fixture(scope="module")
        def folder(tmp_path_factory):
            return tmp_path_factory.mktemp("shared")

        def test_writes(folder):
            (folder / "file").write_text("")

        def test_reads(folder):
            assert (folder / "file").exists()

        def test_ends_its_process():
            os.kill(os.getpid(), signal.SIGKILL)

        def test_is_never_run():
            pass
    """,
    "c": "def test_goes_on(): pass",
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tests")
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in FILES.items():
        (folder / f"test_{name}.py").write_text(textwrap.dedent(text))
    options = ["-p", "no:cacheprovider", "-rA", "--basetemp", folder / "temporary"]
    process = start(folder, "-m", "pytest", *options, folder, cwd=folder)
    process.join(120)
    assert process.exitcode == 1
    return (folder / "stdout").read_text() + (folder / "stderr").read_text()


def test_every_test_has_an_outcome(shown):
    outcomes = dict(
        reversed(line.split()[:2])
        for line in re.findall(r"^(?:PASSED|FAILED) .*", shown, re.MULTILINE)
    )
    failed = {
        "test_a.py::test_fails",
        "test_b.py::test_ends_its_process",
        "test_b.py::test_is_never_run",
    }
    passed = {
        "test_a.py::test_passes",
        "test_b.py::test_writes",
        "test_b.py::test_reads",
        "test_c.py::test_goes_on",
    }
    assert outcomes == dict.fromkeys(failed, "FAILED") | dict.fromkeys(passed, "PASSED"), shown
    assert "exit codes [-9, 0]" in shown


def test_output_and_warnings_come_with_it(shown):
    after = shown.partition("Captured stdout call")[2]
    assert after.splitlines()[1:3] == ["printed by test_fails", "echoed"]
    assert "UserWarning: of a fork" in shown
