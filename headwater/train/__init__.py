"""Training from Python, as the command line does it. Names load on first use: describing a run imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import Config, DataSettings, LogSettings, ModelSettings, OptimSettings, ParallelSettings, TrainSettings

if TYPE_CHECKING:
    from .load import LoadedRun, load_run

_homes = {"LoadedRun": "load", "load_run": "load"}

__all__ = [
    "Config",
    "DataSettings",
    "LoadedRun",
    "LogSettings",
    "ModelSettings",
    "OptimSettings",
    "ParallelSettings",
    "TrainSettings",
    "load_run",
]


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f".{_homes[name]}", __name__), name)
