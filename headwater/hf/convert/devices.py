"""Models spread over devices by accelerate's hooks: every verb of the residual finds its parameters where it runs.

A hook moves what enters a layer, so the state arrives on the layer's device by itself. The residual is no layer: its
parameters are brought along here. They are small (for Attention Residuals, two vectors a sublayer), so none of them is
left offloaded, and where one is needed on another device it is copied.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwater.residuals import Residual, State
from headwater.residuals.base import sublayer_of


class Verbs(nn.Module):
    """The residual's methods behind one forward, which is what `torch.func.functional_call` can call."""

    def __init__(self, residual: Residual) -> None:
        super().__init__()
        self.residual = residual

    def forward(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.residual, verb)(*args, **kwargs)


def call_on(
    device: torch.device, residual: Residual, i: int, verb: str, *args: Any, **kwargs: Any
) -> Any:
    """A method of the residual with the tensors that sublayer `i` needs on `device`."""
    moved = {
        f"residual.{name}": tensor.to(device)
        for name, tensor in _tensors(residual)
        if tensor.device != device and belongs(name, i)
    }
    verbs = Verbs(residual)
    return (
        torch.func.functional_call(verbs, moved, (verb, *args), kwargs)
        if moved
        else verbs(verb, *args, **kwargs)
    )


def belongs(name: str, i: int) -> bool:
    """A tensor of sublayer i, or of all. The one before counts too: `ddl` may read with those of a layer's first."""
    number = sublayer_of(name)
    return number is None or number in (i - 1, i)


def before_hop(module: nn.Module, residual: Residual, state: State, i: int) -> State:
    """The state that the hook of `module` is about to move: before another device, its sources alone.

    What kernels keep beside them is more to send, and of no use where there may be no kernels.
    """
    if not hooked(module):
        return state
    here = state[0].device
    return residual.settle(state, i) if execution_device(module, here) != here else state


def hooked(module: nn.Module) -> bool:
    return "_hf_hook" in module.__dict__


def execution_device(module: nn.Module, default: torch.device) -> torch.device:
    """The device on which a module computes: that of its hook, else that of its parameters."""
    hook = _align_hook(module)
    if hook is not None and hook.execution_device is not None:
        place = hook.execution_device
        # `cuda` is not equal to the `cuda:0` of the tensors on it; a tensor knows its device by the whole name.
        return (
            torch.device("cuda", place)
            if isinstance(place, int)
            else torch.empty(0, device=place).device
        )
    tensor = next(module.parameters(), None)
    return default if tensor is None else tensor.device


def place(residual: Residual, devices: Mapping[int, torch.device]) -> None:
    """Put the tensors of each sublayer on its device; those that belong to no sublayer stay."""
    for name, tensor in _tensors(residual):
        number = sublayer_of(name)
        device = tensor.device if number is None else devices.get(number, tensor.device)
        if tensor.device != device:
            _put(residual, name, tensor.detach().to(device))


@torch.no_grad()
def bring_back(residual: Residual) -> None:
    """Take accelerate's hooks off the residual; what they had offloaded comes back."""
    for module in residual.modules():
        if not hooked(module):
            continue
        from accelerate.hooks import remove_hook_from_module

        hook = _align_hook(module)
        remove_hook_from_module(
            module
        )  # it restores what was offloaded from memory, and leaves out what is on disk
        for name, tensor in _tensors(module, recurse=False):
            if tensor.is_meta and hook is not None and hook.offload and name in hook.weights_map:
                _put(module, name, hook.weights_map[name].to(hook.execution_device, tensor.dtype))


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or a buffer, by its path, also where its device is of another kind."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    old = getattr(owner, leaf)
    setattr(
        owner,
        leaf,
        nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value,
    )


def _tensors(module: nn.Module, recurse: bool = True) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]


def _align_hook(module: nn.Module) -> Any:
    """accelerate's hook that places a module, alone or in a sequence of hooks."""
    hook = module.__dict__.get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))
    return next((each for each in hooks if hasattr(each, "execution_device")), None)
