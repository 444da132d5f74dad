"""n parallel streams: reads, writes, and the projection and gates of their coefficients."""

from .operators import gate_streams, project_streams, read_streams, write_streams

__all__ = ["gate_streams", "project_streams", "read_streams", "write_streams"]
