"""The parts of a decoding step, one launch each.

`operators` has the functions, `reference` their plain form; the other files are kernels.
"""

from .operators import attend, exponentials, likeliest, open_span, project, take
from .reading import Merge, Norm

__all__ = ["Merge", "Norm", "attend", "exponentials", "likeliest", "open_span", "project", "take"]
