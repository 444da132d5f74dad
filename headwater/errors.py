"""The errors a user can cause, importable without torch: the command prints the message alone, never a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager


class UserError(Exception):
    """What is wrong, where, and what to do about it, in one message."""

    exit_code = 1


class BackendError(UserError, ValueError):
    """A backend was asked for by name and cannot run here: a ValueError to whoever calls an operator."""


class Interrupted(UserError):
    """A signal ended the run in good order; the exit code is the shell's convention, 128 + signal."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


def nearest(word: str, valid: Iterable[str]) -> str:
    """The tail of a message about an unknown word: the closest valid one if any is close, then all of them."""
    valid = sorted(valid)
    close = difflib.get_close_matches(word, valid, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Valid: {', '.join(valid)}"


def check_fit(
    expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]], what: str
) -> None:
    """Weights fit a model: every tensor that it expects is there in its shape, and no other.

    Arguments:
        expected: the model's tensors, name to shape.
        found: those of the file or state dict, name to shape.
        what: the beginning of the message, such as "weights do not fit the model".

    Raises: ValueError that names the tensors that are missing or not expected, else the first of another shape.

        check_fit({"norm.weight": (64,)}, {"norm.weight": (32,)}, "weights do not fit the model")
    """
    missing, surplus = (
        sorted(expected.keys() - found.keys()),
        sorted(found.keys() - expected.keys()),
    )
    if missing or surplus:
        raise ValueError(
            f"{what}: missing {_first(missing)}, not expected {_first(surplus)}. They must be those of a model with "
            "the same settings, such as its layers"
        )
    for name, shape in expected.items():
        if tuple(shape) != tuple(found[name]):
            raise ValueError(
                f"{what}: {name} is {tuple(shape)} in the model and {tuple(found[name])} in the file"
            )


def _first(names: Sequence[str]) -> str:
    return f"{names[:5]}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")


@contextmanager
def user_values() -> Iterator[None]:
    """Rooms below raise ValueError for a value they cannot take; inside, every value came from the user."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from None
