"""Help comes at once. `make test` runs this after the rest, by itself and without conftest.py, which imports torch."""

import resource
import subprocess
import sys

import pytest

# The modules of Python that any command line with settings needs.
LEAST = "import argparse, ast, dataclasses, difflib, inspect, json, tomllib, typing, warnings"
HELP = """
import sys
from headwater.cli import main
try:
    main(sys.argv[1:])
except SystemExit as exit:
    assert not exit.code
heavy = {"torch", "numpy", "rich", "transformers", "triton", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""


def processor_seconds(*argv: str) -> float:
    """Processor seconds of a Python process."""

    def of_children() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = of_children()
    done = subprocess.run([sys.executable, "-c", *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert argv[0] == LEAST or "usage: headwater" in done.stdout
    return of_children() - before


@pytest.mark.alone
@pytest.mark.parametrize(
    "argv", [["--help"], ["train", "--help"], ["compare", "--help"], ["generate", "--help"]]
)
def test_help_is_fast_and_does_not_import_torch(argv):
    """A user is promised half a second. The bound is in processor time: 0.3 s, or five times what
    Python's own modules take, where a processor is slow. The fastest of five tries counts."""
    fastest, least = 1.0, 0.0
    for _ in range(5):
        least = max(least, processor_seconds(LEAST))
        fastest = min(fastest, processor_seconds(HELP, *argv))
        if fastest < max(0.3, 5 * least):
            return
    raise AssertionError(f"{fastest:.2f} s, and Python's own modules take {least:.2f} s")
