"""The parts of a decoding step, one launch each: references, kernels (projection, attention, span, token), doors."""

from .operators import attend, exponentials, likeliest, open_span, project, take
from .reading import Merge, Norm

__all__ = ["Merge", "Norm", "attend", "exponentials", "likeliest", "open_span", "project", "take"]
