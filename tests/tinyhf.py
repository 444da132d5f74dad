"""Small random models of transformers, as benchmarks/architectures.py builds them."""

from benchmarks.tinyhf import VOCAB, sample, stir, tiny_config, tiny_model, tokens

__all__ = ["VOCAB", "sample", "stir", "tiny_config", "tiny_model", "tokens"]
