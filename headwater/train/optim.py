"""Optimizers: who takes which parameter, and how fast it learns at each step.

`headwater.param_groups` says which parameters decay and which have a rate of their own, for any trainer. Muon
may take the matrices; everything else goes to AdamW.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headwater.errors import spell
from headwater.residuals.parameter_groups import param_groups
from headwater.runs.settings import OptimSettings
from headwater.train.muon import BatchedMuon, DividedMuon, StackedMuon


def build_optimizers(
    model: nn.Module, settings: OptimSettings, *, on_device: bool = False
) -> dict[str, torch.optim.Optimizer]:
    """AdamW, or Muon beside it, with another for the experts' stacks of matrices.

    `on_device`: learning rates are tensors on the GPU, and nothing waits for the host.
    """
    # Which parameters decay is the same for every trainer.
    groups = param_groups(
        model, lr=settings.lr, weight_decay=settings.weight_decay, query_lr=settings.query_lr
    )
    matrices = []
    others = []
    for group in groups:
        if group["name"] == "matrices":
            matrices.append(group)
        else:
            others += by_mesh(group)
    # A fused step is one kernel for many parameters.
    on_gpu = all(parameter.is_cuda for parameter in model.parameters())
    options: dict[str, Any] = {
        "betas": (settings.beta1, settings.beta2),
        "fused": on_gpu or on_device or None,  # None: torch decides
        "capturable": on_gpu and on_device,
    }
    optimizers: dict[str, torch.optim.Optimizer]
    if settings.optimizer == "adamw":
        optimizers = {"adamw": torch.optim.AdamW([*matrices, *others], **options)}
    else:
        kind: type[torch.optim.Muon] = BatchedMuon if on_device else torch.optim.Muon
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            kind = DividedMuon
        # Scaled to the size of AdamW's updates, so that one learning rate and one decay serve both.
        muon = kind(of_axes(matrices, 2), adjust_lr_fn="match_rms_adamw")
        optimizers = {"muon": muon, "adamw": torch.optim.AdamW(others, **options)}
        if stacks := of_axes(matrices, 3):
            optimizers["muon_experts"] = StackedMuon(stacks, adjust_lr_fn="match_rms_adamw")
    # A captured step reads its rate from the GPU.
    if on_device:
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                device = group["params"][0].device
                group["lr"] = torch.tensor(group["lr"], device=device)
    return optimizers


def of_axes(groups: list[dict[str, Any]], axes: int) -> list[dict[str, Any]]:
    """Choose the parameters with so many axes: 2 are matrices, 3 a matrix for each expert."""
    chosen = []
    for group in groups:
        parameters = [parameter for parameter in group["params"] if parameter.ndim == axes]
        if parameters:
            chosen.append({**group, "params": parameters})
    return chosen


def by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a group by the ranks that parameters are divided over: an optimizer takes a list in one operation."""
    # Plain tensors make a list of their own.
    lists: dict[object, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        lists.setdefault(mesh, []).append(parameter)
    return [{**group, "params": parameters} for parameters in lists.values()]


def learning_rate(step: int, steps: int, settings: OptimSettings) -> float:
    """Compute the rate for update `step` of `steps`, counted from zero: there is no state to save."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    # From the warm-up's end the rate falls, by half a cosine or in the last steps alone.
    if settings.schedule == "cosine":
        progress = (step - settings.warmup) / max(1, steps - settings.warmup)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        share = min(1.0, (steps - step) / max(1.0, settings.decay * steps))
    return settings.lr * (settings.final_lr + (1 - settings.final_lr) * share)


def ends_in_warmup(steps: int, settings: OptimSettings) -> str:
    """Warn of a run that ends before its warm-up; the text is empty for any other run."""
    if steps >= settings.warmup:
        return ""
    ends = f"the run ends at step {steps} of a warm-up of {settings.warmup}"
    share = f"{100 * steps / settings.warmup:.3g} % of its learning rate"
    advice = f"raise {spell('train.steps')} or lower {spell('optim.warmup')}"
    return f"{ends}, at {share}: {advice}"


def set_learning_rate(optimizers: dict[str, torch.optim.Optimizer], rate: float) -> None:
    """Set the rate of each group: `rate` times the factor of the group."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            own_rate = rate * group["lr_factor"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(own_rate)
            else:
                group["lr"] = own_rate
