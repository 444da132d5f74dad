"""A step that never ends: every rank says where it stands, and the run ends instead of waiting."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager


class Watchdog:
    """Unless it is reset in time, all threads' stacks go to stderr and the process exits with 1.

    Ranks wait for one another in every step, so when one hangs, all are late together and all print their stack. The
    timer is a thread of the C library: it fires even where no Python code runs any more.
    """

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds

    def reset(self) -> None:
        # A limit of zero is none.
        if self.seconds:
            faulthandler.dump_traceback_later(self.seconds, exit=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, time does not count: a checkpoint takes as long as the disk does."""
        self.__exit__()
        yield
        self.reset()

    def __enter__(self) -> Watchdog:
        self.reset()
        return self

    def __exit__(self, *_: object) -> None:
        if self.seconds:
            faulthandler.cancel_dump_traceback_later()
