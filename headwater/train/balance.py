"""Loads of the experts: after each step the routers' biases move by them, and two numbers tell how uneven they were."""

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
    """The largest load of an expert in any layer, in means of its layer."""


def balance(model: nn.Module, config: ModelConfig, ranks: Ranks, *, taken: bool) -> Load | None:
    """Sum the step's loads over the ranks, move the biases the same on each, and count anew.

    A step that is not `taken` moves no bias. Returns None where there are no experts.
    """
    names = [f"sublayers.{i}.body.router" for i, kind in enumerate(config.kinds) if kind == "moe"]
    if not names:
        return None
    # A rank of a pipeline has some of the routers, and counts zeros for the others.
    here = routers_of(model)
    counts: list[float] = []
    for name in names:
        counts += here[name].load.tolist() if name in here else [0.0] * config.experts
    sums = ranks.sums(counts)
    loads = torch.tensor(sums, dtype=torch.float64).view(len(names), -1)
    for name, load in zip(names, loads):
        if name in here:
            router = here[name]
            if taken:
                router.move_bias(load.to(router.bias), config.router_rate)
            router.load.zero_()
    return Load(*unevenness(loads).tolist())


def balance_on_device(routers: Iterable[Router], rate: float, bad: Tensor) -> Tensor:
    """Do the same for a process alone on its GPU, without the host: `bad` is one for a step that is left out.

    Returns the two numbers of `Load`, or an empty tensor for a model without experts.
    """
    # All of this is queued on the GPU; the host learns of it later.
    loads = []
    for router in routers:
        loads.append(router.load.double())
        router.move_bias(router.load, rate * (1 - bad))
        router.load.zero_()
    if not loads:
        return bad.new_empty(0, dtype=torch.float64)
    return unevenness(torch.stack(loads))


def unevenness(loads: Tensor) -> Tensor:
    """The two numbers of `Load` for loads (layers, E)."""
    # A step without tokens has no load
    relative = loads / loads.mean(-1, keepdim=True).clamp(min=1e-9)
    return torch.stack((relative.std(-1, correction=0).mean(), relative.max()))
