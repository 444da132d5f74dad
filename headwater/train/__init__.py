"""Training from Python, as the command line does it. Names load on first use: describing a run imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headwater.runs.results import CompareResult, CompareRow, Spread, TrainResult
from headwater.runs.settings import (
    Config,
    DataSettings,
    LogSettings,
    ModelConfig,
    OptimSettings,
    ParallelSettings,
    TrainSettings,
    load_file,
)

if TYPE_CHECKING:
    from .comparison import compare
    from .load import LoadedRun, load_run
    from .loop import train
    from .studies import StudyResult, study

_homes = {
    "LoadedRun": "load",
    "StudyResult": "studies",
    "compare": "comparison",
    "load_run": "load",
    "study": "studies",
    "train": "loop",
}

__all__ = [
    "CompareResult",
    "CompareRow",
    "Config",
    "DataSettings",
    "LoadedRun",
    "LogSettings",
    "ModelConfig",
    "OptimSettings",
    "ParallelSettings",
    "Spread",
    "StudyResult",
    "TrainResult",
    "TrainSettings",
    "compare",
    "load_file",
    "load_run",
    "study",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f".{_homes[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
