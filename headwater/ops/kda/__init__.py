"""Kimi Delta Attention: recurrent and chunkwise references, and the operator, which may run fla."""

from .gates import GATES, kda_gate
from .operators import kda

__all__ = ["GATES", "kda", "kda_gate"]
