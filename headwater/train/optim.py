"""Which parameter is updated how, and how fast at each step.

The 2-D weights of the sublayers are the hidden matrices: they decay, and Muon may take them. Everything else
(embeddings, head, norms, and whatever the residual owns: queries, key norms, gates) goes to AdamW without decay,
since pulling those toward zero changes what they mean.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headwater.train.config import OptimSettings
from headwater.train.muon import BatchedMuon, DividedMuon

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(hidden matrices, everything else), each tied parameter once."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if name.startswith("sublayers.") and parameter.ndim == 2 else others).append(parameter)
    return matrices, others


def build_optimizers(
    model: nn.Module, settings: OptimSettings, *, on_device: bool = False
) -> dict[str, torch.optim.Optimizer]:
    """AdamW, or Muon beside it. `on_device`: learning rates are tensors on the GPU, and nothing waits for the host."""
    matrices, others = split_parameters(model)
    plain = [{"params": group, "weight_decay": 0.0} for group in by_mesh(others)]
    decayed = {"params": matrices, "weight_decay": settings.weight_decay}
    betas = (settings.beta1, settings.beta2)
    fused = all(parameter.is_cuda for parameter in model.parameters()) or None  # None: torch decides
    rate: float | Tensor = torch.tensor(settings.lr, device=matrices[0].device) if on_device else settings.lr
    options: dict[str, Any] = {"lr": rate, "betas": betas, "fused": fused, "capturable": on_device}
    if settings.optimizer == "adamw":
        return {"adamw": own_rates(torch.optim.AdamW([decayed, *plain], **options))}
    # Scaled to the size of AdamW's updates, so that one learning rate and one decay serve both.
    kind: type[torch.optim.Muon] = BatchedMuon if on_device else torch.optim.Muon
    kind = DividedMuon if any(isinstance(matrix, DTensor) for matrix in matrices) else kind
    muon = kind(matrices, lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw")
    for group in muon.param_groups:
        group["lr"] = rate
    return {"muon": own_rates(muon), "adamw": own_rates(torch.optim.AdamW(plain, **options))}


def own_rates(optimizer: Optimizer) -> Optimizer:
    """Learning rates that are tensors: one for each group, so that they can be set apart."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].clone()
    return optimizer


def by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """One list for each set of ranks that parameters are divided over: an optimizer takes a list in one operation."""
    lists: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        lists.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(lists.values())


def learning_rate(step: int, steps: int, settings: OptimSettings) -> float:
    """The rate for update `step` of `steps`, counted from zero: a pure function, so that there is no state to save."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    if settings.schedule == "cosine":
        progress = (step - settings.warmup) / max(1, steps - settings.warmup)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        share = min(1.0, (steps - step) / max(1.0, settings.decay * steps))
    return settings.lr * (settings.final_lr + (1 - settings.final_lr) * share)


def set_learning_rate(optimizers: dict[str, torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
