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
    """It runs in another process, since Triton interprets in this one."""
    pytest.importorskip("triton", reason="the kernels need triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.kernels"]
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr[-2000:]
    compiled = {line.split(":")[0] for line in process.stdout.splitlines()}
    assert compiled >= kernels_that_are_launched()


def kernels_that_are_launched() -> set[str]:
    """Read from the source what `launch` and `Launch` are called with."""
    sources = [file.read_text() for file in (ROOT / "headwater" / "ops").rglob("*.py")]
    return {name for text in sources for name in re.findall(r"\b[lL]aunch\(\s*(_\w+),", text)}
