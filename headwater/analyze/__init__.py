"""Explains a model: the record of a run read back, and the HTML report made from it."""
