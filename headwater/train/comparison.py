"""Several residuals by several seeds on equal tokens: one process per run, one table.

Runs with the same seed see the same batches in the same order, so their losses are compared in pairs. Each run has its
own process, which makes its peak memory honest and keeps a crash from taking the others along. The folder is the state:
finished runs are kept, unfinished ones resume.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import TaskID

from headwater.errors import UserError
from headwater.train.config import OUTER, Config, check, differences
from headwater.train.data.dataset import SPLITS, Dataset, prepare
from headwater.train.files import locked, read_json, write_json
from headwater.train.monitor.interrupts import PARENT, Interruption
from headwater.train.monitor.metrics import read_record
from headwater.train.monitor.progress import Tasks
from headwater.train.results import SUMMARY, CompareResult, TrainResult
from headwater.train.table import draw, tabulate

POLL_SECONDS = 0.2
PROGRESS = re.compile(r"step \d+(/\d+|:) ")


def compare(
    config: Config,
    out: str | Path,
    *,
    residuals: Sequence[str],
    seeds: Sequence[int],
    jobs: int = 1,
    resume: bool = False,
    progress: bool = True,
) -> CompareResult:
    """Train several residuals with several seeds on equal tokens; what `headwater compare` calls.

    Each run is a process of its own, so that this works from a script and from a notebook alike.

    Arguments:
        config: of every run but for its residual and seed.
        out: folder of the comparison: table.json, and under runs/ a folder for each run, which `load_run` takes.
        residuals: specifications such as "attnres-block:block=4", the baseline first; "all" is every registered one.
        seeds: of the initial weights and the order of the data; runs of one seed are compared in pairs.
        jobs: runs at a time; the cores are shared among them.
        resume: keep what is finished in `out`, continue what is not, and add the residuals and seeds that are new.
        progress: show how far the runs are, and the table at the end.

    Returns: a `CompareResult`: `.rows`, one for each residual, and `.runs`, a `TrainResult` for each finished run.

    Raises: `headwater.errors.UserError` if arguments or folder do not fit (before anything is run), or after all runs
        have ended if one of them failed: the others are kept, table.json is written, and `resume=True` tries again.
        `headwater.errors.Interrupted` after Ctrl-C, when every run has been saved.

        result = compare(Config(), "runs/pair", residuals=["standard", "attnres-block"], seeds=[0, 1], jobs=2)
        print(result.rows[1].difference.mean)
    """
    console, out = Console(quiet=not progress), Path(out)
    residuals, seeds = admit(config, residuals, seeds, jobs)
    with locked(out):
        data = prepare(config.data)
        try_out(residuals, config, data)
        residuals, seeds = plan(config, out, residuals, seeds, data.identity, resume=resume)
        runs = [Job(spec, seed, out / "runs" / slug(spec, seed)) for seed in seeds for spec in residuals]
        failures = run_all(runs, out, config, jobs, console)
        done = [run for run in runs if run.finished]
        finished = {(run.residual, run.seed): TrainResult.read(run.folder) for run in done}
        company = {spec: side_by_side([run for run in done if run.residual == spec]) for spec in residuals}
        rows = tabulate(finished, residuals, company)
        result = CompareResult(folder=out, rows=rows, runs=tuple(finished.values()))
        write_json(out / "table.json", result.table())
        console.print(draw(result.rows, config))
    if failures:
        listing = "\n  ".join(failures)
        raise UserError(
            f"{len(failures)} of {len(runs)} runs failed:\n  {listing}\n"
            f"The others are kept. Mend the cause and go on with: headwater compare --out {out} --resume"
        )
    return result


@dataclass(frozen=True)
class Job:
    residual: str
    seed: int
    folder: Path

    @property
    def log(self) -> Path:
        """What the run prints, attempt after attempt."""
        return self.folder / "log.txt"

    @property
    def finished(self) -> bool:
        return (self.folder / SUMMARY).exists()

    @property
    def label(self) -> str:
        return f"{self.residual} seed {self.seed}"


@dataclass(frozen=True)
class Active:
    """A job whose process is running."""

    job: Job
    process: subprocess.Popen[bytes]
    task: TaskID
    log_start: int
    """Where in the log this attempt begins."""


def slug(residual: str, seed: int) -> str:
    return f"{residual.replace(':', '_')}-seed{seed}"


def admit(config: Config, residuals: Sequence[str], seeds: Sequence[int], jobs: int) -> tuple[list[str], list[int]]:
    """The arguments checked, `all` spelled out and every repetition dropped."""
    check(config)
    for seed in seeds:
        check(replace(config, train=replace(config.train, seed=seed)))
    if jobs < 1:
        raise UserError(f"--jobs must be at least 1; got {jobs}")
    if not seeds:
        raise UserError("--seeds needs at least one seed, for example: --seeds 0 1 2")
    return expand(residuals), list(dict.fromkeys(seeds))


def expand(residuals: Sequence[str]) -> list[str]:
    """`all` as every registered name, the plain residual first, for the first of the list is the baseline."""
    from headwater.residuals import names

    everything = sorted(names(), key=lambda name: name != "standard")
    if not residuals:
        raise UserError(f"--residuals needs at least one name, or `all`. Valid: {', '.join(everything)}")
    return distinct([spec for entry in residuals for spec in (everything if entry == "all" else [entry])])


def distinct(residuals: Sequence[str]) -> list[str]:
    """Each residual once, under the first of its spellings."""
    from headwater.residuals import parse

    kept: dict[tuple[Any, ...], str] = {}
    for spec in residuals:
        try:
            name, options = parse(spec)
        except ValueError as error:
            raise UserError(f"residual {spec!r} does not fit: {error}") from None
        kept.setdefault((name, *sorted(options.items())), spec)
    return list(kept.values())


def try_out(residuals: Sequence[str], config: Config, data: Dataset) -> None:
    """Corpus and residuals are tried before anything runs, so that a misfit is known at once."""
    from headwater.residuals import build
    from headwater.train.run import resolve_model

    model = resolve_model(config.model, data)
    for split in SPLITS:
        data.windows(split, model.context)
    for spec in residuals:
        try:
            build(spec, model.dim, model.sublayers, model.kinds)
        except ValueError as error:
            raise UserError(f"residual {spec!r} does not fit: {error}") from None


def plan(
    config: Config, out: Path, residuals: list[str], seeds: list[int], corpus: dict[str, str], *, resume: bool
) -> tuple[list[str], list[int]]:
    """What the folder is to hold, written to compare.json: on resuming, what it held and then what is new."""
    path = out / "compare.json"
    if path.exists():
        if not resume:
            raise UserError(f"{out} already holds a comparison: continue it with --resume, or choose another --out")
        saved = read_json(path)
        differing = differences(saved["config"], asdict(config), OUTER)  # its times and memory are compared too
        if differing:
            listing = "\n  ".join(differing)
            raise UserError(f"{out} holds a comparison of another configuration:\n  {listing}\nChoose another --out")
        refuse_other_corpus(out, saved.get("corpus", corpus), corpus, config)
        residuals, seeds = distinct(saved["residuals"] + residuals), list(dict.fromkeys(saved["seeds"] + seeds))
    write_json(out / "settings.json", asdict(config))
    write_json(path, {"residuals": residuals, "seeds": seeds, "corpus": corpus, "config": asdict(config)})
    return residuals, seeds


def refuse_other_corpus(out: Path, saved: dict[str, str], found: dict[str, str], config: Config) -> None:
    """The configuration names the files; this holds what is in them."""
    listing = [
        f"{key}: {saved.get(key, '')[:12]} there, {found[key][:12]} now"
        for key in found
        if saved.get(key) != found[key]
    ]
    if listing:
        raise UserError(
            f"{out} holds a comparison on another corpus: {', '.join(config.data.source)} has changed since it began "
            f"({'; '.join(listing)}), and its runs would no longer be on equal tokens. Restore the files (or, for "
            "`stdlib`, run the same Python), or choose another --out"
        )


def run_all(runs: list[Job], out: Path, config: Config, jobs: int, console: Console) -> list[str]:
    """Keep `jobs` processes busy until every run has ended; returns what to say about those that failed."""
    waiting = [job for job in runs if not job.finished]
    running: list[Active] = []
    failures: list[str] = []
    with Interruption() as interruption, Tasks(console) as tasks:
        total = tasks.add("all runs", len(runs), len(runs) - len(waiting))
        try:
            while (waiting or running) and not interruption.signum:
                while waiting and len(running) < jobs:
                    job = waiting.pop(0)
                    task = tasks.add(job.label, config.train.steps, note="starting")
                    start = job.log.stat().st_size if job.log.exists() else 0
                    running.append(Active(job, launch(job, out, jobs), task, start))
                time.sleep(POLL_SECONDS)
                for active in list(running):
                    show(active, tasks)
                    if active.process.poll() is not None:
                        running.remove(active)
                        tasks.remove(active.task)
                        tasks.update(total, len(runs) - len(waiting) - len(running))
                        failures += conclude(active, tasks)
        finally:
            stop(running)  # none is left, unless a signal or an error ended the loop
        if interruption.signum:
            done = sum(job.finished for job in runs)
            raise interruption.error(f"{done} of {len(runs)} runs", f"headwater compare --out {out}")
    return failures


def launch(job: Job, out: Path, jobs: int) -> subprocess.Popen[bytes]:
    """Its own session: Ctrl-C in the terminal reaches this process alone, which then asks the runs to stop once. Should
    this process be killed, they notice that they are orphans."""
    job.folder.mkdir(parents=True, exist_ok=True)
    record_company(job, jobs)
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))} if jobs > 1 else {}
    flags = ["--residual", job.residual, "--seed", str(job.seed), "--out", str(job.folder)]
    if (job.folder / "config.json").exists():
        flags.append("--resume")
    with job.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "headwater.cli", "train", "--config", str(out / "settings.json"), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads, PARENT: str(os.getpid())},
            start_new_session=True,
        )


def record_company(job: Job, jobs: int) -> None:
    """launch.json: the most runs made at a time while this one ran, None where an attempt before did not say. Times of
    runs that shared a machine tell how busy it was."""
    path, begun = job.folder / "launch.json", (job.folder / "config.json").exists()
    before = read_json(path)["side_by_side"] if path.exists() else None if begun else 1
    write_json(path, {"side_by_side": None if before is None else max(before, jobs)})


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
    records = (read_record(line) for line in reversed(lines) if line.startswith(b'{"kind": "train"'))
    record = next(filter(None, records), None)
    if record:
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
        note = f"loss {loss}  {record['tokens_per_second']:,.0f} tokens/s"
        tasks.update(active.task, record["step"], note)


def conclude(active: Active, tasks: Tasks) -> list[str]:
    job, code = active.job, active.process.returncode
    if code == 0:
        result = TrainResult.read(job.folder)
        tasks.say(f"{job.label}: {result.bits_per_byte:.4f} bits per byte in {result.seconds:.0f} s")
        return []
    with job.log.open("rb") as file:
        file.seek(active.log_start)
        said = file.read().decode(errors="replace")
    return [f"{job.label} (exit code {code}, see {job.log}): {cause(said, code)}"]


def cause(said: str, code: int) -> str:
    """Why a run failed: its last message to the user in full, else the signal that killed it, else its last words."""
    lines = [line for line in said.splitlines() if line.strip()]
    begins = [number for number, line in enumerate(lines) if line.startswith("headwater: ")]
    if begins:
        first, *rest = lines[begins[-1] :]
        return "\n    ".join([first.removeprefix("headwater: "), *rest])
    if code < 0:
        hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
        return f"it was killed by signal {-code} ({signal.strsignal(-code)}){hint}"
    return next((line for line in reversed(lines) if not PROGRESS.match(line)), "it left no message")


def stop(running: list[Active]) -> None:
    """Ask every run to save and end, and wait until it has."""
    for active in running:
        active.process.terminate()
    for active in running:
        active.process.wait()
