"""Ctrl-C, SIGTERM, a closed terminal and the loss of the process that watches a run: requests to stop in good order."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from headwater.errors import Interrupted

PARENT = "HEADWATER_PARENT"
"""Environment variable with the number of the process that started this one and that it must not outlive."""


class Interruption:
    """Makes the first signal a request that the loop honours after its step; a second one ends at once.

    An orphan is asked to stop as if its terminal had been closed. Asking for the parent's number at every look needs no
    signal, so that it works wherever there are processes, and also if the parent was gone before this one looked.
    """

    def __init__(self) -> None:
        self._signum = 0
        self.parent = int(os.environ.get(PARENT, 0))
        self.orphaned = False

    @property
    def signum(self) -> int:
        """The signal that asked for a stop, or 0."""
        if not self._signum and self.parent and os.getppid() != self.parent:
            self._signum, self.orphaned = signal.SIGHUP, True
        return self._signum

    @signum.setter
    def signum(self, value: int) -> None:
        self._signum = value

    def __enter__(self) -> Interruption:
        # Elsewhere Python refuses handlers
        on_main = threading.current_thread() is threading.main_thread()
        signals = [signal.SIGINT, signal.SIGTERM]
        # Nohup asks to outlive the terminal
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        self.before = {}
        if on_main:
            self.before = {signum: signal.signal(signum, self._ask) for signum in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self.before.items():
            signal.signal(signum, handler)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        # The next signal finds the old handlers, and ends at once.
        self._signum = signum
        self.__exit__()

    def error(self, after: str, command: str) -> Interrupted:
        cause = (
            "because what started it is gone"
            if self.orphaned
            else f"by {signal.Signals(self._signum).name}"
        )
        return Interrupted(
            f"stopped {cause} after {after}; everything so far is saved. Go on with: {command}",
            self._signum,
        )
