"""Swapping the residual of a transformers model in place."""
