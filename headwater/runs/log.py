"""The end of a run's log: why the run stopped, in its own words."""

from __future__ import annotations

import re
import signal
from itertools import dropwhile
from pathlib import Path

PROGRESS = re.compile(r"step \d+(/\d+|:) ")  # what a run prints as it goes on
MESSAGE = "headwater: "  # how a message to the user begins


def cause(text: str, code: int) -> str:
    """Why a run failed, from what it printed and its exit code.

    Its last message to the user in full; else the signal that killed it; else the error that its
    last traceback ends with, first line and last; else its last line.
    """
    # Progress says nothing about the failure.
    lines = [line for line in _lines(text) if not PROGRESS.match(line)]
    message = _last_message(lines)
    if message:
        return "\n    ".join([message[0].removeprefix(MESSAGE), *message[1:]])
    if code < 0:
        hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
        return f"it was killed by signal {-code} ({signal.strsignal(-code)}){hint}"

    # The lines after a traceback's frames, which are indented, are its error. It may be cut off.
    traces = [i for i, line in enumerate(lines) if line.startswith("Traceback ")]
    error = lines[-1:]
    if traces:
        after_frames = list(dropwhile(lambda line: line.startswith(" "), lines[traces[-1] + 1 :]))
        error = after_frames or error
    if not error:
        return "it left no message"
    return "\n    ".join(dict.fromkeys((error[0], error[-1])))


def last_words(log: Path) -> str:
    """The message with which the last attempt of a run gave up, if it printed nothing after it."""
    if not log.is_file():
        return ""
    # A run that went on after the message did not end with it.
    message = _last_message(_lines(log.read_text(encoding="utf-8", errors="replace")))
    if any(PROGRESS.match(line) for line in message):
        return ""
    words = " ".join(line.strip() for line in message).removeprefix(MESSAGE)
    if len(words) > 300:
        words = words[:300] + "…"
    return words and "its last words were: " + words.rstrip(".")


def _last_message(lines: list[str]) -> list[str]:
    """The lines from the last message on."""
    starts = [i for i, line in enumerate(lines) if line.startswith(MESSAGE)]
    return lines[starts[-1] :] if starts else []


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]
