"""Training the added parameters, alone or beside the adapters of PEFT, whose folders then hold them."""

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
    """Refuse a prompt or a prefix: PEFT writes the prompt alone, whatever else was trained."""
    for module in model.modules():
        config = getattr(module, "active_peft_config", None)
        if config is not None and config.is_prompt_learning:
            raise UserError(
                f"the folder of a {type(config).__name__} adapter holds its prompt alone, and a residual trained "
                "beside it would be lost: give model.base_model, and keep the residual by "
                "headwater.hf.save_delta(model, FILE)"
            )


def keep_in_adapters(model: nn.Module) -> None:
    """Let the adapters in use, if there are any, train and save the residual."""
    # PEFT leaves the configs, by adapter, on the model inside too.
    configs: dict[str, Any] = {}
    for module in model.modules():
        configs = configs or module.__dict__.get("peft_config", {})
    if not configs:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    # The adapters' own layers say which are active; a method that has none has one adapter.
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for name in layers[0].active_adapters if layers else [*configs]:
        _save_with(name, configs[name], conversion_of(model)[1])


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
