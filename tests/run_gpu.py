"""Every GPU test, in one command: `make test-gpu`, or `python tests/run_gpu.py [processes]`.

Compiling kernels is what takes the time, on the host, so several pytest processes share the tests out among them; no
plugin is needed. What needs most of the GPU's memory (marked `big`) comes after, by itself. The last line is the sum.
"""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOGS = ROOT / "build" / "test-gpu"


def marked_files(tests: Path) -> list[str]:
    """Only files that name the marker: others may need what a GPU machine does not have."""
    return [
        str(path) for path in sorted(tests.rglob("test_*.py")) if "mark.gpu" in path.read_text()
    ]


def start(name: str, *arguments: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--durations",
        "3",
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    with (LOGS / f"{name}.txt").open("w") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )


def outcomes(name: str, process: subprocess.Popen) -> Counter[str]:
    """What pytest's last line counts, with the whole log where anything failed; dying without one is an error too."""
    code = process.wait()
    log = (LOGS / f"{name}.txt").read_text()
    last = log.rstrip().rpartition("\n")[2]
    found = Counter(
        {kind.rstrip("s"): int(count) for count, kind in re.findall(r"(\d+) ([a-z]+)", last)}
    )
    counted = Counter(
        {kind: found[kind] for kind in ("passed", "failed", "skipped", "error") if found[kind]}
    )
    if code not in (0, 5):  # 5: no test was left for this process
        print(f"--- {name}, exit code {code}\n{log}", flush=True)
        counted["error"] += not (counted["failed"] or counted["error"])
    return counted


def main(processes: int) -> int:
    began, total = time.monotonic(), Counter()
    LOGS.mkdir(parents=True, exist_ok=True)
    files = marked_files(ROOT / "tests")
    shares = {
        f"share-{i}": ("-m", "gpu and not big", "--share", f"{i}/{processes}")
        for i in range(processes)
    }
    for phase in (shares, {"big": ("-m", "gpu and big")}):
        started = {name: start(name, *arguments, *files) for name, arguments in phase.items()}
        for name, process in started.items():
            total += outcomes(name, process)
        print(f"{', '.join(phase)}: done after {time.monotonic() - began:.0f} s", flush=True)
    counts = ", ".join(f"{total[kind]} {kind}" for kind in ("passed", "failed", "error", "skipped"))
    print(f"GPU tests: {counts} in {time.monotonic() - began:.0f} s")
    if not total["passed"]:
        print("no test has passed: is there a CUDA device? build/test-gpu has the logs")
    return 0 if total["passed"] and not total["failed"] and not total["error"] else 1


if __name__ == "__main__":
    sys.exit(
        main(int(sys.argv[1]) if len(sys.argv) > 1 else min(12, max(2, (os.cpu_count() or 2) - 2)))
    )
