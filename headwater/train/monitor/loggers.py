"""Weights & Biases and TensorBoard beside metrics.jsonl, which stays the record of a run.

Each is fed by a thread of its own through a bounded queue: one that is slow loses records, one that raises is off, one
that hangs is left behind. Nothing that they do reaches the training loop.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headwater.runs.settings import LogSettings, flatten
from headwater.train.files import require

CAPACITY = 1000  # records
PATIENCE = 5.0  # seconds to finish in, at the end of a run
Record = dict[str, Any]
Sink = tuple[Callable[[Record], None], Callable[[], None]]  # write, close


def require_packages(settings: LogSettings) -> None:
    """Import what was asked for, before any work; in the main thread, since imports and threads do not mix."""
    if settings.wandb:
        require("wandb", "wandb")
    if settings.tensorboard:
        require("torch.utils.tensorboard", "tensorboard")


def start(settings: LogSettings, folder: Path, step: int, config: dict[str, Any]) -> list[Logger]:
    """The loggers of a run that goes on after `step`."""
    # Each opens its files in its own thread.
    started = []
    if settings.wandb:
        started.append(Logger("W&B", lambda: open_wandb(settings.wandb, folder, config)))
    if settings.tensorboard:
        started.append(Logger("TensorBoard", lambda: open_tensorboard(folder, step, config)))
    return started


class Logger(threading.Thread):
    """`put` never waits and never raises."""

    def __init__(self, label: str, open_sink: Callable[[], Sink]) -> None:
        super().__init__(name=label, daemon=True)
        self.label, self.open_sink = label, open_sink
        self.queue: queue.Queue[Record | None] = queue.Queue(CAPACITY)
        self.dropped = 0
        self.start()

    def put(self, record: Record | None) -> None:
        # The training loop goes on whatever happens here.
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1 and self.is_alive():
                self.warn("is too slow: records are dropped")

    def run(self) -> None:
        try:
            write, close = self.open_sink()
            while (record := self.queue.get()) is not None:
                write(record)
            close()
        except Exception as error:  # a foreign package: whatever it raises ends here
            self.warn(
                f"failed and is off for the rest of this run ({type(error).__name__}: {error})"
            )

    def close(self) -> None:
        """Give it a moment to write what is left."""
        # None ends the thread, after all that came before it.
        self.put(None)
        self.join(PATIENCE)
        if self.is_alive():
            self.warn("did not finish in time and is left behind")

    def warn(self, text: str) -> None:
        line = f"headwater: {self.label} {text}; metrics.jsonl has everything"
        print(line, file=sys.stderr, flush=True)


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record, as "kind/name", and those of lists along the depth, as "kind/name/sublayer"."""
    for name, value in record.items():
        if name in ("kind", "step"):
            continue
        label = f"{record['kind']}/{name}"
        if isinstance(value, int | float):
            yield label, float(value)
        elif isinstance(value, list):
            for i, entry in enumerate(value):
                if isinstance(entry, int | float):
                    yield f"{label}/{i:02d}", float(entry)


def open_wandb(project: str, folder: Path, config: dict[str, Any]) -> Sink:
    """A run that is resumed goes on under the name it was given first."""
    import wandb

    # A run that is resumed goes on under its first name.
    name_file = folder / "wandb-id"
    if not name_file.exists():
        name_file.write_text(uuid.uuid4().hex[:8], encoding="ascii")
    identity = {"id": name_file.read_text(encoding="ascii"), "resume": "allow"}
    run = wandb.init(project=project, name=folder.name, dir=str(folder), config=config, **identity)
    return lambda record: run.log(dict(scalars(record)), step=record["step"]), run.finish


def open_tensorboard(folder: Path, step: int, config: dict[str, Any]) -> Sink:
    """Write events; those of an earlier process about steps that are taken again are hidden."""
    from torch.utils.tensorboard import SummaryWriter

    # Events after this step are of steps that will be taken again.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1, flush_secs=10)

    rows = [f"| {key} | `{json.dumps(value)}` |" for key, value in flatten(config).items()]
    writer.add_text("settings", "\n".join(("| setting | value |", "|---|---|", *rows)), step)

    def write(record: Record) -> None:
        for name, value in scalars(record):
            writer.add_scalar(name, value, record["step"])
        if record.get("mixing"):
            pixels = picture(record["mixing"])
            writer.add_image("depth/mixing", pixels, record["step"], dataformats="HWC")

    return write, writer.close


def picture(mixing: list[list[float]], cell: int = 12) -> np.ndarray:
    """A depth-mixing map as pixels (reads * cell, sources * cell, 3).

    White is nothing, blue is a row's largest weight, red the same below zero.
    """
    # A number that is not finite was recorded as null
    matrix = np.nan_to_num(np.array(mixing, dtype=float))
    largest = np.abs(matrix).max(-1, keepdims=True)
    shares = (matrix / np.maximum(largest, 1e-12))[..., None]
    white, blue, red = np.array([[255.0, 255, 255], [8.0, 69, 148], [165.0, 15, 21]])
    ends = np.where(shares < 0, red, blue)
    pixels = (white + np.abs(shares) * (ends - white)).round().astype(np.uint8)
    return pixels.repeat(cell, 0).repeat(cell, 1)
