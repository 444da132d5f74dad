"""Runs as processes of their own, several at a time: started, watched, stopped together, resumed.

A process of its own makes a run's peak memory honest and keeps a crash from taking the others along. The folder is the
state: a run with a summary is finished, one with a configuration is resumed.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import TaskID

from headwater.errors import UserError, user_values
from headwater.runs.launch import LAUNCH, read_launch
from headwater.runs.log import cause
from headwater.runs.record import CONFIG, METRICS, SUMMARY
from headwater.runs.results import DIVERGED, TrainResult
from headwater.runs.settings import Config
from headwater.train.files import write_json
from headwater.train.monitor.interrupts import PARENT, Interruption
from headwater.train.monitor.metrics import read_record
from headwater.train.monitor.progress import Tasks

POLL_SECONDS = 0.2
ALIKE = 1.5  # runs whose operations differ by less than this factor are of one size


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A run to be made, in its folder."""

    label: str
    folder: Path
    config: Config
    arm: str = ""
    """Name of its arm in a comparison, where that is more than its residual."""
    corpus: Mapping[str, str] = field(default_factory=dict)
    """Hashes of its text and tokenizer."""
    work: float = 1.0
    """Its operations."""
    keep_weights: bool = True
    """Keep the checkpoints when the run has ended."""
    baseline: Path | None = None
    """Folder of the run that its result is compared with."""

    @property
    def settings(self) -> Path:
        """The file of its settings, which its process reads."""
        return self.folder.parent.parent / "settings" / f"{self.folder.name}.json"

    @property
    def log(self) -> Path:
        """The file that the run prints to, attempt after attempt."""
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
    """Offset in the log at which this attempt begins."""
    began: float
    """Start of the process, on the clock of files."""

    def seconds(self) -> float:
        """Seconds that the run took, once it has finished. A resumed run has taken longer than its process."""
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
    """Keep `jobs` processes busy until every run has ended, or for so many seconds.

    After the seconds none is started, and those under way are asked to save and end. `whole`: none is started that
    would not end by then, judging by runs that have finished; a shorter run is started instead.

    Returns, by label, what to say about each run that failed. Raises Interrupted after a signal, when every run has
    saved and ended; `go_on` is the command that continues.
    """
    deadline = time.monotonic() + seconds
    waiting = [job for job in runs if not job.finished]
    running: list[Active] = []
    failures: dict[str, str] = {}
    durations: list[tuple[float, float]] = []  # work and seconds of runs that have finished

    def next_run() -> Job | None:
        # Where no run may be cut off, a shorter one is taken before a longer one.
        time_left = deadline - time.monotonic()
        for job in waiting:
            if not whole or at_most(job.work, durations) < time_left:
                return job
        return None

    with Interruption() as interruption, Tasks(console) as tasks:
        total = tasks.add("all runs", len(runs), len(runs) - len(waiting))
        try:
            while (waiting or running) and not interruption.signum and time.monotonic() < deadline:
                # Fill the places that are free.
                while len(running) < jobs and (job := next_run()):
                    waiting.remove(job)
                    running.append(start(job, jobs, tasks))
                if not running:
                    break  # no run that waits would end in time
                time.sleep(POLL_SECONDS)
                # Look after those that run.
                for active in list(running):
                    show(active, tasks)
                    if active.process.poll() is None:
                        continue
                    running.remove(active)
                    active.job.clear()  # at once: weights of a long study fill a disk
                    if active.job.finished:
                        durations.append((active.job.work, active.seconds()))
                    tasks.remove(active.task)
                    tasks.update(total, len(runs) - len(waiting) - len(running))
                    failures |= conclude(active, tasks)
        finally:
            stop(running)  # none is running, unless a signal or an error ended the loop
            for job in runs:
                job.clear()
        if interruption.signum:
            count = sum(job.finished for job in runs)
            raise interruption.error(f"{count} of {len(runs)} runs", go_on)
    return failures


def at_most(work: float, durations: Sequence[tuple[float, float]]) -> float:
    """Predict the seconds of a run from the work and seconds of finished ones.

    The prediction is the slowest run of about the size of the smallest finished run that is at least this large. If
    all are smaller, the largest is scaled up. It is 0 before any run has finished.
    """
    if not durations:
        return 0.0
    sizes = [size for size, _ in durations]
    like = min((size for size in sizes if size >= work), default=max(sizes))
    slowest = max(seconds for size, seconds in durations if like / ALIKE < size < like * ALIKE)
    return slowest * max(1.0, work / like)


def start(job: Job, jobs: int, tasks: Tasks) -> Active:
    """Launch a run and show it among the tasks."""
    task = tasks.add(job.label, job.config.train.steps, note="starting")
    log_start = job.log.stat().st_size if job.log.exists() else 0
    began = time.time()
    return Active(job, launch(job, jobs), task, log_start, began)


def launch(job: Job, jobs: int) -> subprocess.Popen[bytes]:
    """Start a run's process in a session of its own.

    Ctrl-C in the terminal reaches this process alone, which then asks the runs to stop once. If this process is
    killed, the runs notice that they are orphans.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    record_launch(job, jobs)
    # Runs side by side share the cores.
    environment = {}
    if jobs > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    flags = ["--config", str(job.settings), "--out", str(job.folder)]
    plugin = plugin_for(job.config.model.residual)
    if plugin:
        from headwater.residuals.plugins import folder_of

        flags += ["--plugin", plugin]
        # In the current folder --plugin looks by itself, and after the standard library.
        if (folder := folder_of(plugin)) != os.getcwd():
            folders = (folder, os.environ.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    # What was begun goes on.
    if (job.folder / CONFIG).exists():
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


def record_launch(job: Job, jobs: int) -> None:
    """Write launch.json: the most runs made at a time while this one ran, its arm, and its text.

    The number is None if an attempt before did not say, because times of runs that shared a machine tell how busy the
    machine was.
    """
    # An earlier attempt may have shared the machine with more runs than this one.
    begun = (job.folder / CONFIG).exists()
    largest_count = read_launch(job.folder).side_by_side
    if not begun or largest_count is not None:
        largest_count = max(largest_count or 1, jobs)
    corpus = dict(job.corpus)
    write_json(
        job.folder / LAUNCH, {"side_by_side": largest_count, "arm": job.arm, "corpus": corpus}
    )


def show(active: Active, tasks: Tasks) -> None:
    """The last complete training record, read from the end of the metrics file."""
    path = active.job.folder / METRICS
    if not (tasks.watched and path.exists()):
        return
    with path.open("rb") as file:
        # The last line may be cut off, so it is dropped.
        file.seek(max(0, path.stat().st_size - 65536))
        lines = file.read().split(b"\n")[:-1]
    train_lines = [line for line in lines if line.startswith(b'{"kind": "train"')]
    record = read_record(train_lines[-1]) if train_lines else None
    if record:
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
        note = f"loss {loss}  {record['tokens_per_second']:,.0f} tokens/s"
        tasks.update(active.task, record["step"], note)


def conclude(active: Active, tasks: Tasks) -> dict[str, str]:
    """Say how a run ended; returns what to say of its failure, by label."""
    job, code = active.job, active.process.returncode
    if code == 0:
        result = TrainResult.read(job.folder)
        text = f"{job.label}: {result.bits_per_byte:.4f} bits per byte in {result.seconds:.0f} s"
        if job.baseline is not None and (job.baseline / SUMMARY).exists():
            baseline = TrainResult.read(job.baseline)
            difference = result.bits_per_byte - baseline.bits_per_byte
            text += f", {difference:+.4f} to {baseline.residual}"
        tasks.say(text)
        return {}
    with job.log.open("rb") as file:
        # Earlier attempts have their words before this place.
        file.seek(active.log_start)
        text = file.read().decode(errors="replace")
    return {job.label: f"{job.label} (exit code {code}, see {job.log}): {cause(text, code)}"}


def refuse_failures(failures: Mapping[str, str], runs: int, advice: str) -> None:
    """Raises UserError where some of the runs failed."""
    if failures:
        listing = "\n  ".join(failures.values())
        raise UserError(
            f"{len(failures)} of {runs} runs failed:\n  {listing}\nThe others are kept. {advice}"
        )


def stop(running: list[Active]) -> None:
    """Ask every run to save and end, and wait until it has."""
    # All are asked first, so that they save at the same time.
    for active in running:
        active.process.terminate()
    for active in running:
        active.process.wait()
