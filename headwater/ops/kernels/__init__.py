"""Triton kernels, each wrapped as a registered custom operator with a fake kernel. Importing this needs triton."""

from .merge import merge, merge_backward
from .mix import mix, mix_backward, mix_backward_
from .read import read
from .score import score, score_backward

__all__ = ["merge", "merge_backward", "mix", "mix_backward", "mix_backward_", "read", "score", "score_backward"]
