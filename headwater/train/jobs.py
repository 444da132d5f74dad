"""Runs as processes of their own, several at a time: started, watched, stopped together, resumed.

A process of its own makes a run's peak memory honest and keeps a crash from taking the others along. The folder is the
state: a run with a summary is finished, one with a configuration is resumed.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from rich.console import Console
from rich.progress import TaskID

from headwater.errors import UserError, user_values
from headwater.train.files import read_json, write_json
from headwater.train.monitor.interrupts import PARENT, Interruption
from headwater.train.monitor.metrics import read_record
from headwater.train.monitor.progress import Tasks
from headwater.train.results import DIVERGED, SUMMARY, TrainResult
from headwater.train.sharing import shared_gpu

POLL_SECONDS = 0.2
STARTING_SECONDS = 60  # at most: to compile takes that long
ALIKE = 1.5  # times the operations: by less, residuals of one size differ, and a slow one may have fewer
PROGRESS = re.compile(r"step \d+(/\d+|:) ")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to be made: `arguments` are those of `headwater train`, but for its folder."""

    label: str
    folder: Path
    arguments: tuple[str, ...]
    steps: int
    plugin: str | None = None
    """The module that registers the run's residual, where that is not headwater's own."""
    arm: str | None = None
    """What a comparison calls it, where that is more than its residual."""
    work: float = 1.0
    """Its operations, where it is asked how long it will take beside others."""
    keep_weights: bool = True
    """Whether its checkpoints outlast it."""

    @property
    def log(self) -> Path:
        """What the run prints, attempt after attempt."""
        return self.folder / "log.txt"

    @property
    def finished(self) -> bool:
        return (self.folder / SUMMARY).exists()

    @property
    def diverged(self) -> bool:
        return (self.folder / DIVERGED).exists()

    def clear(self) -> None:
        if self.finished and not self.keep_weights:
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)


@dataclass(frozen=True)
class Active:
    """A job whose process is running."""

    job: Job
    process: subprocess.Popen[bytes]
    task: TaskID
    log_start: int
    """Where in the log this attempt begins."""
    began: float
    """On the clock of files."""

    @property
    def starting(self) -> bool:
        """Whether it has recorded no step yet; one that rarely does is taken to be under way after a while."""
        metrics = self.job.folder / "metrics.jsonl"
        recorded = metrics.exists() and metrics.stat().st_mtime >= self.began
        return not recorded and time.time() < self.began + STARTING_SECONDS

    def seconds(self) -> float:
        """That the run has taken, now that it is finished: one that was resumed is soon done."""
        return max(time.time() - self.began, TrainResult.read(self.job.folder).seconds)


def run_all(
    runs: Sequence[Job],
    jobs: int,
    console: Console,
    *,
    go_on: str,
    seconds: float = math.inf,
    whole: bool = False,
) -> dict[str, str]:
    """Keep `jobs` processes busy until every run has ended, or for so many seconds: then none is started any more, and
    those under way are asked to save and end; `whole`: none is started that would not end by then, going by those that
    have ended, and a shorter one is started before a longer one that would not. Returns by label what to say about
    those that failed; `go_on` is the command that continues, for whoever interrupts it.

    Of runs that share a GPU at most half are starting at a time, which is until they have recorded a step. Started
    together they would end together too, wave after wave, and the GPU would wait while all of them compile."""
    deadline = time.monotonic() + seconds
    waiting = [job for job in runs if not job.finished]
    running: list[Active] = []
    failures: dict[str, str] = {}
    took: list[tuple[float, float]] = []  # work and seconds of those that have finished

    def next_run() -> Job | None:
        left = deadline - time.monotonic()
        return next((job for job in waiting if not whole or at_most(job.work, took) < left), None)

    with (
        Interruption() as interruption,
        shared_gpu(min(jobs, len(waiting)), console.print) as environment,
        Tasks(console) as tasks,
    ):
        total = tasks.add("all runs", len(runs), len(runs) - len(waiting))
        try:
            while (waiting or running) and not interruption.signum and time.monotonic() < deadline:
                while (
                    len(running) < jobs
                    and not (environment and half_start(running, jobs))
                    and (job := next_run())
                ):
                    waiting.remove(job)
                    task = tasks.add(job.label, job.steps, note="starting")
                    start = job.log.stat().st_size if job.log.exists() else 0
                    began = time.time()
                    running.append(Active(job, launch(job, jobs, environment), task, start, began))
                if not running:
                    break  # what is left would not end in time
                time.sleep(POLL_SECONDS)
                for active in list(running):
                    show(active, tasks)
                    if active.process.poll() is not None:
                        running.remove(active)
                        active.job.clear()  # at once: those of a long study fill a disk
                        took += [(active.job.work, active.seconds())] if active.job.finished else []
                        tasks.remove(active.task)
                        tasks.update(total, len(runs) - len(waiting) - len(running))
                        failures |= conclude(active, tasks)
        finally:
            stop(running)  # none is left, unless a signal or an error ended the loop
            for job in runs:
                job.clear()
        if interruption.signum:
            done = sum(job.finished for job in runs)
            raise interruption.error(f"{done} of {len(runs)} runs", go_on)
    return failures


def at_most(work: float, took: Sequence[tuple[float, float]]) -> float:
    """How long a run may last, by work and seconds of those that have finished: as the longest of those like the
    smallest that was no smaller, or in proportion to the largest. Before any has, no time."""
    if not took:
        return 0.0
    like = min((done for done, _ in took if done >= work), default=max(done for done, _ in took))
    longest = max(seconds for done, seconds in took if like / ALIKE < done < like * ALIKE)
    return longest * max(1.0, work / like)


def half_start(running: Sequence[Active], jobs: int) -> bool:
    return sum(active.starting for active in running) >= max(1, jobs // 2)


def launch(job: Job, jobs: int, shared: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Its own session: Ctrl-C in the terminal reaches this process alone, which then asks the runs to stop once. Should
    this process be killed, they notice that they are orphans."""
    job.folder.mkdir(parents=True, exist_ok=True)
    record_company(job, jobs)
    environment = dict(shared or {})
    if jobs > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    flags = [*job.arguments, "--out", str(job.folder)]
    if job.plugin:
        from headwater.residuals.plugins import folder_of

        flags += ["--plugin", job.plugin]
        # In the current folder --plugin looks by itself, and after the standard library.
        if (folder := folder_of(job.plugin)) != os.getcwd():
            folders = (folder, os.environ.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    if (job.folder / "config.json").exists():
        flags.append("--resume")
    with job.log.open("ab") as log:
        return subprocess.Popen(
            # -P: as with the headwater command, a file of the current folder stands for no module.
            [sys.executable, "-P", "-m", "headwater.cli", "train", *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, PARENT: str(os.getpid())},
            start_new_session=True,
        )


def plugin_for(spec: str) -> str | None:
    """The module that a run's process must import for its residual, None if that is headwater's own.

    Raises UserError if it cannot, being a script, and for a residual that nobody registered."""
    from headwater.residuals import plugin_of

    with user_values():
        module = plugin_of(spec)
    if module == "__main__":
        raise UserError(
            f"residual {spec!r} is defined in the script or notebook that is running, which the processes of its runs "
            "cannot import: move it into a module of its own, and import that"
        )
    return module


def record_company(job: Job, jobs: int) -> None:
    """launch.json: the most runs made at a time while this one ran, None where an attempt before did not say. Times of
    runs that shared a machine tell how busy it was. And the arm, by which reports know the run."""
    path, begun = job.folder / "launch.json", (job.folder / "config.json").exists()
    before = read_json(path)["side_by_side"] if path.exists() else None if begun else 1
    arm = {} if job.arm is None else {"arm": job.arm}
    write_json(path, {"side_by_side": None if before is None else max(before, jobs), **arm})


def side_by_side(jobs: Sequence[Job]) -> int | None:
    """The most runs made at a time with any of these; None where one of them does not say."""
    paths = [job.folder / "launch.json" for job in jobs]
    counts = [read_json(path)["side_by_side"] for path in paths if path.exists()]
    return None if None in counts or len(counts) < len(paths) else max(counts, default=None)


def show(active: Active, tasks: Tasks) -> None:
    """The last complete training record, read from the end of the metrics file."""
    path = active.job.folder / "metrics.jsonl"
    if not (tasks.watched and path.exists()):
        return
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        lines = file.read().split(b"\n")[:-1]
    records = (
        read_record(line) for line in reversed(lines) if line.startswith(b'{"kind": "train"')
    )
    record = next(filter(None, records), None)
    if record:
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
        note = f"loss {loss}  {record['tokens_per_second']:,.0f} tokens/s"
        tasks.update(active.task, record["step"], note)


def conclude(active: Active, tasks: Tasks) -> dict[str, str]:
    job, code = active.job, active.process.returncode
    if code == 0:
        result = TrainResult.read(job.folder)
        tasks.say(
            f"{job.label}: {result.bits_per_byte:.4f} bits per byte in {result.seconds:.0f} s"
        )
        return {}
    with job.log.open("rb") as file:
        file.seek(active.log_start)
        said = file.read().decode(errors="replace")
    return {job.label: f"{job.label} (exit code {code}, see {job.log}): {cause(said, code)}"}


def cause(said: str, code: int) -> str:
    """Why a run failed: its last message to the user in full, else the signal that killed it, else the error that its
    last traceback ends with, its first line and its last, else its last words."""
    lines = [line for line in said.splitlines() if line.strip() and not PROGRESS.match(line)]
    begins = [number for number, line in enumerate(lines) if line.startswith("headwater: ")]
    if begins:
        first, *rest = lines[begins[-1] :]
        return "\n    ".join([first.removeprefix("headwater: "), *rest])
    if code < 0:
        hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
        return f"it was killed by signal {-code} ({signal.strsignal(-code)}){hint}"
    traces = [number for number, line in enumerate(lines) if line.startswith("Traceback ")]
    raised = (
        [*dropwhile(lambda line: line.startswith(" "), lines[traces[-1] + 1 :])] if traces else []
    )
    error = raised or lines[-1:]  # the traceback may be cut off
    return "\n    ".join(dict.fromkeys((error[0], error[-1]))) if error else "it left no message"


def refuse_failures(failures: Mapping[str, str], runs: int, advice: str) -> None:
    """Raises UserError where some of the runs failed."""
    if failures:
        listing = "\n  ".join(failures.values())
        raise UserError(
            f"{len(failures)} of {runs} runs failed:\n  {listing}\nThe others are kept. {advice}"
        )


def stop(running: list[Active]) -> None:
    """Ask every run to save and end, and wait until it has."""
    for active in running:
        active.process.terminate()
    for active in running:
        active.process.wait()
