"""Decoder language models. Names load on first use: describing a model imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import SIZES, ModelConfig

if TYPE_CHECKING:
    from .decoder import Decoder

__all__ = ["SIZES", "Decoder", "ModelConfig"]


def __getattr__(name: str) -> Any:
    if name != "Decoder":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return import_module(".decoder", __name__).Decoder


def __dir__() -> list[str]:
    return __all__
