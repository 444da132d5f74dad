"""Looking inside one forward pass: who reads whom, what each part says, and what happens without it."""

from .inspection import Inspection, Removal, Top
from .look import inspect

__all__ = ["Inspection", "Removal", "Top", "inspect"]
