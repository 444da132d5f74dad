"""The errors a user can cause, importable without torch: the command prints the message alone.

How a message names a setting: `f"try a lower {spell('optim.lr')}"` reads `--lr` under the command
and `optim.lr` elsewhere; `spell("train.graph", False)` is `--no-graph`, or `train.graph = false`.
Arguments of a function have no section: `spell("out")`. A whole command to copy is
`command("train", out=folder)`.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

Spelling = Callable[[str, Any], str]


def dotted(setting: str, value: Any = None) -> str:
    """Spell a setting as files have it: `optim.lr`, `train.graph = false`."""
    return setting if value is None else f"{setting} = {json.dumps(value, default=str)}"


def as_flag(setting: str, value: Any = None) -> str:
    """Spell a setting as the command line has it: `--lr`, `--lr 0.001`, `--no-graph`."""
    name = setting.rpartition(".")[2]
    return shlex.join(flags(**{name: True if value is None else value}))


def flags(**settings: Any) -> list[str]:
    """The words of a command line that say these settings. A setting that is None is left out.

    flags(out="run", resume=True, seeds=(0, 1))  # --out run --resume --seeds 0 1
    """
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if name == "plugin":  # a flag of one value, because positional arguments may follow it
            for module in value:
                words += [f"--{flag}", str(module)]
        elif isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words += [f"--{flag}", *map(str, value)]
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words


def command(verb: str, *arguments: Any, **settings: Any) -> str:
    """A command line to copy: `command("train", out="run", resume=True)`."""
    return shlex.join(["headwater", verb, *map(str, arguments), *flags(**settings)])


_spelling: Spelling = dotted


def spell(setting: str, value: Any = None) -> str:
    """Name a setting as whoever reads the message writes it.

    Arguments:
        setting: its dotted name, such as "optim.lr", or the name of an argument, such as "out".
        value: a value to set it to, where the message proposes one.

    Returns the name, and the value.
    """
    return _spelling(setting, value)


@contextmanager
def spelling(style: Spelling) -> Iterator[None]:
    """Spell settings in this style inside: `as_flag` in the command, `dotted` elsewhere."""
    # One for the process, not for the thread: threads that load and save speak to the same user.
    global _spelling
    before, _spelling = _spelling, style
    try:
        yield
    finally:
        _spelling = before


class UserError(Exception):
    """An error that a user can mend: its message says what is wrong and what to do."""

    exit_code = 1


class SettingError(UserError, ValueError):
    """A value that a setting cannot have: "optim.clip", "must be above 0", and the value."""

    def __init__(self, setting: str, must: str, value: Any) -> None:
        super().__init__(setting, must, value)
        self.setting, self.must, self.value = setting, must, value

    def __str__(self) -> str:
        return f"{spell(self.setting)} {self.must}; got {self.value!r}"


class UnknownSetting(UserError, ValueError):
    """A file, flags or a saved model name a setting that there is not."""


class BackendError(UserError, ValueError):
    """A backend that was asked for by name cannot run here."""


class Interrupted(UserError):
    """A signal ended the run in good order; the exit code is 128 + signal, as in a shell."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


def nearest(word: str, valid: Iterable[str]) -> str:
    """Name the closest valid word, if any is close, then all of them: the tail of a message."""
    valid = sorted(valid)
    close = difflib.get_close_matches(word, valid, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Valid: {', '.join(valid)}"


Shapes = Mapping[str, Sequence[int]]


def check_fit(expected: Shapes, actual: Shapes, what: str) -> None:
    """Check that weights fit a model: every tensor is there in its shape, and no other.

    Arguments:
        expected: the tensors of the model, name to shape.
        actual: the tensors of the file or state dict, name to shape.
        what: the beginning of the message, such as "weights do not fit the model".

    Raises: ValueError that names tensors that are missing or not expected, else the first whose
        shape differs.

        check_fit({"norm.weight": (64,)}, {"norm.weight": (32,)}, "weights do not fit the model")
    """
    missing = sorted(expected.keys() - actual.keys())
    surplus = sorted(actual.keys() - expected.keys())
    if missing or surplus:
        raise ValueError(
            f"{what}: missing {_first(missing)}, not expected {_first(surplus)}. They must be "
            "those of a model with the same settings, such as its layers"
        )
    for name, shape in expected.items():
        if tuple(shape) != tuple(actual[name]):
            raise ValueError(
                f"{what}: {name} is {tuple(shape)} in the model and "
                f"{tuple(actual[name])} in the file"
            )


def _first(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{names[:5]}{rest}"


@contextmanager
def user_values() -> Iterator[None]:
    """Turn a ValueError into a UserError inside, where every value comes from the user."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from None
