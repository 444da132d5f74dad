"""Numerics shared by the residuals: weights and gates in fp32 (fp64 stays fp64), one downcast of
what they mix."""

from headwater.ops.banks.reference import combine
from headwater.ops.numerics import project, project_normed, rms_scale, wide

__all__ = ["combine", "project", "project_normed", "rms_scale", "wide"]
