"""One live line on a terminal (loss, tokens/s, time left); plain lines every few seconds anywhere else."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_SECONDS = 5.0


class ProgressLine:
    def __init__(self, label: str, step: int, steps: int, console: Console | None = None) -> None:
        self.console = console or Console()
        self.steps, self.first, self.began = steps, step, time.monotonic()
        self.printed = self.began
        text = (
            TextColumn("{task.description} {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.live = Progress(*text, TimeRemainingColumn(), console=self.console, disable=not self.console.is_terminal)
        self.task = self.live.add_task(label, total=steps, completed=step, note="")

    def __enter__(self) -> ProgressLine:
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        note = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        self.live.update(self.task, completed=step, note=note)
        now = time.monotonic()
        if not self.console.is_terminal and (now - self.printed >= PLAIN_SECONDS or step == self.steps):
            left = (now - self.began) / (step - self.first) * (self.steps - step)
            self.say(f"step {step}/{self.steps}  {note}  {left:.0f} s left")
            self.printed = now

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
