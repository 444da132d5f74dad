"""After each step, the routers' biases move by the load of the experts; and what the load was, as two numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwater.models import ModelConfig
from headwater.models.moe import Router
from headwater.train.distributed.parts import routers_of
from headwater.train.distributed.ranks import Ranks


class Load(NamedTuple):
    """The unevenness of the experts' loads in a step."""

    cv: float
    """Coefficient of variation of a layer's loads, 0 where all are equal; mean over layers."""
    highest: float
    """Of all layers, the largest load of an expert, in means of its layer."""


def balance(model: nn.Module, config: ModelConfig, ranks: Ranks, *, taken: bool) -> Load | None:
    """Sum the step's loads over the ranks, move the biases the same on each if the step was `taken`, and count anew.
    None where there are no experts."""
    names = [f"sublayers.{i}.body.router" for i, kind in enumerate(config.kinds) if kind == "moe"]
    if not names:
        return None
    here = routers_of(model)
    counts = [
        here[name].load.tolist() if name in here else [0.0] * config.experts for name in names
    ]
    sums = ranks.sums([count for layer in counts for count in layer])
    loads = torch.tensor(sums, dtype=torch.float64).view(len(names), -1)
    for name, load in zip(names, loads):
        if name in here:
            if taken:
                here[name].move_bias(load.to(here[name].bias), config.router_rate)
            here[name].load.zero_()
    return Load(*unevenness(loads).tolist())


def balance_on_device(routers: Iterable[Router], rate: float, bad: Tensor) -> Tensor:
    """The same for a process alone on its GPU, without the host: `bad` is one for a step that is left out. Returns the
    two numbers of `Load`, or none of a model without experts."""
    loads = []
    for router in routers:
        loads.append(router.load.double())
        router.move_bias(router.load, rate * (1 - bad))
        router.load.zero_()
    return unevenness(torch.stack(loads)) if loads else bad.new_empty(0, dtype=torch.float64)


def unevenness(loads: Tensor) -> Tensor:
    """The two numbers of `Load` for loads (layers, E)."""
    relative = loads / loads.mean(-1, keepdim=True).clamp(
        min=1e-9
    )  # a step without tokens has no load
    return torch.stack((relative.std(-1, correction=0).mean(), relative.max()))
