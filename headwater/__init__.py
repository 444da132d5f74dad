"""headwater: the residual stream as a part you can swap. Names load on first use; `import headwater` loads no torch."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.hf import convert
    from headwater.ops import depth_attention

    from .analyze.inspector import inspect
    from .generation.generate import generate
    from .hf import revert, verify
    from .models import Decoder, ModelConfig
    from .residuals import (
        AttentionResidual,
        Residual,
        StandardResidual,
        build,
        mixing,
        record,
        register,
    )
    from .residuals.parameter_groups import param_groups

__version__ = "0.1.0"

_homes = {
    "AttentionResidual": "residuals",
    "Decoder": "models",
    "ModelConfig": "models",
    "Residual": "residuals",
    "StandardResidual": "residuals",
    "build": "residuals",
    "convert": "hf",
    "depth_attention": "ops",
    "generate": "generation.generate",
    "inspect": "analyze.inspector",
    "mixing": "residuals",
    "param_groups": "residuals.parameter_groups",
    "record": "residuals",
    "register": "residuals",
    "revert": "hf",
    "verify": "hf",
}

__all__ = [
    "AttentionResidual",
    "Decoder",
    "ModelConfig",
    "Residual",
    "StandardResidual",
    "build",
    "convert",
    "depth_attention",
    "generate",
    "inspect",
    "mixing",
    "param_groups",
    "record",
    "register",
    "revert",
    "verify",
]

# headwater.hf.reset needs no other import
_rooms = {
    "analyze",
    "errors",
    "generation",
    "hf",
    "models",
    "ops",
    "residuals",
    "stages",
    "train",
}


def __getattr__(name: str) -> Any:
    if name in _rooms:
        return import_module(f".{name}", __name__)
    if name not in _homes:
        raise AttributeError(f"module 'headwater' has no attribute '{name}'")
    return getattr(import_module(f".{_homes[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*__all__, *_rooms, "__version__"]


# Then it costs nothing to make converted models known
if "transformers.models.auto.modeling_auto" in sys.modules:
    import_module(".hf", __name__)
