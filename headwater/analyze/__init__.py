"""Explain a model and its runs: mixing matrix, measures, inspector, report and scaling fits.

Names load on first use, so that reading a run does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .contract import check_residual
    from .mixing import MixingMatrix, mixing_matrix
    from .report import write_report
    from .scaling import Fit, Interval, Scaling, scaling_of
    from .table import residual_table

_homes = {
    "Fit": "scaling",
    "Interval": "scaling",
    "MixingMatrix": "mixing",
    "Scaling": "scaling",
    "check_residual": "contract",
    "mixing_matrix": "mixing",
    "residual_table": "table",
    "scaling_of": "scaling",
    "write_report": "report",
}

__all__ = [
    "Fit",
    "Interval",
    "MixingMatrix",
    "Scaling",
    "check_residual",
    "mixing_matrix",
    "residual_table",
    "scaling_of",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f".{_homes[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
