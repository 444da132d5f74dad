"""Sums of all earlier layer outputs by weights, and the projection that weights come from."""

from .operators import mix_bank, project_source

__all__ = ["mix_bank", "project_source"]
