"""One record of a run, read from its folder: settings, summary, metrics, and why it stopped."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headwater.errors import UserError
from headwater.folders import at_home
from headwater.runs.files import read_hashed, read_object
from headwater.runs.identity import HASHES
from headwater.runs.launch import Launch, read_launch
from headwater.runs.log import last_words

Record = dict[str, Any]

CONFIG, SUMMARY, METRICS = "config.json", "summary.json", "metrics.jsonl"
COMPARISON = "compare.json"
# By the reason in a record of a step that was left out: the limit on such steps in a row, what
# happened in one step, and in several.
SKIPS = {
    "nonfinite": ("skip_nonfinite", "the loss or the gradient was not finite", "not finite"),
    "spike": ("skip_spikes", "the loss was a spike", "a spike in the loss"),
}
# A comparison or a study, a run, runs side by side.
PLACES = ("runs/*/config.json", "config.json", "*/config.json")
EXPECTED = (
    "a run folder holds config.json and metrics.jsonl; a comparison's or a study's holds runs/ "
    "with a folder per run"
)


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    name: str
    residual: str
    seed: int | None
    config: Record
    summary: Record | None
    """None of a run that has not finished."""
    train: list[Record]
    evals: list[Record]
    depth: list[Record]
    notes: list[str]
    written: datetime
    stopped: str = ""
    """Why it ended before its last step, where the folder says so."""
    beside: int | None = None
    """The most runs made at a time, this one included; None if nobody recorded it."""
    tokenizer: str = ""
    """bytes or bpe, by the tokenizer beside the run: tokens may have been made before."""
    extended: bool = False
    """True if it went on to other steps than it was planned for."""
    corpus: Record = field(default_factory=dict)
    """Hashes of text and tokenizer, where the run, or what started it, recorded them."""
    switches: tuple[str, ...] = ()
    """Settings in which it differs on purpose from other runs, as its name `residual` says."""

    def final(self, key: str) -> float | None:
        """Return a number of the run's end, or of the last evaluation of an unfinished run."""
        if self.summary is not None:
            return number(self.summary.get(key))
        values = [number(row.get(key)) for row in self.evals]
        return next((value for value in reversed(values) if value is not None), None)


def number(value: object) -> float | None:
    """A finite number, or None: NaN and infinity have no place on an axis or in JSON."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None


def paths_of(folders: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return folders as paths, one folder as a list of one."""
    if isinstance(folders, str | Path):
        folders = [folders]
    return [at_home(folder) for folder in folders]


def find_runs(folders: list[Path]) -> list[Path]:
    """Run folders among `folders`, with comparison folders and folders of runs opened.

    Each run comes once, in the order of the folders.
    """
    if not folders:
        raise UserError("give at least one folder: " + EXPECTED)
    # By their real places, as a run may lie in two of the folders.
    runs: dict[Path, Path] = {}
    for folder in folders:
        for run in _runs_in(folder):
            runs.setdefault(run.resolve(), run)
    return list(runs.values())


def _runs_in(folder: Path) -> list[Path]:
    """Runs of a folder by name; those of one arm stand together, by seed."""
    # The first kind of place that has runs is what the folder is.
    for place in PLACES:
        runs = [path.parent for path in folder.glob(place)]
        if runs:
            return sorted(runs, key=lambda run: run.name.rsplit("-seed", 1))
    raise UserError(f"{folder} is not a run, nor a folder of runs: {EXPECTED}")


def read_runs(folders: list[Path], others: Sequence[RecordedRun] = ()) -> list[RecordedRun]:
    """Runs of run folders and comparison folders. A page that has `others` may have no folder."""
    if others and not folders:
        return []
    return [read_run(folder) for folder in find_runs(folders)]


def beside(folders: list[Path], name: str) -> Path:
    """Return the default place of a page."""
    if not folders:
        raise UserError("name the file to write: no run's folder was given to put it in")
    return folders[0] / name


def find_order(folders: list[Path]) -> list[str]:
    """Return residuals as comparisons list them, the baseline first; else the plain residual."""
    names: list[str] = []
    for folder in folders:
        if (folder / COMPARISON).is_file():
            residuals = read_object(folder / COMPARISON).get("residuals")
            names += map(short_name, residuals) if isinstance(residuals, list) else []
    return list(dict.fromkeys(names)) or ["standard"]


def read_run(folder: Path) -> RecordedRun:
    """Read a run's folder. Raises UserError if it is no run; `notes` name damaged records."""
    config = read_object(folder / CONFIG)
    if not isinstance(config.get("model"), dict):
        raise UserError(
            f'{folder / CONFIG} has no "model" table, so {folder} is not a run: {EXPECTED}'
        )
    # What is damaged is left out, and said.
    notes: list[str] = []
    summary = _read_summary(folder / SUMMARY, notes)
    rows = read_metrics(folder / METRICS, notes)
    if not rows:
        notes.append("no metrics were recorded")
    notes += skip_notes(by_step(rows, "skip"))
    extensions = by_step(rows, "extend")
    for row in extensions:
        notes.append(
            f"planned for {row.get('planned')} steps, and for {row.get('steps')} from step {row['step']} on: its "
            "learning rate follows no single schedule"
        )

    # The summary knows the seed best; without it the settings do.
    settings = section(config, "train")
    seed = (summary or {}).get("seed", settings.get("seed"))
    launch = read_launch(folder)
    stopped = ""
    if summary is None:
        stopped = stop_reason(rows, settings) or last_words(folder / "log.txt")
    return RecordedRun(
        name=folder.resolve().name,
        residual=_residual_of(config, summary or {}, launch),
        seed=seed if isinstance(seed, int) else None,
        config=config,
        summary=summary,
        train=by_step(rows, "train"),
        evals=by_step(rows, "eval"),
        depth=by_step(rows, "depth"),
        notes=notes,
        written=last_write(folder),
        stopped=stopped,
        beside=launch.side_by_side,
        tokenizer=read_tokenizer(folder / "tokenizer.json"),
        corpus=_corpus_of(summary or {}, launch),
        extended=bool(extensions),
        switches=tuple(f"model.{key}" for key in re.findall(r"\+([a-z]\w*)=", launch.arm)),
    )


def _residual_of(config: Record, summary: Record, launch: Launch) -> str:
    """Name a run's residual, with the switches of the model that a comparison set."""
    in_settings = section(config, "model").get("residual")
    return short_name(launch.arm or summary.get("residual") or in_settings or "unnamed")


def _corpus_of(summary: Record, launch: Launch) -> Record:
    """Return hashes of the run's text as it began, or, where it says so, as it ended."""
    ended = {name: summary[name] for name in HASHES if summary.get(name)}
    return launch.corpus | ended


def _read_summary(path: Path, notes: list[str]) -> Record | None:
    if not path.is_file():
        return None
    try:
        return read_hashed(path)
    except UserError:
        notes.append(
            "summary.json cannot be read or has changed since it was written, so the run is treated as unfinished"
        )
        return None


def short_name(residual: object) -> str:
    """A residual without the module that registered it, which settings name and readers know."""
    name, colon, options = str(residual).partition(":")
    return name.partition("@")[0] + colon + options


def section(config: Record, name: str) -> Record:
    """One table of a configuration; empty if it is no table."""
    values = config.get(name)
    return values if isinstance(values, dict) else {}


def read_tokenizer(path: Path) -> str:
    """Return the kind of a tokenizer; empty if there is none, as in an archive of runs."""
    try:
        return "bytes" if read_object(path).get("type") == "bytes" else "bpe"
    except UserError:
        return ""


def read_metrics(path: Path, notes: list[str]) -> list[Record]:
    """Read metrics.jsonl. Lines that an interruption cut off are left out and noted."""
    if not path.is_file():
        return []
    rows: list[Record] = []
    broken = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            broken += 1
            continue
        if isinstance(row, dict) and _complete(row):
            rows.append(row)
        else:
            broken += 1
    if broken:
        notes.append(f"{broken} unreadable line{'s' * (broken > 1)} of metrics.jsonl left out")
    return rows


def _complete(row: Record) -> bool:
    """Check that a record has its step and tokens; steps that were left out saw no tokens."""
    counted = row.get("kind") == "skip" or number(row.get("tokens")) is not None
    return counted and isinstance(row.get("step"), int)


def by_step(rows: list[Record], kind: str) -> list[Record]:
    """Return records of one kind in order of step. Of a step that was resumed, the last counts."""
    # The last line of a step overwrites the ones before it.
    latest = {row["step"]: row for row in rows if row.get("kind") == kind}
    return [latest[step] for step in sorted(latest)]


def skip_notes(skips: list[Record]) -> list[str]:
    """Write a note on the steps that were left out, with their reasons, if there are such steps."""
    if not skips:
        return []
    # How often each reason occurred, in its own words.
    reasons = []
    for kind, count in Counter(str(row.get("reason")) for row in skips).items():
        words = SKIPS[kind][2] if kind in SKIPS else kind
        reasons.append(f"{count} {words}")
    subject = f"{len(skips)} steps were" if len(skips) > 1 else "1 step was"
    steps = ", ".join(str(row["step"]) for row in skips[:5])
    return [f"{subject} left out of training ({', '.join(reasons)}), at step {steps}"]


def stop_reason(rows: list[Record], settings: Record) -> str:
    """Say why the trainer stopped by itself, if the metrics end so.

    It stops at more bad steps in a row than its settings allow, at a gradient of zero, and at a
    validation loss that is not finite.
    """
    # A run that stopped by itself has its reason in its last record.
    last = rows[-1] if rows else {}
    kind, loss = last.get("kind"), number(last.get("loss"))
    if kind == "train" and last.get("grad_norm") == 0 and loss is not None and loss > 0:
        return f"stopped at step {last['step']}: the gradient was zero"
    if kind == "eval" and loss is None:
        return f"stopped at step {last['step']}: the validation loss was not finite"
    reason = str(last.get("reason"))
    if kind != "skip" or reason not in SKIPS:
        return ""

    # As many bad steps in a row as the settings allow do not stop a run.
    limit, what_happened, _ = SKIPS[reason]
    bad_steps = {row["step"] for row in by_step(rows, "skip") if row.get("reason") == reason}
    in_a_row = 1
    while last["step"] - in_a_row in bad_steps:
        in_a_row += 1
    if in_a_row <= (settings.get(limit) or 0):
        return ""
    return f"stopped at step {last['step']}: {what_happened}"


def last_write(folder: Path) -> datetime:
    files = [folder / name for name in (CONFIG, METRICS, SUMMARY)]
    times = [file.stat().st_mtime for file in files if file.is_file()]
    return datetime.fromtimestamp(max(times), UTC)
