"""What training and comparing come to, as plain values: the fields of summary.json and of table.json."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headwater.errors import UserError
from headwater.folders import at_home
from headwater.runs.files import read_object
from headwater.runs.record import SUMMARY

DIVERGED = "diverged.json"  # why a run gave up by itself; gone as soon as it is taken up again
PACKAGE = Path(__file__).parents[1]


@functools.cache
def code_of(package: Path = PACKAGE) -> str:
    """The first twelve digits of a hash of a package's own files, which tell versions between two releases apart."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix().encode()
        for part in (name, path.read_bytes()):
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
    """Parameters of the residual, which are among them."""
    flops_per_token: int
    """Operations of a training step: the forward pass and twice as much for the backward pass."""
    tokens: int
    """Tokens seen in training, repetitions included."""
    steps: int
    skipped_steps: int = 0
    """Steps left out because their loss was not finite or a spike."""
    seconds: float
    """Wall-clock, over all the processes that the run took."""
    peak_memory_bytes: int
    """Memory of the rank with the most: on a GPU what torch allocated, else the resident memory of the process."""
    loss: float
    """Nats per token on held-out text."""
    bits_per_byte: float
    """The same loss, comparable between tokenizers."""
    device: str
    torch: str
    """Version of torch."""
    headwater: str
    """Version of headwater."""
    code: str = ""
    """`code_of` headwater when the run began, or was last taken up."""
    source_hash: str = ""
    """Hash of its text: runs with the same hash saw the same documents, and were judged on the same."""
    tokenizer_hash: str = ""
    """Hash of its tokenizer: with both hashes the same, runs saw the same tokens."""

    @classmethod
    def read(cls, folder: str | Path) -> TrainResult:
        """The result of a run that has finished, from its folder.

        Raises: `UserError` if the folder has no summary.json, or one that is not of a run.
        """
        folder = at_home(folder)
        path = folder / SUMMARY
        if not path.exists():
            raise UserError(f"{path} is missing: {folder} holds no run that has finished")
        saved = read_object(path)
        names = {field.name for field in fields(cls)} - {"folder"}
        required = {field.name for field in fields(cls) if field.default is MISSING} - {"folder"}
        missing = sorted(required - saved.keys())
        if missing:
            raise UserError(
                f"{path} is not the summary of a run (it lacks {', '.join(missing)}): restore it, or take the run up "
                "again"
            )
        return cls(folder=folder, **{key: value for key, value in saved.items() if key in names})

    def summary(self) -> dict[str, Any]:
        """The values of summary.json."""
        values = asdict(self)
        del values["folder"]
        return values


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
    """Bits per byte minus those of the first row, seed by seed."""
    pairs: int = 0
    """Seeds that both have."""
    interval: tuple[float, float] | None = None
    """95 % interval of the difference, corrected for the number of residuals; from two pairs on."""
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
