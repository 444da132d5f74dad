"""Kimi Delta Attention: recurrent and chunkwise references, and the operator that chooses between them and fla."""

from .gates import GATES, kda_gate
from .operators import kda

__all__ = ["GATES", "kda", "kda_gate"]
