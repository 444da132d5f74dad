"""Looking inside one forward pass: who reads whom, what each part says, and what happens without it."""

from .forward_pass import ForwardPass, Removal, Top
from .inspection import Inspection
from .look import inspect

__all__ = ["ForwardPass", "Inspection", "Removal", "Top", "inspect"]
