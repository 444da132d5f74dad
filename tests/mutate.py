"""Put mutants into a copy of the tree, one at a time, and see which ones no test notices.

    make test-mutants N=200 SEED=0             the same: python tests/mutate.py -n 200 --seed 0
    python tests/mutate.py -n 20 --under headwater/models
    python tests/mutate.py --faults tests/faults/models.toml

The tests of a mutant run until one fails: first those that name its module, then those of its room.
A survivor is printed as a diff. It wants a test, or the line is not needed and goes, or the mutant
computes the same.

A fault of tests/faults is one that no draw would find: a `name`, what it `breaks`, a `file`, the
text `old` that stands there once, `new` in its place, and the `tests` that notice.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from mutants import Mutant, draw, read_faults

ROOT = Path(__file__).parent.parent
MARKS = "not gpu and not alone and not faults and not compiled"  # these need a GPU or the clock
PRELOADED = (
    "numpy", "rich.console", "rich.progress", "safetensors.torch", "torch._dynamo",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.nn.attention.flex_attention", "torch.testing", "transformers",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """`outcome`: noticed, survived, late (a test that does not end, as in an endless loop), unsound.

    `remark`: the test that decided.
    """

    outcome: str
    remark: str
    seconds: float


class Copy:
    """A worker's copy of the tree, and which tests pass in it while nothing is changed."""

    tree: Path
    sound: dict[str, bool]

    @classmethod
    def make(cls, root: Path, folder: str) -> None:
        cls.tree = Path(folder) / str(os.getpid()) / "tree"
        cls.sound = {}
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        for name in listing.stdout.split("\0"):
            if (root / name).is_file():
                (cls.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, cls.tree / name)


class Recorder:
    """A plugin of pytest: writes the name of each test as it starts, and of each one that fails."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def write(self, word: str, name: str) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"{word} {name}\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write("started", nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write("failed", report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.write("failed", report.nodeid)


def run_tests(tests: Sequence[str], log: Path) -> int:
    """Run pytest in the copy, in a process of its own, until a test fails."""
    os.setsid()  # so that it can be ended with all that it starts
    os.chdir(Copy.tree)
    os.environ["PYTHONPATH"] = str(Copy.tree)
    libraries = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
    sys.path[:] = [str(Copy.tree), str(Copy.tree / "tests"), *libraries]
    sys.stdout = sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    options = ["-x", "-q", "-m", MARKS, "-p", "no:cacheprovider", "-p", "no:logging"]
    options += ["--rootdir", str(Copy.tree), "--basetemp", str(log.parent / "basetemp")]
    return int(pytest.main([*options, *tests], plugins=[Recorder(log)]))


def judge(tests: Sequence[str], seconds: float) -> Verdict:
    """Run tests in a fork, for some seconds at most."""
    log = Copy.tree.parent / "log"
    log.write_text("", encoding="utf-8")
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = run_tests(tests, log)
        finally:
            os._exit(code)
    ended, status = 0, 0
    while not ended and time.monotonic() - start < seconds:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also what the tests started and left behind
    if not ended:
        os.waitpid(child, 0)
    elapsed = time.monotonic() - start
    names = log.read_text(encoding="utf-8").splitlines()
    last = names[-1].partition(" ")[2] if names else "no test started"
    if not ended:
        return Verdict("late", f"in {last}", elapsed)
    if status == 0:
        return Verdict("survived", f"{len(names)} tests", elapsed)
    return Verdict("noticed", last, elapsed)


def try_mutant(mutant: Mutant, seconds: float) -> Verdict:
    """Put the mutant into the copy, run its tests, and put the file back."""
    path = Copy.tree / mutant.file
    compiled = Path(cache_from_source(str(path)))
    compiled.unlink(missing_ok=True)
    path.write_text(mutant.after, encoding="utf-8")
    try:
        verdict = judge(mutant.tests, seconds)
    finally:
        path.write_text(mutant.before, encoding="utf-8")
        compiled.unlink(missing_ok=True)
    test = verdict.remark
    if verdict.outcome == "noticed" and test.startswith("tests/"):
        if test not in Copy.sound:
            # Of a file that could not be imported, the import alone.
            check = [test] if "::" in test else [test, "--collect-only"]
            Copy.sound[test] = judge(check, seconds).outcome == "survived"
        if not Copy.sound[test]:
            return Verdict("unsound", f"{test} fails without the mutant too", verdict.seconds)
    return verdict


def run(root: Path, mutants: Sequence[Mutant], jobs: int, seconds: float) -> Counter[str]:
    """Try mutants, print what comes of each one, and count the outcomes."""
    counts: Counter[str] = Counter()
    context = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        ProcessPoolExecutor(jobs, context, Copy.make, (root, folder)) as pool,
    ):
        pending = {pool.submit(try_mutant, mutant, seconds): mutant for mutant in mutants}
        for future in as_completed(pending):
            mutant, verdict = pending[future], future.result()
            counts[verdict.outcome] += 1
            print(f"{verdict.outcome:8} {verdict.seconds:4.0f} s  {mutant.name}  {verdict.remark}")
            if verdict.outcome != "noticed":
                print(mutant.diff())
            sys.stdout.flush()
    return counts


def gpu_rooms(root: Path, mutants: Sequence[Mutant]) -> list[str]:
    """Rooms with tests that need a GPU, which are left out here: a survivor may be theirs."""
    rooms = set()
    for mutant in mutants:
        for test in mutant.tests:
            text = (root / test.partition("::")[0]).read_text(encoding="utf-8")
            if "mark.gpu" in text:
                rooms.add(mutant.file.split("/")[1])
    return sorted(rooms)


def preload() -> None:
    """Import what tests import sooner or later, and nothing of headwater."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process with threads cannot be forked
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as conftest.py does, before torch is imported
    for module in PRELOADED:
        __import__(module)


def main(arguments: Sequence[str]) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("-n", type=int, default=200, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--under", default="headwater", help="folder or file of which they are drawn"
    )
    parser.add_argument("--faults", type=Path, nargs="+", help="files of faults, instead of a draw")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600, help="for the tests of one mutant")
    options = parser.parse_args(arguments)
    if options.faults:
        mutants = read_faults(ROOT, options.faults)
    else:
        mutants = draw(ROOT, options.under, options.n, options.seed)
    rooms = ", ".join(gpu_rooms(ROOT, mutants))
    preload()
    start = time.monotonic()
    counts = run(ROOT, mutants, options.jobs, options.seconds)
    elapsed = time.monotonic() - start
    print(f"{counts['noticed']} of {len(mutants)} noticed in {elapsed:.0f} s: {dict(counts)}")
    print(f"Tests on a GPU were left out of: {rooms}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
