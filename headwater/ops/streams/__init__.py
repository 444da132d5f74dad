"""Residuals of n parallel streams: reads, writes, and what their coefficients are made by, with their kernels."""

from .operators import gate_streams, project_streams, read_streams, write_streams

__all__ = ["gate_streams", "project_streams", "read_streams", "write_streams"]
