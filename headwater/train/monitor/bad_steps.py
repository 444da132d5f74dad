"""Steps that are left out: those that are not finite and, by option, those whose loss is a spike.

Everything is decided from numbers that are sums over all ranks, so that every rank decides alike, and from the losses
of the last steps, which a checkpoint holds, so that a resumed run decides as an undisturbed one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from headwater.runs.settings import TrainSettings


@dataclass(frozen=True)
class Reason:
    """Why a step is left out, and how many such steps in a row a run bears."""

    kind: str
    text: str
    threshold: float | None
    limit: int
    setting: str
    """The setting that raises the limit."""
    in_a_row: int
    """Including this step."""


@dataclass
class Skips:
    losses: list[float] = field(default_factory=list)
    """Losses of the last steps that were taken."""
    in_a_row: int = 0
    """Number of bad steps of one kind in a row: each kind has its own limit."""
    kind: str = ""
    total: int = 0

    def judge(self, loss: float, grad_norm: float, settings: TrainSettings) -> Reason | None:
        """Decide whether a step is taken: None if it is, else the reason why not."""
        # A loss that is not finite is no spike, and would spoil the median.
        kind, threshold = "", math.inf
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            kind = "nonfinite"
        elif settings.skip_spikes and len(self.losses) == settings.spike_window:
            threshold = self._threshold(settings.spike_sigmas)
            kind = "spike" if loss > threshold else ""
        return self.record(loss, kind, threshold, settings)

    def record(
        self, loss: float, kind: str, threshold: float, settings: TrainSettings
    ) -> Reason | None:
        """Count a step of this kind: "nonfinite", "spike", or "" for one that is taken."""
        # Each kind has its own count, which another kind or a good step ends.
        if kind:
            self.in_a_row = self.in_a_row + 1 if kind == self.kind else 1
            self.kind = kind
            self.total += 1
        if kind == "nonfinite":
            return Reason(
                kind=kind,
                text="the loss or gradient is not finite",
                threshold=None,
                limit=settings.skip_nonfinite,
                setting="train.skip_nonfinite",
                in_a_row=self.in_a_row,
            )
        if kind == "spike":
            return Reason(
                kind=kind,
                text=f"the loss is above {threshold:.6g}",
                threshold=threshold,
                limit=settings.skip_spikes,
                setting="train.skip_spikes",
                in_a_row=self.in_a_row,
            )
        # A step that is taken enters the window that spikes are measured against.
        self.in_a_row, self.kind = 0, ""
        self.losses = [*self.losses, loss][-settings.spike_window :]
        return None

    def _threshold(self, sigmas: float) -> float:
        """Median and median deviation: one spike that was taken, early on, does not hide the next one.

        For losses that are spread normally, 1.4826 times that deviation is the standard deviation. Equal losses have
        none: at least a thousandth of the median is taken, or any rise would be a spike.
        """
        middle = median(self.losses)
        deviation = 1.4826 * median(abs(loss - middle) for loss in self.losses)
        return middle + sigmas * max(deviation, abs(middle) / 1000)


def cause_file(folder: Path, kind: str, step: int) -> Path:
    """nonfinite-step-N.json or spike-step-N.json."""
    return folder / f"{kind}-step-{step}.json"


def drop_causes(folder: Path, after: int) -> None:
    """Remove the files of later steps, which will be taken again: as with records, what then happens counts."""
    for path in folder.glob("*-step-*.json"):
        # Other files of such names are the user's.
        match = re.fullmatch(r"(nonfinite|spike)-step-(\d+)", path.stem)
        if match and int(match[2]) > after:
            path.unlink()
