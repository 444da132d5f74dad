"""Ctrl-C and SIGTERM as a request to stop in good order."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from headwater.errors import Interrupted


class Interruption:
    """Makes the first Ctrl-C or SIGTERM a request that the loop honours after its step; a second one ends at once."""

    def __init__(self) -> None:
        self.signum = 0

    def __enter__(self) -> Interruption:
        on_main = threading.current_thread() is threading.main_thread()  # elsewhere Python refuses handlers
        self.before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)} if on_main else {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self.before.items():
            signal.signal(signum, handler)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self.__exit__(None, None, None)

    def error(self, after: str, command: str) -> Interrupted:
        name = signal.Signals(self.signum).name
        return Interrupted(
            f"stopped by {name} after {after}; everything so far is saved. Go on with: {command} --resume", self.signum
        )
