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

from .depth import Depth, fill, watch
from .install import find_conversion, install, revert
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

    def get_config_dict(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """A plain folder may be read as this type, as PEFT does when it saves an adapter: without a warning."""
        settings, rest = super(converted, cls).get_config_dict(*args, **kwargs)  # type: ignore[arg-type]
        if settings.get("model_type") == base.model_type:
            settings = settings | {"model_type": model_type}
        return settings, rest

    members: dict[str, Any] = {
        "model_type": model_type,
        "__module__": __name__,
        "get_config_dict": classmethod(get_config_dict),
        **remakable(config_class, base),
    }
    # transformers gives a class without an __init__ one of fields, which others than its own do not bear.
    if base.__module__.partition(".")[0] != "transformers":
        members["__init__"] = base.__init__
    converted = type(f"Headwater{base.__name__}", (base,), members)
    # Before its models are made, which look their config up.
    _configs[base] = converted
    AutoConfig.register(model_type, converted, exist_ok=True)
    # Each Auto class that knows the plain model learns the converted one.
    for auto in AUTO:
        plain = auto._model_mapping.get(base, None)
        if isinstance(plain, type):
            model = head_class(plain)
            model.config_class = converted
            auto.register(converted, model, exist_ok=True)
    _share_mapping(base.model_type, model_type)
    return converted


def class_of(config: PreTrainedConfig) -> Any:
    """The class that a config names, or the causal language model of its type."""
    for auto in AUTO:
        model_class = auto._model_mapping.get(type(config), None)
        if isinstance(model_class, type) and model_class.__name__ in (config.architectures or ()):
            return model_class
    return AutoModelForCausalLM


def _share_mapping(plain: str, converted: str) -> None:
    """Let a released checkpoint's tensors become parameters of the converted model as of the plain one.

    Experts are fused so, for example. transformers looks that up by a model's type, or by its class
    where only that head differs.
    """
    mapping = get_checkpoint_conversion_mapping(plain)
    if mapping is not None:
        register_checkpoint_conversion_mapping(converted, mapping, overwrite=True)


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
        plan = saved_plan(self, config.headwater)  # type: ignore[arg-type]
        unchecked = "it was built from its config"
        install(plan, head=type(self), config=type(config), unchecked=unchecked)

    def initialize_weights(self) -> None:
        """Parameters that a checkpoint did not bring get their start values: the added ones from their residual."""
        if "_depth" in self.__dict__:
            fill(self._depth)
        super().initialize_weights()  # type: ignore[misc]


def _undo_inside(model: nn.Module) -> None:
    """Revert what is converted inside: the outer model is converted once, as a whole.

    A classification head builds its inner model from the config, hence converted already.
    """
    conversion = find_conversion(model)
    if conversion is not None:
        # Reverting gives the plain configs back, and the head needs the converted ones.
        modules = [module for module in conversion[1].modules() if "config" in module.__dict__]
        configs = [module.__dict__["config"] for module in modules]
        revert(conversion[1])
        for module, config in zip(modules, configs, strict=True):
            module.__dict__["config"] = config


def head_class(base: type[Any]) -> type[PreTrainedModel]:
    """The class of converted models whose plain class is `base`; its forward can return depth weights."""
    if base in _heads:
        return _heads[base]

    @wraps(base.forward)
    def forward(self: Any, *args: Any, output_depth_weights: bool = False, **kwargs: Any) -> Any:
        # A bare model owns the loop itself; a head calls one that does.
        run: Callable[[], Any] = partial(base.forward, self, *args, **kwargs)
        if self._depth_loops:
            run = partial(run_loop, self, partial(base.forward, self, *args), kwargs)
        # Without the flag a head costs nothing.
        if not output_depth_weights:
            return run()
        outputs, record = watch(run)
        # As transformers does with what is asked for besides: last in a tuple, by name in an output.
        if isinstance(outputs, tuple):
            return (*outputs, record.weights)
        outputs["depth_weights"] = record.weights
        return outputs

    # Trainer and generate read the signature to learn what a model takes.
    forward.__signature__ = _with_flag(inspect.signature(base.forward), "output_depth_weights")  # type: ignore[attr-defined]
    # transformers reads the file of a class's module to learn which kernels of attention and experts it may set.
    members = {
        "plain": base,
        "forward": forward,
        "__module__": base.__module__,
        **remakable(head_class, base),
    }
    _heads[base] = type(f"Headwater{base.__name__}", (Converted, base), members)
    # A class that no Auto class knows reads its folder by its own config class.
    _heads[base].config_class = config_class(base.config_class)
    _share_mapping(base.__name__, _heads[base].__name__)
    return _heads[base]


def _with_flag(signature: inspect.Signature, name: str) -> inspect.Signature:
    flag = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    # A keyword has to stand before **kwargs.
    *first, last = signature.parameters.values()
    order = [*first, last, flag]
    if last.kind is last.VAR_KEYWORD:
        order = [*first, flag, last]
    return signature.replace(parameters=order)
