"""Progress of the work: renewed in place on a terminal and in a notebook, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from headwater.runs.tables import printable

PLAIN_SECONDS = 5.0
NOTEBOOK_SECONDS = 0.5


class Tasks:
    """Tasks with a note each: bars on a terminal, one text in the output of a notebook's cell, elsewhere nothing.

    In a notebook rich's own bars would need ipywidgets.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
        )
        note = TextColumn("{task.fields[note]}"), TimeRemainingColumn()
        # rich draws on a terminal alone.
        self.live = Progress(*columns, *note, console=console, disable=not console.is_terminal)
        self.in_notebook = console.is_jupyter and not console.quiet
        self.renewed = 0.0
        self.output: Any = None

    @property
    def watched(self) -> bool:
        return self.in_notebook or self.console.is_terminal

    def __enter__(self) -> Tasks:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()
        if self.in_notebook:
            self._renew()

    def add(self, label: str, total: int, completed: int = 0, note: str = "") -> TaskID:
        return self.live.add_task(label, total=total, completed=completed, note=note)

    def update(self, task: TaskID, completed: int, note: str = "") -> None:
        self.live.update(task, completed=completed, note=note)
        if self.in_notebook and time.monotonic() - self.renewed >= NOTEBOOK_SECONDS:
            self._renew()

    def remove(self, task: TaskID) -> None:
        self.live.remove_task(task)

    def say(self, text: str) -> None:
        self.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def _renew(self) -> None:
        lines = []
        for task in self.live.tasks:
            count = f"{task.completed:.0f}/{task.total:.0f}"
            lines.append(f"{task.description} {count}  {task.fields['note']}")
        content = {"text/plain": "\n".join(lines)}
        # The first time an output is made, later it is replaced.
        if self.output is None:
            from IPython.display import display  # there, since this is a notebook

            self.output = display(content, raw=True, display_id=True)
        else:
            self.output.update(content, raw=True)
        self.renewed = time.monotonic()


class ProgressLine(Tasks):
    """The one task of a run: loss, tokens/s, time left."""

    def __init__(self, label: str, step: int, steps: int, console: Console) -> None:
        super().__init__(console)
        self.steps, self.first, self.began = steps, step, time.monotonic()
        self.printed = self.began
        self.task = self.add(label, steps, step)

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        note, now = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s", time.monotonic()
        seconds_a_step = (now - self.began) / (step - self.first)
        remaining = f"{seconds_a_step * (self.steps - step):.0f} s left"
        self.update(self.task, step, f"{note}  {remaining}" if self.in_notebook else note)
        # A log file gets a line every few seconds.
        is_due = now - self.printed >= PLAIN_SECONDS or step == self.steps
        if is_due and not self.watched:
            self.say(f"step {step}/{self.steps}  {note}  {remaining}")
            self.printed = now
