"""Hugging Face: swap the residual of a transformers model, verify it, save it, load it."""

from .convert import convert, revert
from .delta import load_delta, reset, save_delta, trainable
from .export import export
from .fla import read_fla
from .layouts import LAYOUTS, Layout
from .released import FLA, KIMI_K3, from_release, load_released, to_release
from .report import Report
from .verify import Verification, verify

__all__ = [
    "FLA",
    "KIMI_K3",
    "LAYOUTS",
    "Layout",
    "Report",
    "Verification",
    "convert",
    "export",
    "from_release",
    "load_delta",
    "load_released",
    "read_fla",
    "reset",
    "revert",
    "save_delta",
    "to_release",
    "trainable",
    "verify",
]
