"""The errors a user can cause, importable without torch: the command prints the message alone, never a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """What is wrong, where, and what to do about it, in one message."""

    exit_code = 1


class Interrupted(UserError):
    """A signal ended the run in good order; the exit code is the shell's convention, 128 + signal."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


def nearest(word: str, valid: Iterable[str]) -> str:
    """The tail of a message about an unknown word: the closest valid one if any is close, then all of them."""
    valid = sorted(valid)
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Valid: {', '.join(valid)}"


@contextmanager
def user_values() -> Iterator[None]:
    """Rooms below raise ValueError for a value they cannot take; inside, every value came from the user."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from None
