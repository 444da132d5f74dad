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

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from headwater.errors import UserError
from headwater.stats import BASELINE, ONE_SEED, Paired, Stat, limits, pair, summarize
from headwater.train.config import OUTER, Config, check, differences
from headwater.train.data.dataset import SPLITS, Dataset, prepare
from headwater.train.files import locked, read_json, write_json
from headwater.train.monitor.interrupts import PARENT, Interruption
from headwater.train.monitor.metrics import read_record

POLL_SECONDS = 0.2
MEANS = ("loss", "bits_per_byte", "seconds", "peak_memory_bytes")
PROGRESS = re.compile(r"step \d+(/\d+|:) ")
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
    residuals, seeds = admit(config, residuals, seeds, jobs)
    with locked(out):
        data = prepare(config.data)
        try_out(residuals, config, data)
        residuals, seeds = plan(config, out, residuals, seeds, data.identity, resume=resume)
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
    def log(self) -> Path:
        """What the run prints, attempt after attempt."""
        return self.folder / "log.txt"

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
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    live = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
    with Interruption() as interruption, live:
        total = live.add_task("all runs", total=len(runs), completed=len(runs) - len(waiting), note="")
        try:
            while (waiting or running) and not interruption.signum:
                while waiting and len(running) < jobs:
                    job = waiting.pop(0)
                    task = live.add_task(job.label, total=config.train.steps, note="starting")
                    start = job.log.stat().st_size if job.log.exists() else 0
                    running.append(Active(job, launch(job, out, jobs), task, start))
                time.sleep(POLL_SECONDS)
                for active in list(running):
                    show(active, live)
                    if active.process.poll() is not None:
                        running.remove(active)
                        live.remove_task(active.task)
                        live.advance(total)
                        failures += conclude(active, console)
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


def show(active: Active, live: Progress) -> None:
    """The last complete training record, read from the end of the metrics file."""
    path = active.job.folder / "metrics.jsonl"
    if live.disable or not path.exists():
        return
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        lines = file.read().split(b"\n")[:-1]
    records = (read_record(line) for line in reversed(lines) if line.startswith(b'{"kind": "train"'))
    record = next(filter(None, records), None)
    if record:
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
        note = f"loss {loss}  {record['tokens_per_second']:,.0f} tokens/s"
        live.update(active.task, completed=record["step"], note=note)


def conclude(active: Active, console: Console) -> list[str]:
    job, code = active.job, active.process.returncode
    if code == 0:
        summary = read_json(job.folder / "summary.json")
        line = f"{job.label}: {summary['bits_per_byte']:.4f} bits per byte in {summary['seconds']:.0f} s"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
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


def tabulate(runs: list[Job], residuals: list[str]) -> list[dict[str, Any]]:
    """One row per residual over its finished runs: means with spread, and the difference to the first residual."""
    summaries: dict[str, dict[int, dict[str, Any]]] = {residual: {} for residual in residuals}
    for run in runs:
        if run.finished:
            summaries[run.residual][run.seed] = read_json(run.folder / "summary.json")
    bits = {name: {seed: s["bits_per_byte"] for seed, s in mine.items()} for name, mine in summaries.items()}
    pairs = {name: pair(values, bits[residuals[0]]) for name, values in bits.items()}
    comparisons = sum(len(values) > 1 for name, values in pairs.items() if name != residuals[0])
    rows = []
    for residual, mine in summaries.items():
        if not mine:
            continue
        paired = Paired(pairs[residual], comparisons) if residual != residuals[0] and pairs[residual] else None
        rows.append(
            {
                "residual": residual,
                "seeds": sorted(mine),
                **{key: next(iter(mine.values()))[key] for key in COUNTS},
                **{key: spread([summary[key] for summary in mine.values()]) for key in MEANS},
                "difference": spread(pairs[residual]),
                "pairs": len(pairs[residual]),
                "interval": list(paired.interval) if paired and paired.interval else None,
                "verdict": paired.verdict if paired else BASELINE if residual == residuals[0] else None,
                "side_by_side": side_by_side([run for run in runs if run.finished and run.residual == residual]),
            }
        )
    return rows


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and sample standard deviation; one value has no spread, and none has no mean."""
    found = summarize(values)
    return {"mean": found.mean if found else None, "spread": found.spread if found else None}


def draw(rows: list[dict[str, Any]], config: Config) -> Table:
    seeds = max((len(row["seeds"]) for row in rows), default=0)
    tokens = max((row["tokens"] for row in rows), default=0)
    over = "one seed" if seeds == 1 else f"mean ± standard deviation of {seeds} seeds"
    title = f"{config.train.steps} steps, {tokens:,} tokens, {over}"
    # Narrow gaps: the table fits 80 columns, and only a residual's name may be folded.
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = _caption(rows), "left"
    table.add_column("residual", overflow="fold", min_width=13)
    for name in ("bits/byte", "difference", "params", "FLOPs", "seconds", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["residual"],
            _plus_minus(row["bits_per_byte"], ".4f"),
            _difference(row),
            _short(row["parameters"]),
            _short(row["flops_per_token"]),
            _plus_minus(row["seconds"], ".0f"),
            f"{row['peak_memory_bytes']['mean'] / 2**20:.0f}",
        )
    return table


def _caption(rows: list[dict[str, Any]]) -> str:
    judged = [row for row in rows if row["interval"]]
    words = "bits/byte on held-out text; FLOPs per token; difference to the first row, seed by seed"
    if judged:
        corrected = f" ({len(judged)} residuals at once, Bonferroni)" if len(judged) > 1 else ""
        words += f", ± its 95 % interval{corrected}"
    counts = [row["side_by_side"] for row in rows]
    if counts and None in counts:
        words += "; seconds are not comparable: how many runs were made side by side is unknown"
    elif max(counts, default=1) > 1:
        words += f"; seconds are not comparable: up to {max(counts)} runs were made at a time"
    fewest = min((row["pairs"] for row in rows if row["verdict"] not in (None, BASELINE)), default=0)
    return f"{words}.\n{limits(fewest, len(judged))}" if fewest else words


def _difference(row: dict[str, Any]) -> str:
    if row["verdict"] in (None, BASELINE):
        return row["verdict"] or "-"
    shown = Stat(row["difference"]["mean"], None, 1).text(sign="+")
    if row["verdict"] == ONE_SEED:
        return f"{shown} {ONE_SEED}"
    low, high = row["interval"]
    return f"{shown} ± {(high - low) / 2:.4f}\n{row['verdict']}"


def _plus_minus(value: dict[str, float | None], form: str) -> str:
    return "-" if value["mean"] is None else Stat(value["mean"], value["spread"], 0).text(form)


def _short(count: float) -> str:
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.4g}{unit}"
        count /= 1000
    return f"{count:.4g}T"
