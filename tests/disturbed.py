"""Ways to disturb a training run from a test."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headwater.train import loop
from headwater.train.checkpoint import storage


class PowerCut(BaseException):
    """An end that no handler expects."""


@contextmanager
def power_cut(at_step: int) -> Iterator[None]:
    """Expect a run inside, and leave it in the middle of a step, as a power cut does."""

    def cut(run: Any) -> None:
        if run.step == at_step:
            raise PowerCut

    with pytest.MonkeyPatch.context() as patch:
        each_step(patch, cut)
        with pytest.raises(PowerCut):
            yield


def each_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[Any], object]) -> None:
    """Let `act(run)` follow the record of every step, before anything is saved."""
    real = loop.log_update

    def log_update(run, *values):
        real(run, *values)
        act(run)

    monkeypatch.setattr(loop, "log_update", log_update)


def bad_steps(
    monkeypatch: pytest.MonkeyPatch,
    *steps: int,
    factor: float = 100.0,
    loss: float | None = None,
    real: Callable[..., float] = loop.accumulate,
) -> None:
    """Multiply loss and gradient of these steps, or set the loss."""

    def accumulate(run, number):
        value = real(run, number)
        if number not in steps:
            return value
        for parameter in run.model.parameters():
            parameter.grad *= factor
        return value * factor if loss is None else loss

    monkeypatch.setattr(loop, "accumulate", accumulate)


def each_file(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object]) -> None:
    """Let `act(path)` come before every file that a checkpoint writes."""
    real = storage.write_file

    def write_file(path, content):
        act(path)
        return real(path, content)

    monkeypatch.setattr(storage, "write_file", write_file)


def no_space(*paths: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *map(str, paths))
