"""Hugging Face: swap the residual of a transformers model, verify it, save it, load it."""

from .convert import convert, revert
from .delta import load_delta, reset, save_delta, trainable
from .layouts import LAYOUTS, Layout
from .report import Report
from .verify import Verification, verify

__all__ = [
    "LAYOUTS",
    "Layout",
    "Report",
    "Verification",
    "convert",
    "load_delta",
    "reset",
    "revert",
    "save_delta",
    "trainable",
    "verify",
]
