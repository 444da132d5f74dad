"""Hugging Face: swap the residual of a transformers model, verify it, save it, load it.

`import headwater.hf` makes converted models known to transformers' Auto classes.
"""

from headwater.hf.convert.adapters import trainable
from headwater.hf.convert.conversion import convert, open_residual
from headwater.hf.convert.install import revert
from headwater.hf.convert.layouts import LAYOUTS, Layout
from headwater.hf.convert.registration import register_types
from headwater.hf.convert.releases import RELEASES
from headwater.hf.convert.report import Report
from headwater.hf.formats.decoder import register_decoder
from headwater.hf.formats.delta import load_delta, reset, save_delta
from headwater.hf.formats.export import export
from headwater.hf.formats.fla import read_fla
from headwater.hf.formats.kimi import load_kimi, save_kimi
from headwater.hf.formats.names import FLA, KIMI_K3, from_release, to_release
from headwater.hf.formats.released import load_released
from headwater.hf.formats.run import export_run

from .verify import Verification, verify

__all__ = [
    "FLA",
    "KIMI_K3",
    "LAYOUTS",
    "RELEASES",
    "Layout",
    "Report",
    "Verification",
    "convert",
    "export",
    "export_run",
    "from_release",
    "load_delta",
    "load_kimi",
    "load_released",
    "open_residual",
    "read_fla",
    "reset",
    "revert",
    "save_delta",
    "save_kimi",
    "to_release",
    "trainable",
    "verify",
]

register_types()
register_decoder()
