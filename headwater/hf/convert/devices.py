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
    """The residual's methods behind one forward, as `torch.func.functional_call` takes them."""

    def __init__(self, residual: Residual) -> None:
        super().__init__()
        self.residual = residual

    def forward(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.residual, verb)(*args, **kwargs)


def call_on(
    device: torch.device, residual: Residual, i: int, verb: str, *args: Any, **kwargs: Any
) -> Any:
    """A method of the residual with the tensors that sublayer `i` needs on `device`."""
    moved: dict[str, Tensor] = {}
    # Only what this sublayer needs is copied.
    for name, tensor in tensors_of(residual).items():
        if tensor.device != device and belongs(name, i):
            moved[f"residual.{name}"] = tensor.to(device)
    return torch.func.functional_call(Verbs(residual), moved, (verb, *args), kwargs)


def belongs(name: str, i: int) -> bool:
    """Tell a tensor of sublayer i, or of all.

    The sublayer before counts too: `ddl` may read with the tensors of a layer's first.
    """
    number = sublayer_of(name)
    return number is None or number in (i - 1, i)


def before_hop(module: nn.Module, residual: Residual, state: State, i: int) -> State:
    """The state that the hook of `module` is about to move: before another device, its sources alone.

    What kernels keep beside them is more to send, and of no use where there may be no kernels.
    """
    # Without hooks nothing moves between layers.
    if not hooked(module):
        return state
    here = state[0].device
    return residual.settle(state, i) if execution_device(module, here) != here else state


def hooked(module: nn.Module) -> bool:
    return "_hf_hook" in module.__dict__


def execution_device(module: nn.Module, default: torch.device) -> torch.device:
    """The device on which a module computes: that of its hook, else that of its parameters."""
    # An offloaded module computes where its hook says, not where its parameters lie.
    hook = _align_hook(module)
    if hook is not None and hook.execution_device is not None:
        # accelerate names devices by number, by kind, or as torch does.
        place = hook.execution_device
        if isinstance(place, int):
            return torch.device("cuda", place)
        # `cuda` is not equal to the `cuda:0` of the tensors on it; a tensor knows its device by the whole name.
        return torch.empty(0, device=place).device
    tensor = next(module.parameters(), None)
    return default if tensor is None else tensor.device


def place(residual: Residual, devices: Mapping[int | None, torch.device]) -> None:
    """Put the tensors of each sublayer on its device; those that belong to no sublayer stay."""
    for name, tensor in tensors_of(residual).items():
        device = devices.get(sublayer_of(name), tensor.device)
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
        # It restores what was offloaded to memory, and leaves out what is on disk.
        remove_hook_from_module(module)
        for name, tensor in tensors_of(module, recurse=False).items():
            if tensor.is_meta and hook is not None and hook.offload and name in hook.weights_map:
                _put(module, name, hook.weights_map[name].to(hook.execution_device, tensor.dtype))


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or a buffer, by its path, also where its device is of another kind."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    old = getattr(owner, leaf)
    # Assigning data is refused across kinds of devices, so the parameter is a new one.
    if isinstance(old, nn.Parameter):
        value = nn.Parameter(value, old.requires_grad)
    setattr(owner, leaf, value)


def tensors_of(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {
        **dict(module.named_parameters(recurse=recurse)),
        **dict(module.named_buffers(recurse=recurse)),
    }


def _align_hook(module: nn.Module) -> Any:
    """accelerate's hook that places a module, alone or in a sequence of hooks."""
    hook = module.__dict__.get("_hf_hook")
    # Several hooks of a module stand in one.
    hooks = getattr(hook, "hooks", (hook,))
    return next((one for one in hooks if hasattr(one, "execution_device")), None)
