"""The model types `headwater-...` for AutoConfig. No architecture is imported before one of its files is read."""

import importlib
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from .classes import config_class
from .layouts import FLA_TYPES, PREFIX


def register_types() -> None:
    """Make the converted type of every architecture known; a second call changes nothing.

    A layout may have been given for any of them, and travels in the config.
    """
    for model_type in (*CONFIG_MAPPING_NAMES, *FLA_TYPES):
        if PREFIX + model_type not in CONFIG_MAPPING:
            CONFIG_MAPPING.register(PREFIX + model_type, stub(model_type))


def own_config(model_type: str) -> type[PreTrainedConfig]:
    """transformers' own class: other packages register theirs under the same type (fla does, for bitnet)."""
    if model_type in CONFIG_MAPPING_NAMES:
        return getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    return fla_config(model_type)


def fla_config(model_type: str) -> type[PreTrainedConfig]:
    """The class of one of flash-linear-attention's types, which that package registers."""
    importlib.import_module("fla.models")
    return CONFIG_MAPPING[model_type]


def stub(model_type: str) -> type[PreTrainedConfig]:
    """Stands for a converted model's config class until a file of its type is read."""

    def from_dict(cls: type, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return config_class(own_config(model_type)).from_dict(config_dict, **kwargs)

    members = {
        "model_type": PREFIX + model_type,
        "from_dict": classmethod(from_dict),
        "__module__": __name__,
    }
    return type("HeadwaterConfig", (PreTrainedConfig,), members)
