"""Hugging Face: swap the residual of a transformers model, verify it, save it, load it."""

from headwater.hf.convert.install import convert, revert
from headwater.hf.convert.layouts import LAYOUTS, Layout
from headwater.hf.convert.report import Report
from headwater.hf.formats.delta import load_delta, reset, save_delta, trainable
from headwater.hf.formats.export import export
from headwater.hf.formats.fla import read_fla
from headwater.hf.formats.released import FLA, KIMI_K3, from_release, load_released, to_release

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
