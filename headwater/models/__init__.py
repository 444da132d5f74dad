"""Decoder language models. Names load on first use, so that describing a model does not import torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import SIZES, ModelConfig

if TYPE_CHECKING:
    from .decoder import Decoder
    from .generate import generate

__all__ = ["SIZES", "Decoder", "ModelConfig", "generate"]

_homes = {"Decoder": "decoder", "generate": "generate"}


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f".{_homes[name]}", __name__), name)
