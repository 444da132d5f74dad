"""Several residuals by several seeds on equal tokens: one process per run, one table.

Runs with the same seed see the same batches in the same order, so their losses are compared in pairs. Each run has its
own process, which makes its peak memory honest and keeps a crash from taking the others along. The folder is the state:
finished runs are kept, unfinished ones resume.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from headwater.errors import UserError
from headwater.train.config import Config, check, differences
from headwater.train.data import SPLITS, prepare
from headwater.train.folder import locked, read_json, write_json
from headwater.train.interrupt import Interruption

POLL_SECONDS = 0.2
MEANS = ("loss", "bits_per_byte", "seconds", "peak_memory_bytes")
COUNTS = ("parameters", "residual_parameters", "flops_per_token", "tokens")


def compare(
    config: Config,
    out: Path,
    *,
    residuals: Sequence[str],
    seeds: Sequence[int],
    jobs: int = 1,
    resume: bool = False,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Run what is not finished yet, print the table and return its rows; the first residual is the baseline."""
    console = console or Console()
    check(config)
    if jobs < 1:
        raise UserError(f"--jobs must be at least 1; got {jobs}")
    with locked(out):
        residuals, seeds = plan(config, out, expand(residuals, config), list(seeds), resume=resume)
        runs = [Job(spec, seed, out / "runs" / slug(spec, seed)) for seed in seeds for spec in residuals]
        failures = run_all(runs, out, config, jobs, console)
        rows = tabulate(runs, residuals)
        write_json(out / "table.json", rows)
        console.print(draw(rows, config))
    if failures:
        listing = "\n  ".join(failures)
        raise UserError(
            f"{len(failures)} of {len(runs)} runs failed:\n  {listing}\n"
            f"The others are kept. Mend the cause and go on with: headwater compare --out {out} --resume"
        )
    return rows


@dataclass(frozen=True)
class Job:
    residual: str
    seed: int
    folder: Path

    @property
    def finished(self) -> bool:
        return (self.folder / "summary.json").exists()

    @property
    def label(self) -> str:
        return f"{self.residual} seed {self.seed}"


@dataclass(frozen=True)
class Active:
    """A job whose process is running."""

    job: Job
    process: subprocess.Popen[bytes]
    task: TaskID


def slug(residual: str, seed: int) -> str:
    return f"{residual.replace(':', '_')}-seed{seed}"


def expand(residuals: Sequence[str], config: Config) -> list[str]:
    """`all` as every registered name. Corpus and residuals are tried here, so that a misfit is known at once."""
    from headwater.residuals import build, names
    from headwater.train.run import resolve_model

    # The first residual is the baseline: under `all`, the plain one.
    chosen = sorted(names(), key=lambda name: name != "standard") if list(residuals) == ["all"] else list(residuals)
    data = prepare(config.data)
    model = resolve_model(config.model, data)
    for split in SPLITS:
        data.windows(split, model.context)
    try:
        for spec in chosen:
            build(spec, model.dim, model.sublayers, model.kinds)
    except ValueError as error:
        raise UserError(f"residual {spec!r} does not fit: {error}") from None
    return chosen


def plan(
    config: Config, out: Path, residuals: list[str], seeds: list[int], *, resume: bool
) -> tuple[list[str], list[int]]:
    """What the folder is to hold, written to compare.json: on resuming, what it held and then what is new."""
    path = out / "compare.json"
    if path.exists():
        if not resume:
            raise UserError(f"{out} already holds a comparison: continue it with --resume, or choose another --out")
        saved = read_json(path)
        differing = differences(saved["config"], asdict(config))
        if differing:
            listing = "\n  ".join(differing)
            raise UserError(f"{out} holds a comparison of another configuration:\n  {listing}\nChoose another --out")
        residuals, seeds = saved["residuals"] + residuals, saved["seeds"] + seeds
    residuals, seeds = list(dict.fromkeys(residuals)), list(dict.fromkeys(seeds))
    write_json(out / "settings.json", asdict(config))
    write_json(path, {"residuals": residuals, "seeds": seeds, "config": asdict(config)})
    return residuals, seeds


def run_all(runs: list[Job], out: Path, config: Config, jobs: int, console: Console) -> list[str]:
    """Keep `jobs` processes busy until every run has ended; returns what to say about those that failed."""
    waiting = [job for job in runs if not job.finished]
    running: list[Active] = []
    failures: list[str] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    live = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
    with Interruption() as interruption, live:
        total = live.add_task("all runs", total=len(runs), completed=len(runs) - len(waiting), note="")
        while (waiting or running) and not interruption.signum:
            while waiting and len(running) < jobs:
                job = waiting.pop(0)
                task = live.add_task(job.label, total=config.train.steps, note="starting")
                running.append(Active(job, launch(job, out, jobs), task))
            time.sleep(POLL_SECONDS)
            for active in list(running):
                show(active, live)
                if active.process.poll() is not None:
                    running.remove(active)
                    live.remove_task(active.task)
                    live.advance(total)
                    failures += conclude(active.job, active.process.returncode, console)
        if interruption.signum:
            stop(running)
            done = sum(job.finished for job in runs)
            raise interruption.error(f"{done} of {len(runs)} runs", f"headwater compare --out {out}")
    return failures


def launch(job: Job, out: Path, jobs: int) -> subprocess.Popen[bytes]:
    """Its own session: Ctrl-C in the terminal reaches this process alone, which then asks the runs to stop once."""
    job.folder.mkdir(parents=True, exist_ok=True)
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))} if jobs > 1 else {}
    flags = ["--residual", job.residual, "--seed", str(job.seed), "--out", str(job.folder), "--resume"]
    with (job.folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "headwater.cli", "train", "--config", str(out / "settings.json"), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads},
            start_new_session=True,
        )


def show(active: Active, live: Progress) -> None:
    """The last complete training record, read from the end of the metrics file."""
    path = active.job.folder / "metrics.jsonl"
    if live.disable or not path.exists():
        return
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        lines = file.read().split(b"\n")[:-1]
    record = next((json.loads(line) for line in reversed(lines) if line.startswith(b'{"kind": "train"')), None)
    if record:
        note = f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s"
        live.update(active.task, completed=record["step"], note=note)


def conclude(job: Job, code: int, console: Console) -> list[str]:
    if code == 0:
        summary = read_json(job.folder / "summary.json")
        line = f"{job.label}: {summary['bits_per_byte']:.4f} bits per byte in {summary['seconds']:.0f} s"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
        return []
    lines = (job.folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return [f"{job.label} (exit code {code}, see {job.folder / 'log.txt'}): {lines[-1] if lines else 'no output'}"]


def stop(running: list[Active]) -> None:
    """Ask every run to save and end, and wait until it has."""
    for active in running:
        active.process.terminate()
    for active in running:
        active.process.wait()


def tabulate(runs: list[Job], residuals: list[str]) -> list[dict[str, Any]]:
    """One row per residual over its finished runs: means with spread, and the difference to the first residual."""
    summaries = {(run.residual, run.seed): read_json(run.folder / "summary.json") for run in runs if run.finished}
    rows = []
    for residual in residuals:
        mine = {seed: summary for (name, seed), summary in summaries.items() if name == residual}
        if not mine:
            continue
        paired = [
            s["bits_per_byte"] - summaries[residuals[0], seed]["bits_per_byte"]
            for seed, s in mine.items()
            if (residuals[0], seed) in summaries
        ]
        rows.append(
            {
                "residual": residual,
                "seeds": sorted(mine),
                **{key: next(iter(mine.values()))[key] for key in COUNTS},
                **{key: spread([summary[key] for summary in mine.values()]) for key in MEANS},
                "difference": spread(paired),
            }
        )
    return rows


def spread(values: list[float]) -> dict[str, float | None]:
    """Mean and sample standard deviation; one value has no spread, and none has no mean."""
    return {
        "mean": statistics.fmean(values) if values else None,
        "spread": statistics.stdev(values) if len(values) > 1 else None,
    }


def draw(rows: list[dict[str, Any]], config: Config) -> Table:
    seeds = max((len(row["seeds"]) for row in rows), default=0)
    tokens = max((row["tokens"] for row in rows), default=0)
    title = f"{config.train.steps} steps, {tokens:,} tokens, mean ± standard deviation of {seeds} seeds"
    # Narrow gaps: the table fits 80 columns, and only a residual's name may be folded.
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption = "bits/byte on held-out text; difference to the first row, seed by seed; FLOPs per token"
    table.add_column("residual", overflow="fold", min_width=13)
    for name in ("bits/byte", "difference", "params", "FLOPs", "seconds", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["residual"],
            _plus_minus(row["bits_per_byte"], "{:.4f}"),
            _plus_minus(row["difference"], "{:+.4f}", "{:.4f}") if row is not rows[0] else "baseline",
            _short(row["parameters"]),
            _short(row["flops_per_token"]),
            _plus_minus(row["seconds"], "{:.0f}"),
            f"{row['peak_memory_bytes']['mean'] / 2**20:.0f}",
        )
    return table


def _plus_minus(value: dict[str, float | None], form: str, spread_form: str | None = None) -> str:
    if value["mean"] is None:
        return "-"
    text = form.format(value["mean"])
    return text if value["spread"] is None else f"{text} ± {(spread_form or form).format(value['spread'])}"


def _short(count: float) -> str:
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.4g}{unit}"
        count /= 1000
    return f"{count:.4g}T"
