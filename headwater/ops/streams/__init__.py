"""Residuals of n parallel streams: reads, writes and the projection that coefficients come from, with their kernels."""

from .operators import project_streams, read_streams, write_streams

__all__ = ["project_streams", "read_streams", "write_streams"]
