"""What training and comparing come to, as plain values: the fields of summary.json and of table.json."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headwater.errors import UserError
from headwater.folders import at_home
from headwater.train.files import read_json, write_json

SUMMARY = "summary.json"
DIVERGED = "diverged.json"  # why a run gave up by itself; gone as soon as it is taken up again
PACKAGE = Path(__file__).parents[1]


@functools.cache
def code_of(package: Path = PACKAGE) -> str:
    """The first twelve digits of a hash of a package's own files: what tells versions between two releases apart."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8) + part)
    return digest.hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished run: what its summary.json holds, and the folder that holds it."""

    folder: Path
    residual: str
    seed: int
    parameters: int
    residual_parameters: int
    """Of them, the residual's own."""
    flops_per_token: int
    """Of a training step: the forward pass and twice as much for the backward pass."""
    tokens: int
    """Seen in training, repetitions included."""
    steps: int
    skipped_steps: int = 0
    """Left out because their loss was not finite or a spike."""
    seconds: float
    """Wall-clock, over all the processes that the run took."""
    peak_memory_bytes: int
    """Of the rank with the most: on a GPU what torch allocated, else the resident memory of the process."""
    loss: float
    """Nats per token on held-out text."""
    bits_per_byte: float
    """The same loss, comparable between tokenizers."""
    device: str
    torch: str
    """Version, as the next one."""
    headwater: str
    code: str = ""
    """What `code_of` said of headwater when the run began, or was last taken up."""
    source_hash: str = ""
    """Of its text: runs with the same have seen the same documents, and were judged on the same."""
    tokenizer_hash: str = ""
    """With the same of this too, they have seen the same tokens."""

    @classmethod
    def read(cls, folder: str | Path) -> TrainResult:
        """The result of a run that has finished, from its folder.

        Raises: `UserError` if the folder has no summary.json, or one that is not of a run.
        """
        folder = at_home(folder)
        path = folder / SUMMARY
        saved = read_json(path)
        known = {field.name for field in fields(cls)} - {"folder"}
        needed = {field.name for field in fields(cls) if field.default is MISSING} - {"folder"}
        if not isinstance(saved, dict) or needed - saved.keys():
            lacks = (
                f"it lacks {', '.join(sorted(needed - saved.keys()))}"
                if isinstance(saved, dict)
                else "no section"
            )
            raise UserError(
                f"{path} is not the summary of a run ({lacks}): restore it, or take the run up again"
            )
        return cls(folder=folder, **{key: value for key, value in saved.items() if key in known})

    def write(self) -> None:
        """summary.json, in the run's folder."""
        values = asdict(self)
        del values["folder"]
        write_json(self.folder / SUMMARY, values)


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; one value has no spread, and none has no mean."""

    mean: float | None
    spread: float | None


@dataclass(frozen=True, kw_only=True)
class CompareRow:
    """One residual over its finished runs."""

    residual: str
    seeds: tuple[int, ...]
    parameters: int
    residual_parameters: int
    flops_per_token: int
    tokens: int
    loss: Spread
    bits_per_byte: Spread
    seconds: Spread
    peak_memory_bytes: Spread
    difference: Spread = Spread(None, None)
    """Bits per byte less those of the first row, seed by seed."""
    pairs: int = 0
    """Seeds that both have."""
    interval: tuple[float, float] | None = None
    """That holds the difference with 95 %, corrected for the number of residuals; from two pairs on."""
    verdict: str | None = None
    """"lower", "higher" or "not told apart" (the interval holds zero); "one seed"; "baseline" of the first row; None
    without a pair."""
    side_by_side: int | None = None
    """The most runs made at a time while these ran, which makes their seconds longer; None if that is unknown."""


@dataclass(frozen=True, kw_only=True)
class CompareResult:
    """A comparison: a row for each residual, the baseline first, and every finished run behind them."""

    folder: Path
    rows: tuple[CompareRow, ...]
    runs: tuple[TrainResult, ...]

    def table(self) -> list[dict[str, Any]]:
        """The rows as table.json has them."""
        return [asdict(row) for row in self.rows]
