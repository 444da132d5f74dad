"""Reads run folders: configuration, metrics and summary, as plain values. No torch: a report is made anywhere."""

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

Record = dict[str, Any]

SKIPS = {  # by the reason in a record: the limit on them in a row, one step, several
    "nonfinite": ("skip_nonfinite", "the loss or the gradient was not finite", "not finite"),
    "spike": ("skip_spikes", "the loss was a spike", "a spike in the loss"),
}
PROGRESS = re.compile(r"step \d+(/\d+|:) ")  # what a run prints as it goes on

PLACES = (
    "runs/*/config.json",
    "config.json",
    "*/config.json",
)  # of a comparison, a run, runs side by side
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
    summary: Record | None  # None: the run has not finished
    train: list[Record]
    evals: list[Record]
    depth: list[Record]
    notes: list[str]
    written: datetime
    stopped: str = ""
    """Why it ended before its last step, where the folder says so."""
    beside: int | None = None
    """The most runs that were made at a time with this one, itself included; None: nobody recorded it."""
    tokenizer: str = ""
    """bytes or bpe, by what is saved beside the run: the settings do not know that of tokens which were made before."""
    extended: bool = False
    """Whether it went on to other steps than it was planned for."""
    corpus: Record = field(default_factory=dict)
    """Hashes of text and tokenizer, where a comparison or a study recorded them."""
    switches: tuple[str, ...] = ()
    """Settings in which it differs on purpose from the others of its comparison, which its name, `residual`, says."""

    def final(self, key: str) -> float | None:
        """A number the run ended with; an unfinished run answers with its last evaluation, or not at all."""
        if self.summary is not None:
            return number(self.summary.get(key))
        return next(
            (number(row[key]) for row in reversed(self.evals) if number(row.get(key)) is not None),
            None,
        )


def number(value: object) -> float | None:
    """A finite number, or None: NaN and infinity have no place on an axis or in JSON."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None


def paths_of(folders: Sequence[str | Path]) -> list[Path]:
    """What a caller in Python names. Raises UserError for one name outside of a list, whose letters would be taken."""
    if isinstance(folders, str | Path):
        raise UserError(f"folders takes a list; got {str(folders)!r}: write [{str(folders)!r}]")
    return [at_home(folder) for folder in folders]


def find_runs(folders: list[Path]) -> list[Path]:
    """Run folders among `folders`, with comparison folders and folders of runs opened; each run once, in the order
    given."""
    if not folders:
        raise UserError("give at least one folder: " + EXPECTED)
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder: {EXPECTED}")
        opened = next(filter(None, (list(folder.glob(place)) for place in PLACES)), None)
        if opened is None:
            raise UserError(f"{folder} is not a run, nor a folder of runs: {EXPECTED}")
        for run in sorted(
            (path.parent for path in opened), key=lambda run: run.name.rsplit("-seed", 1)
        ):
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_runs(folders: list[Path], others: Sequence[RecordedRun] = ()) -> list[RecordedRun]:
    """The runs of run folders and comparison folders; there may be none where a page has `others`."""
    return [read_run(folder) for folder in find_runs(folders)] if folders or not others else []


def beside(folders: list[Path], name: str) -> Path:
    """Where a page is written by default."""
    if not folders:
        raise UserError("name the file to write: no run's folder was given to put it in")
    return folders[0] / name


def find_order(folders: list[Path]) -> list[str]:
    """Residuals as comparisons list them, the first of all being what the others are compared with; else the plain
    one."""
    named: list[str] = []
    for folder in folders:
        if (folder / "compare.json").is_file():
            listed = read_object(folder / "compare.json").get("residuals")
            named += map(short_name, listed) if isinstance(listed, list) else []
    return list(dict.fromkeys(named)) or ["standard"]


def read_run(folder: Path) -> RecordedRun:
    config = read_object(folder / "config.json")
    model = config.get("model")
    if not isinstance(model, dict):
        raise UserError(
            f'{folder / "config.json"} has no "model" table, so {folder} is not a run: {EXPECTED}'
        )
    notes: list[str] = []
    summary: Record | None = None
    if (folder / "summary.json").is_file():
        try:
            summary = read_object(folder / "summary.json")
        except UserError:
            notes.append("summary.json cannot be read, so the run is treated as unfinished")
    rows = read_metrics(folder / "metrics.jsonl", notes)
    if not rows:
        notes.append("no metrics were recorded")
    notes += skip_notes(by_step(rows, "skip"))
    further = by_step(rows, "extend")
    notes += [
        f"planned for {row.get('planned')} steps, and for {row.get('steps')} from step {row['step']} on: its learning "
        "rate follows no single schedule"
        for row in further
    ]
    train = section(config, "train")
    seed = (summary or {}).get("seed", train.get("seed"))
    launch = read_object(folder / "launch.json") if (folder / "launch.json").is_file() else {}
    beside, arm = launch.get("side_by_side"), str(launch.get("arm") or "")
    return RecordedRun(
        name=folder.resolve().name,
        residual=short_name(
            arm or (summary or {}).get("residual") or model.get("residual") or "unnamed"
        ),
        seed=seed if isinstance(seed, int) else None,
        config=config,
        summary=summary,
        train=by_step(rows, "train"),
        evals=by_step(rows, "eval"),
        depth=[record for record in by_step(rows, "depth") if well_formed(record, notes)],
        notes=notes,
        written=last_write(folder),
        stopped=stop_reason(rows, train) or last_words(folder / "log.txt")
        if summary is None
        else "",
        beside=beside if isinstance(beside, int) else None,
        tokenizer=read_tokenizer(folder / "tokenizer.json"),
        corpus=read_corpus(folder.resolve(), summary or {}),
        extended=bool(further),
        switches=tuple(f"model.{key}" for key in re.findall(r"\+([a-z]\w*)=", arm)),
    )


def short_name(residual: object) -> str:
    """A residual without the module that registered it, which settings name and readers know."""
    name, colon, options = str(residual).partition(":")
    return name.partition("@")[0] + colon + options


def section(config: Record, name: str) -> Record:
    """One table of a configuration; empty where it is none."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def read_corpus(run: Path, summary: Record) -> Record:
    """What the comparison or the study that a run belongs to has recorded of its text, and the run when it ended, whose
    word counts: a file may change meanwhile. Empty for an earlier run by itself."""
    own = {
        key: value
        for key, value in summary.items()
        if key in ("source_hash", "tokenizer_hash") and value
    }
    for name, key in (("compare.json", "corpus"), ("corpora.json", run.name)):
        path = run.parent.parent / name
        if run.parent.name == "runs" and path.is_file():
            return section(read_object(path), key) | own
    return own


def read_tokenizer(path: Path) -> str:
    """The kind of the tokenizer in this file; empty where there is none to read, as in an archive of runs."""
    try:
        return "bytes" if read_object(path).get("type") == "bytes" else "bpe"
    except (OSError, UserError):
        return ""


def read_object(path: Path) -> Record:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is not valid JSON ({error}); it may have been cut off while it was written"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_metrics(path: Path, notes: list[str]) -> list[Record]:
    """The records of metrics.jsonl. A line cut off by an interruption is left out, and counted in `notes`."""
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
        # Steps that were left out saw no tokens; every other record says how many it had seen.
        complete = isinstance(row, dict) and (
            row.get("kind") == "skip" or number(row.get("tokens")) is not None
        )
        if complete and isinstance(row.get("step"), int):
            rows.append(row)
        else:
            broken += 1
    if broken:
        notes.append(f"{broken} unreadable line{'s' * (broken > 1)} of metrics.jsonl left out")
    return rows


def by_step(rows: list[Record], kind: str) -> list[Record]:
    """Records of one kind in order of step. A resumed run may have written a step twice: the later line counts."""
    latest = {row["step"]: row for row in rows if row.get("kind") == kind}
    return [latest[step] for step in sorted(latest)]


def skip_notes(skips: list[Record]) -> list[str]:
    if not skips:
        return []
    kinds = Counter(str(row.get("reason")) for row in skips)
    reasons = ", ".join(
        f"{count} {SKIPS[kind][2] if kind in SKIPS else kind}" for kind, count in kinds.items()
    )
    several = f"{len(skips)} steps were" if len(skips) > 1 else "1 step was"
    return [
        f"{several} left out of training ({reasons}), at step {', '.join(str(row['step']) for row in skips[:5])}"
    ]


def stop_reason(rows: list[Record], settings: Record) -> str:
    """Whether the metrics end where the trainer stops by itself: more bad steps in a row than its settings bear, a
    gradient of zero, or a validation loss that is not finite."""
    last = rows[-1] if rows else {}
    if last.get("kind") == "train" and last.get("grad_norm") == 0 < (number(last.get("loss")) or 0):
        return f"stopped at step {last['step']}: the gradient was zero"
    if last.get("kind") == "eval" and number(last.get("loss")) is None:
        return f"stopped at step {last['step']}: the validation loss was not finite"
    reason = str(last.get("reason"))
    if last.get("kind") != "skip" or reason not in SKIPS:
        return ""
    limit, cause, _ = SKIPS[reason]
    steps = {
        row["step"] for row in rows if row.get("kind") == "skip" and row.get("reason") == reason
    }
    in_a_row = next(
        count for count in range(1, len(steps) + 1) if last["step"] - count not in steps
    )
    return (
        f"stopped at step {last['step']}: {cause}" if in_a_row > (settings.get(limit) or 0) else ""
    )


def last_words(log: Path) -> str:
    """The message with which the last attempt of a run gave up, if nothing was printed after it."""
    if not log.is_file():
        return ""
    lines = [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    begins = [number for number, line in enumerate(lines) if line.startswith("headwater: ")]
    if not begins or any(PROGRESS.match(line) for line in lines[begins[-1] :]):
        return ""
    said = " ".join(line.strip() for line in lines[begins[-1] :]).removeprefix("headwater: ")
    return "its last words were: " + (said if len(said) <= 300 else said[:300] + "…").rstrip(".")


def well_formed(record: Record, notes: list[str]) -> bool:
    """Whether the lists of a depth record have the lengths that its sublayers call for (an absent list is allowed)."""
    sublayers = record.get("sublayers")
    if not isinstance(sublayers, list):
        notes.append(
            f"the depth record of step {record['step']} names no sublayers and is left out"
        )
        return False
    reads = len(sublayers) + 1
    lengths = {
        "output_norm": reads - 1,
        "gradient_norm": reads - 1,
        "expert_load_cv": reads - 1,
        "read_norm": reads,
        "entropy": reads,
        "mixing": reads,
    }
    wrong = [
        key
        for key, length in lengths.items()
        if record.get(key) is not None and size(record[key]) != length
    ]
    if "mixing" not in wrong and any(size(row) != reads for row in record.get("mixing") or []):
        wrong.append("mixing")
    if wrong:
        misfit = f"{', '.join(wrong)} does not fit {reads - 1} sublayers"
        notes.append(f"the depth record of step {record['step']} is left out: {misfit}")
    return not wrong


def size(value: object) -> int:
    return len(value) if isinstance(value, list) else -1


def last_write(folder: Path) -> datetime:
    times = [
        (folder / name).stat().st_mtime
        for name in ("config.json", "metrics.jsonl", "summary.json")
        if (folder / name).is_file()
    ]
    return datetime.fromtimestamp(max(times), UTC)
