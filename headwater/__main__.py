"""The start of the `headwater` command; `python -m headwater` is the same."""

import os
import signal
import sys
from types import FrameType

STOPPED = 130  # what a shell says of a program that Ctrl-C has ended


def main() -> int:
    # A shell that starts us in the background has Ctrl-C ignored, and so do we.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    try:
        from headwater.cli import main as command

        return command()
    except KeyboardInterrupt:
        return say_stopped()


def stop(signum: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: end at once while something is imported, else raise KeyboardInterrupt.

    An import that an exception cuts short leaves half a module behind, and some libraries take the
    exception for "it is not installed" and go on. Nothing of the user's is at stake as early as
    that.
    """
    if importing(frame):
        say_stopped()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    raise KeyboardInterrupt


def importing(frame: FrameType | None) -> bool:
    """Tell whether a frame, or one that called it, belongs to Python's import machinery."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def say_stopped() -> int:
    print("headwater: stopped by Ctrl-C", file=sys.stderr, flush=True)
    return STOPPED


if __name__ == "__main__":
    sys.exit(main())
