"""The parts of a decoding step in one launch each: references, kernels (projection, attention, span), and the doors."""

from .operators import attend, open_span, project
from .reading import Merge, Norm

__all__ = ["Merge", "Norm", "attend", "open_span", "project"]
