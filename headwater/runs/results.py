"""Results of training and comparing as plain values: the fields of summary.json and table.json."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headwater.errors import UserError
from headwater.folders import at_home
from headwater.runs.files import read_hashed, with_hash
from headwater.runs.record import SUMMARY

DIVERGED = "diverged.json"  # why a run gave up by itself; gone as soon as it is taken up again
PACKAGE = Path(__file__).parents[1]


@functools.cache
def code_of(package: Path = PACKAGE) -> str:
    """Hash a package's files: twelve digits that tell versions between two releases apart."""
    # Lengths stand before names and contents, so that no two packages have the same bytes.
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
    """Memory of the rank that has most: allocated by torch on a GPU, else resident."""
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
    """Hash of its text: runs with equal hashes saw, and were judged on, the same documents."""
    tokenizer_hash: str = ""
    """Hash of its tokenizer: with both hashes the same, runs saw the same tokens."""

    @classmethod
    def read(cls, folder: str | Path) -> TrainResult:
        """Read the result of a run that has finished from its folder.

        Raises: `UserError` if the folder has no summary.json, or a damaged one.
        """
        folder = at_home(folder)
        path = folder / SUMMARY
        if not path.exists():
            raise UserError(f"{path} is missing: {folder} holds no run that has finished")
        # The hash of the values is no field.
        saved = read_hashed(path)
        names = {field.name for field in fields(cls)}
        return cls(folder=folder, **{key: value for key, value in saved.items() if key in names})

    def summary(self) -> dict[str, Any]:
        """Return the values of summary.json, with their hash."""
        values = asdict(self)
        del values["folder"]
        return with_hash(values)


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; None where there are too few values."""

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
    """"significant (95 %)" or "no significant difference" (the interval holds zero); "one seed";
    "baseline" of the first row; None without a pair."""
    side_by_side: int | None = None
    """The most runs made at a time, which makes their seconds longer; None if it is unknown."""


@dataclass(frozen=True, kw_only=True)
class CompareResult:
    """A comparison: a row for each residual, the baseline first, and every finished run behind
    them."""

    folder: Path
    rows: tuple[CompareRow, ...]
    runs: tuple[TrainResult, ...]

    def table(self) -> list[dict[str, Any]]:
        """The rows as table.json has them."""
        return [asdict(row) for row in self.rows]
