"""A model along its depth, as one JSON record: norms, gradients, and which read takes from which source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headwater.models import Decoder
from headwater.models.moe import Routes, count, routers
from headwater.residuals import mixing, record
from headwater.residuals.measures import entropy

DEPTH_TOKENS = 256  # enough for a stable average; mixing costs one backward pass for each read


def gradient_norms(model: Decoder) -> list[float]:
    """Norm of the gradient of each sublayer's parameters, its pre-norm included; call between backward and clipping."""
    norms = []
    for sublayer in model.sublayers:
        gradients = [p.grad for p in sublayer.parameters() if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0)
    return norms


def depth_record(model: Decoder, tokens: Tensor) -> dict[str, Any]:
    """One recorded pass over a few tokens, without touching parameters or gradients."""
    tokens = tokens[:1, :DEPTH_TOKENS]
    with torch.no_grad(), record(model.residual) as trace, routed(model) as loads:
        model(tokens)
    # How much of each source each read takes, token by token.
    matrix = mixing(model.residual, trace.sources).flatten(2)  # (L + 1, L + 1, tokens)
    return {
        "sublayers": list(model.sublayer_kinds),
        "output_norm": [_rms(y) for y in trace.sources[1:]],
        "read_norm": [_rms_of_read(x) for x in trace.reads],
        "mixing": [_rounded(row, 6) for row in matrix.mean(-1)],
        "entropy": entropy(matrix).mean(-1).tolist(),  # (L + 1,)
        **expert_loads(loads),
    }


@contextmanager
def routed(model: Decoder) -> Iterator[list[Tensor | None]]:
    """Collect for each sublayer the load of its experts in what runs inside, in means of them, (E,), or None."""
    loads: list[Tensor | None] = [None] * len(model.sublayers)

    def keep(name: str, routes: Routes) -> None:
        load = count(routes.experts, routes.scores.shape[-1])
        loads[int(name.split(".")[1])] = load / load.mean()

    hooks = [
        router.register_forward_hook(lambda _, __, routes, name=name: keep(name, routes))
        for name, router in routers(model).items()
    ]
    try:
        yield loads
    finally:
        for hook in hooks:
            hook.remove()


def expert_loads(loads: list[Tensor | None]) -> dict[str, Any]:
    """`expert_load`, of each expert in means of its layer, and `expert_load_cv`, their coefficient of variation.

    Nothing for a model without experts.
    """
    if not any(load is not None for load in loads):
        return {}
    values: dict[str, list[Any]] = {"expert_load": [], "expert_load_cv": []}
    for load in loads:
        values["expert_load"].append(None if load is None else _rounded(load, 5))
        values["expert_load_cv"].append(None if load is None else load.std(correction=0).item())
    return values


def _rounded(values: Tensor, digits: int) -> list[float]:
    return [round(value, digits) for value in values.tolist()]


def _rms_of_read(read: Any) -> float:
    """A read may give queries, keys and values each an input."""
    return _rms(torch.stack(read) if isinstance(read, tuple) else read)


def _rms(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()
