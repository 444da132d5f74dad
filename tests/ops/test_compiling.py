"""Every kernel compiles for a GPU that is not here; its numbers are the interpreter's to check."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.compiled
def test_every_kernel_compiles_for_an_h200(tmp_path):
    """In a process of its own: here Triton interprets."""
    pytest.importorskip("triton", reason="the kernels need triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.kernels"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    compiled = {line.split(":")[0] for line in done.stdout.splitlines()}
    assert compiled >= kernels_that_are_launched()


def kernels_that_are_launched() -> set[str]:
    """By the source: what `launch` and `Launch` are called with."""
    sources = [file.read_text() for file in (ROOT / "headwater" / "ops").rglob("*.py")]
    return {name for text in sources for name in re.findall(r"\b[lL]aunch\(\s*(_\w+),", text)}
