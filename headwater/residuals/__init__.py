"""How depth is connected: every residual behind `begin / read / write / end`."""

from . import attention, standard
from .attention import AttentionResidual
from .base import Norm, Read, Residual, State
from .record import Trace, mixing, record
from .registry import build, entry, names, parse, register
from .standard import StandardResidual

__all__ = [
    "AttentionResidual",
    "Norm",
    "Read",
    "Residual",
    "StandardResidual",
    "State",
    "Trace",
    "attention",
    "build",
    "entry",
    "mixing",
    "names",
    "parse",
    "record",
    "register",
    "standard",
]
