"""One GPU for several processes at once. Without NVIDIA's multi-process service (MPS) they compute in turns."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PLACES = ("/usr/local/nvidia/bin", "/usr/bin")  # where drivers put it, if not on the path
RUNNING = "/tmp/nvidia-mps"  # someone else's, in the default place
PATIENCE = 10  # seconds


@contextmanager
def shared_gpu(processes: int, say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """Start MPS for so many processes, and end it; the environment that they are to have, empty where there is no need
    or no MPS. One that runs already is left alone. `say` is told in a line if it does not start."""
    control = shutil.which(CONTROL) or shutil.which(CONTROL, path=os.pathsep.join(PLACES))
    taken = "CUDA_MPS_PIPE_DIRECTORY" in os.environ or Path(RUNNING).exists()
    if processes < 2 or control is None or taken:
        yield {}
        return
    with tempfile.TemporaryDirectory(
        prefix="headwater-mps-", dir="/tmp"
    ) as folder:  # a socket's path must be short
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            if reason := _run([control, "-d"], environment):
                say(f"runs take turns on the GPU: NVIDIA's MPS does not start ({reason})")
            yield {} if reason else environment
        finally:  # one that was too slow may be there by now
            _run([control], environment, "quit\n")


def _run(command: list[str], environment: dict[str, str], text: str = "") -> str | None:
    """None, or why it failed."""
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, input=text, capture_output=True, text=True, timeout=PATIENCE,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = (done.stderr or done.stdout).strip().splitlines()
    return None if done.returncode == 0 else (said[-1] if said else f"exit code {done.returncode}")
