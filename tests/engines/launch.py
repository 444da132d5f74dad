"""Start a script of runs on several processes, and read what each rank prints of each run."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path


def run_all(script: Path, world: int, runs: list[dict]) -> list[list[dict]]:
    """Make runs one after another on `world` processes; what each rank says of each run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        environment = {**os.environ, "MASTER_ADDR": "localhost"}
        environment.update({name: str(value) for name, value in places.items()})
        process = subprocess.Popen(
            [sys.executable, script, json.dumps(runs)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        processes.append(process)
    results: list[list[dict]] = [[] for _ in runs]
    for process in processes:
        output, _ = process.communicate(timeout=3000)
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        assert len(lines) == len(runs), output[-5000:]
        for result, line in zip(results, lines, strict=True):
            result.append(json.loads(line.removeprefix("RESULT ")))
    return results


def losses_of(ranks: list[dict]) -> list[float]:
    """The losses of a run, from a rank that knows them: others of a pipeline say 0 or -1."""
    return max((rank["losses"] for rank in ranks), key=lambda losses: losses[0])


def assert_close(losses: list[float], expected: list[float], limit: float) -> None:
    assert len(losses) == len(expected)
    assert max(abs(a - b) for a, b in zip(losses, expected)) <= limit
