"""Training the added parameters, alone or beside the adapters of PEFT, whose folders then hold them."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from headwater.errors import UserError

from .depth import RESIDUAL
from .install import conversion_of


def trainable(model: nn.Module, only: bool = False) -> int:
    """Let the added parameters train. Call it before the optimizer is made.

    PEFT freezes all that is not an adapter's. In a model with an adapter the residual becomes one of the modules that
    the adapter in use trains and saves, as `modules_to_save=["residual"]` in its config does: `save_pretrained` of the
    PeftModel and the Trainer's checkpoints then hold it, and `PeftModel.from_pretrained` on a converted base loads it.

    Arguments:
        model: a converted model, or a PeftModel around one.
        only: freeze everything else, the adapters too.

    Returns: the number of added parameters.

    Raises: `headwater.errors.UserError` if the model is not converted, or its adapter is a prompt.

        headwater.convert(model); model = peft.get_peft_model(model, config)
        print(headwater.hf.trainable(model))
    """
    check_adapters(model)
    if only:
        model.requires_grad_(False)
    keep_in_adapters(model)
    residual = conversion_of(model)[0].depth.residual
    residual.requires_grad_(True)
    return sum(p.numel() for p in residual.parameters())


def check_adapters(model: nn.Module) -> None:
    """PEFT writes of an adapter that is a prompt or a prefix the prompt alone, whatever else was trained."""
    configs = (getattr(module, "active_peft_config", None) for module in model.modules())
    if prompt := next(
        (config for config in configs if config is not None and config.is_prompt_learning), None
    ):
        raise UserError(
            f"the folder of a {type(prompt).__name__} adapter holds its prompt alone, and a residual trained beside it "
            "would be lost: give model.base_model, and keep the residual by headwater.hf.save_delta(model, FILE)"
        )


def keep_in_adapters(model: nn.Module) -> None:
    """The adapters in use, if there are any, train and save the residual."""
    configs = _peft_configs(model)
    for name in _active_adapters(model, configs):
        _save_with(name, configs[name], conversion_of(model)[1])


def _peft_configs(model: nn.Module) -> dict[str, Any]:
    """By adapter; PEFT leaves them on the model inside too."""
    return next(
        (
            module.__dict__["peft_config"]
            for module in model.modules()
            if "peft_config" in module.__dict__
        ),
        {},
    )


def _active_adapters(model: nn.Module, configs: Mapping[str, Any]) -> list[str]:
    """As the adapters' own layers have it; a method that has none has one adapter."""
    if not configs:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
    return next((list(layer.active_adapters) for layer in layers), list(configs))


def _save_with(name: str, config: Any, body: nn.Module) -> None:
    """Wrap the residual as PEFT wraps a module of `modules_to_save`, unless it is."""
    from peft.utils import ModulesToSaveWrapper

    wrapper: Any = getattr(body, RESIDUAL)
    if not isinstance(wrapper, ModulesToSaveWrapper):
        wrapper = ModulesToSaveWrapper(wrapper, name)
        setattr(body, RESIDUAL, wrapper)
    wrapper.update(name)
    wrapper.set_adapter(name)
    config.modules_to_save = sorted({*(config.modules_to_save or ()), RESIDUAL})
