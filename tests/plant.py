"""Planted faults: each is put into a copy of the tree, and the tests that are named beside it must fail.

    python tests/plant.py                       every fault of tests/faults/*.toml, in two processes
    python tests/plant.py -k sinkhorn --jobs 1  those with this in their name or file

A fault is a table [[fault]] with a `name`, what it `breaks`, a `file`, the text `old` that stands there once, the text
`new` that takes its place, and `tests`: node ids or files that pass without the fault and fail with it. To fail to
collect or to import does not count, nor does a test that is skipped. Exits with 1 if a fault is not found.

Every trial is a fork of one process that has imported torch, in a copy of the tree that is used again and again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FAULTS = Path(__file__).parent / "faults"
SECONDS = 300  # for one trial
CLUMSY = (
    "ImportError",
    "ModuleNotFoundError",
    "SyntaxError",
    "IndentationError",
    "NameError",
    "UnboundLocalError",
)
PRELOADED = (
    "numpy", "rich.console", "rich.progress", "safetensors.torch", "tyro", "transformers", "torch._dynamo",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.nn.attention.flex_attention", "torch.testing", "torch.utils.checkpoint",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fault:
    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def plant(self, root: Path) -> str:
        """The file's text with the fault in it."""
        text = (root / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.name}: its old text must stand in {self.file} once, and does so {count} times"
            )
        if self.old == self.new:
            raise ValueError(f"{self.name}: old and new text are the same")
        text = text.replace(self.old, self.new)
        if self.file.endswith(".py"):
            compile(text, self.file, "exec")
        return text


@dataclass
class Trial:
    """Some tests in a copy, with a fault or without, and what came of it."""

    fault: Fault | None
    tests: tuple[str, ...]
    outcome: str = ""  # failed, passed, or why it is neither
    reason: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def judge(self, result: Path) -> None:
        """From what the process has left, if it has."""
        if not result.exists():
            self.outcome, self.reason = "died", "pytest did not come to its end"
            return
        found = json.loads(result.read_text(encoding="utf-8"))
        self.outcomes, self.reason = found["outcomes"], found["reason"]
        if not found["collected"] or found["code"] not in (0, 1):
            self.outcome, self.reason = (
                "not collected",
                self.reason or f"pytest ended with {found['code']}",
            )
        elif "failed" in self.outcomes.values():
            self.outcome = "clumsy" if self.reason.startswith(CLUMSY) else "failed"
        else:
            self.outcome = "passed"

    def unfit(self, test: str) -> str:
        """Without a fault: why this file or node id proves nothing, or nothing."""
        if self.outcome in ("died", "late", "not collected"):
            return f"{self.outcome}: {self.reason}"
        of = {
            outcome
            for node, outcome in self.outcomes.items()
            if node == test or node.startswith((f"{test}[", f"{test}::"))
        }
        return (
            ""
            if "passed" in of and "failed" not in of
            else " and ".join(sorted(of)) or "no such test"
        )


def read_faults(paths: Sequence[Path]) -> list[Fault]:
    tables = [
        table
        for path in paths
        for table in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    ]
    faults = [Fault(**{**table, "tests": tuple(table["tests"])}) for table in tables]
    twice = [name for name, count in Counter(fault.name for fault in faults).items() if count > 1]
    if twice:
        raise ValueError(f"two faults share a name: {', '.join(twice)}")
    return faults


def copy_tree(to: Path) -> None:
    """What git tracks, and new files that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = (
        subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        .stdout.decode()
        .split("\0")
    )
    for name in dict.fromkeys(filter(None, listed)):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


class Recorder:
    """A plugin of pytest: the outcome of every test, and why the first one failed."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.collected = True
        self.reason = ""

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.collected = False
            self.reason = self.reason or str(report.longrepr).strip().rpartition("\n")[2]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.setdefault(report.nodeid, report.outcome)
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)
            self.reason = self.reason or message.strip().partition("\n")[0]


def run_tests(tree: Path, tests: Sequence[str], options: Sequence[str], result: Path) -> None:
    """In a process of its own: pytest in the copy, whose outcomes are written to `result`."""
    import pytest

    os.setsid()  # so that it can be ended with all that it starts
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [
        str(tree),
        str(tree / "tests"),
        *(p for p in sys.path if Path(p or ".").resolve() != ROOT),
    ]
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    recorder = Recorder()
    # A test that measures time fails on a busy machine, fault or no fault.
    options = [*options, "-m", "not alone", "-q", "-p", "no:cacheprovider"]
    options += ["--basetemp", str(tree.parent / "basetemp")]
    code = int(pytest.main([*options, *tests], plugins=[recorder]))
    result.write_text(json.dumps({"code": code, **vars(recorder)}), encoding="utf-8")


class Slot:
    """A copy of the tree, and the trial that runs in it."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.result = folder / "tree", folder / "result.json"
        self.tree.mkdir(parents=True)
        copy_tree(self.tree)
        self.trial: Trial | None = None
        self.planted = 0

    def start(self, trial: Trial) -> None:
        self.trial, self.began = trial, time.monotonic()
        self.result.unlink(missing_ok=True)
        if trial.fault is not None:
            path = self.tree / trial.fault.file
            text, stat = trial.fault.plant(self.tree), path.stat()
            self.original = (path, path.read_bytes(), stat.st_mtime_ns)
            path.write_text(text, encoding="utf-8")
            self.planted += 1  # compiled files go by the second of a source and by its size
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + (10 + self.planted) * 10**9))
        self.child = os.fork()
        if self.child == 0:
            try:
                run_tests(
                    self.tree, trial.tests, () if trial.fault is None else ("-x",), self.result
                )
            finally:
                os._exit(0)

    def ended(self) -> Trial | None:
        """The trial, once it is over: the tree is then as it was."""
        assert self.trial is not None
        late = self.trial.fault is not None and time.monotonic() - self.began > SECONDS
        if not late and os.waitpid(self.child, os.WNOHANG)[0] == 0:
            return None
        trial, self.trial = self.trial, None
        with suppress(ProcessLookupError):
            os.killpg(self.child, signal.SIGKILL)  # what it started and left behind, too
        if late:
            os.waitpid(self.child, 0)
        if trial.fault is not None:
            path, content, mtime = self.original
            path.write_bytes(content)
            os.utime(path, ns=(mtime, mtime))
        trial.seconds = time.monotonic() - self.began
        trial.judge(self.result)
        if late:
            trial.outcome, trial.reason = "late", f"not done in {SECONDS} s"
        return trial


def run_all(trials: Sequence[Trial], slots: Sequence[Slot]) -> Iterator[Trial]:
    waiting = list(trials)
    while waiting or any(slot.trial for slot in slots):
        for slot in slots:
            if slot.trial and (done := slot.ended()):
                yield done
            if slot.trial is None and waiting:
                slot.start(waiting.pop(0))
        time.sleep(0.02)


def preload(everything: bool) -> None:
    """What tests import sooner or later, and none of it ours; for a few trials, only what all of them need."""
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # a process that has started threads cannot be forked
    import pytest  # noqa: F401
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as conftest.py does: something below imports triton
    for module in PRELOADED if everything else ():
        __import__(module)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "faults", nargs="*", type=Path, help="files of faults; by default those of tests/faults"
    )
    parser.add_argument("-k", default="", help="only faults with this in their name or file")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    chosen = parser.parse_args(arguments)
    faults = read_faults(chosen.faults or sorted(FAULTS.glob("*.toml")))
    faults = [fault for fault in faults if chosen.k in fault.name or chosen.k in fault.file]
    for fault in faults:
        fault.plant(ROOT)
    began, tests = time.monotonic(), sorted({test for fault in faults for test in fault.tests})
    preload(everything=len(faults) > 8)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        slots = [Slot(Path(folder) / str(n)) for n in range(max(1, chosen.jobs))]
        unfit = without_faults(tests, slots)
        for test, reason in unfit.items():
            print(f"UNFIT     without a fault, {test}: {reason}", flush=True)
        ready = [Trial(fault, fault.tests) for fault in faults if not set(fault.tests) & set(unfit)]
        missed = len(faults) - len(ready)
        for trial in run_all(ready, slots):
            missed += trial.outcome != "failed"
            verdict = {"failed": "found", "passed": "SURVIVED"}.get(
                trial.outcome, trial.outcome.upper()
            )
            assert trial.fault is not None
            print(
                f"{verdict:<9} {trial.seconds:5.1f} s  {trial.fault.name:<44} {trial.reason[:100]}",
                flush=True,
            )
    print(
        f"{len(faults) - missed} of {len(faults)} faults found in {time.monotonic() - began:.0f} s"
    )
    return 1 if missed or not faults else 0


def without_faults(tests: Sequence[str], slots: Sequence[Slot]) -> dict[str, str]:
    """The tests that prove nothing, each with the reason: they must pass as long as nothing is planted."""
    shares = [tuple(tests[n :: len(slots)]) for n in range(min(len(slots), len(tests)))]
    trials = list(run_all([Trial(None, share) for share in shares], slots))
    return {
        test: reason for trial in trials for test in trial.tests if (reason := trial.unfit(test))
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
