"""A read's norm as kernels like it: RMSNorm(scale * x) with eps is RMSNorm(x) with eps / scale^2.

transformers has an RMSNorm class per architecture, so what a norm computes is found by trying it, in fp32.
"""

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwater._torch import hooked


class ScaledNorm(nn.RMSNorm):
    """Stands for `norm(scale * x)`: called, it does just that; a kernel takes `weight` and `eps` and folds it in.

    It owns no parameter: the weight is looked up in `norm`, wherever loading or training has put it.
    """

    norm: nn.Module
    base: type[nn.Module]
    scale: float
    offset: float

    def __init__(self, norm: nn.Module, scale: float, offset: float) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(norm=norm, scale=scale, offset=offset, base=type(norm))
        self.eps = eps_of(norm) / scale**2

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        weight = cast(Tensor, self.norm.weight)
        return weight + self.offset if self.offset else weight

    @property
    def folds(self) -> bool:
        """Hooks of a final norm run around the call that brings it the state."""
        return self.final or not hooked(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.scale == 1.0 else x * self.scale
        return self.base.forward(self.norm, x) if self.final else self.norm(x)

    @property
    def final(self) -> bool:
        """A converted final norm takes the state of the layers; what it was before takes a tensor."""
        return type(self.norm) is not self.base


def foldable(norm: nn.Module, scale: float) -> ScaledNorm | None:
    """`norm` after a multiplication by `scale`, if it is an RMSNorm of whatever class."""
    offset = _offset(norm)
    return None if offset is None else ScaledNorm(norm, scale, offset)


def eps_of(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)) or 0.0)


def _is_kernel(norm: nn.Module) -> bool:
    """fla's RMSNorm runs on no CPU, so it is known by its class."""
    kind = type(norm)
    return kind.__name__ == "RMSNorm" and kind.__module__.startswith("fla.")


@torch.no_grad()
def _offset(norm: nn.Module) -> float | None:
    """The number that the norm adds to its weight, 0 or 1 (Gemma); None: it is not an RMSNorm."""
    parameters = dict(norm.named_parameters())
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1:
        return None
    if list(norm.buffers()) or eps_of(norm) == 0.0:
        return None
    # It cannot be tried here, but is known to be one.
    if _is_kernel(norm):
        return 0.0
    trial = copy.deepcopy(norm).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    size = (2, len(parameters["weight"]))
    # The dtype is said: while a model is loaded, its own is the default.
    draws = torch.randn(size, generator=generator, device="cpu", dtype=torch.float32)
    weight, x = draws[0], 1e-3 * draws[1]  # small, so that the eps counts
    cast(Tensor, trial.weight).copy_(weight)
    # The definition of RMSNorm, by which the class is known.
    normed = x * torch.rsqrt(x.square().mean() + eps_of(norm))
    # Without the hooks of accelerate, which move it to another device
    result = type(trial).forward(trial, x)
    # Gemma's weight is stored as the distance from one.
    for offset in (0.0, 1.0):
        if torch.allclose(result, normed * (weight + offset), rtol=1e-4, atol=1e-5):
            return offset
    return None
