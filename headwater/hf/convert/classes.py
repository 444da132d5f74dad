"""Config and model classes of converted models, made from the plain ones on demand, and known to the Auto classes.

`LlamaConfig` becomes `HeadwaterLlamaConfig` of model type `headwater-llama`, a namespace transformers does not use.
Its extra field `headwater` says which residual, and is all that is needed to convert a freshly built plain model.
"""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from headwater.errors import UserError

from .depth import Depth, fill, watch
from .install import install, revert
from .layers import run_loop
from .layouts import PREFIX
from .plan import saved_plan
from .remake import remakable

AUTO = (
    AutoModelForCausalLM,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)


def config_class(base: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The config class of converted models whose plain config is of class `base`, and its models, made known."""
    if base in _configs:
        return _configs[base]
    model_type = PREFIX + base.model_type
    members: dict[str, Any] = {
        "model_type": model_type,
        "__module__": __name__,
        **remakable(config_class, base),
    }

    def get_config_dict(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """A plain folder may be read as this type, as PEFT does when it saves an adapter: without a warning."""
        found, rest = super(made, cls).get_config_dict(*args, **kwargs)  # type: ignore[arg-type]
        return (
            found | {"model_type": model_type}
            if found.get("model_type") == base.model_type
            else found
        ), rest

    members["get_config_dict"] = classmethod(get_config_dict)
    if (
        base.__module__.partition(".")[0] != "transformers"
    ):  # which gives a class without an __init__ one of fields
        members["__init__"] = base.__init__
    made = type(f"Headwater{base.__name__}", (base,), members)
    _configs[base] = made
    AutoConfig.register(model_type, made, exist_ok=True)
    for auto in AUTO:
        plain = auto._model_mapping.get(base, None)
        if isinstance(plain, type):
            model = head_class(plain)
            model.config_class = made
            auto.register(made, model, exist_ok=True)
    _share_mapping(base.model_type, model_type)
    return made


def class_of(config: PreTrainedConfig) -> Any:
    """The class that a config names, or the causal language model of its type."""
    for auto in AUTO:
        known = auto._model_mapping.get(type(config), None)
        if isinstance(known, type) and known.__name__ in (config.architectures or ()):
            return known
    return AutoModelForCausalLM


def _share_mapping(plain: str, made: str) -> None:
    """Let a released checkpoint's tensors become parameters of the converted model as of the plain one, fused experts
    for example. transformers looks that up by a model's type, or by its class where only that head differs."""
    mapping = get_checkpoint_conversion_mapping(plain)
    if mapping is not None:
        register_checkpoint_conversion_mapping(made, mapping, overwrite=True)


_configs: dict[type, type[PreTrainedConfig]] = {}
_heads: dict[type, type[PreTrainedModel]] = {}


class Converted:
    """Mixed in before a plain model class. Built from a config, the model is converted as the config says."""

    plain: type[PreTrainedModel]
    _depth: Depth
    _depth_loops: bool  # whether this is also the model that owns the loop over layers

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        _undo_inside(self)  # type: ignore[arg-type]
        plan = saved_plan(self, saved_settings(config))  # type: ignore[arg-type]
        install(
            plan, head=type(self), config=type(config), unchecked="it was built from its config"
        )

    def initialize_weights(self) -> None:
        """Parameters that a checkpoint did not bring get their start values: the added ones from their residual."""
        if "_depth" in self.__dict__:
            fill(self._depth)
        super().initialize_weights()  # type: ignore[misc]


def _undo_inside(model: nn.Module) -> None:
    """Heads for classification build what is inside them by its config, and so converted already: whole models are
    converted as a whole."""
    inside = next((module for module in model.modules() if "_conversion" in module.__dict__), None)
    if inside is not None:
        configs = [
            (module, module.__dict__["config"])
            for module in inside.modules()
            if "config" in module.__dict__
        ]
        revert(inside)
        for module, config in configs:
            module.__dict__["config"] = config


def head_class(base: type[Any]) -> type[PreTrainedModel]:
    """The class of converted models whose plain class is `base`; its forward can return depth weights."""
    if base in _heads:
        return _heads[base]

    @wraps(base.forward)
    def forward(self: Any, *args: Any, output_depth_weights: bool = False, **kwargs: Any) -> Any:
        run: Callable[[], Any] = partial(base.forward, self, *args, **kwargs)
        if self._depth_loops:
            run = partial(run_loop, self, partial(base.forward, self), args, kwargs)
        if not output_depth_weights:
            return run()
        outputs, record = watch(run)
        if isinstance(outputs, tuple):
            return (*outputs, record.weights)
        outputs["depth_weights"] = record.weights
        return outputs

    forward.__signature__ = _with_flag(inspect.signature(base.forward), "output_depth_weights")  # type: ignore[attr-defined]
    # transformers reads the file of a class's module to learn which kernels of attention and experts it may set.
    members = {
        "plain": base,
        "forward": forward,
        "__module__": base.__module__,
        **remakable(head_class, base),
    }
    _heads[base] = type(f"Headwater{base.__name__}", (Converted, base), members)
    _share_mapping(base.__name__, _heads[base].__name__)
    return _heads[base]


def _with_flag(signature: inspect.Signature, name: str) -> inspect.Signature:
    flag = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    *first, last = signature.parameters.values()
    order = (*first, flag, last) if last.kind is last.VAR_KEYWORD else (*first, last, flag)
    return signature.replace(parameters=order)


def saved_settings(config: PreTrainedConfig) -> dict[str, Any]:
    settings = getattr(config, "headwater", None)
    if not isinstance(settings, dict) or not {"residual", "scales"} <= settings.keys():
        raise UserError(
            f"a config of type '{config.model_type}' needs a field 'headwater' with 'residual' and 'scales', "
            f"got {settings}"
        )
    return settings
