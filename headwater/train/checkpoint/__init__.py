"""Checkpoints: the folder of a step, how tensors are stored, what of a run they hold, saving beside the work."""
