"""The inspector: who reads whom in one forward pass, and the effect of each part."""

from .forward_pass import ForwardPass, Removal, Top
from .inspection import Inspection
from .look import inspect

__all__ = ["ForwardPass", "Inspection", "Removal", "Top", "inspect"]
