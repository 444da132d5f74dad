"""Which parameter is updated how, and how fast at each step.

The 2-D weights of the sublayers are the hidden matrices: they decay, and Muon may take them. Everything else
(embeddings, head, norms, and whatever the residual owns: queries, key norms, gates) goes to AdamW without decay,
since pulling those toward zero changes what they mean.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from headwater.train.config import OptimSettings
from headwater.train.muon import DividedMuon


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(hidden matrices, everything else), each tied parameter once."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if name.startswith("sublayers.") and parameter.ndim == 2 else others).append(parameter)
    return matrices, others


def build_optimizers(model: nn.Module, settings: OptimSettings) -> dict[str, torch.optim.Optimizer]:
    matrices, others = split_parameters(model)
    plain = [{"params": group, "weight_decay": 0.0} for group in by_mesh(others)]
    decayed = {"params": matrices, "weight_decay": settings.weight_decay}
    betas = (settings.beta1, settings.beta2)
    fused = all(parameter.is_cuda for parameter in model.parameters()) or None  # None: torch decides
    if settings.optimizer == "adamw":
        return {"adamw": torch.optim.AdamW([decayed, *plain], lr=settings.lr, betas=betas, fused=fused)}
    # Scaled to the size of AdamW's updates, so that one learning rate and one decay serve both.
    kind = DividedMuon if any(isinstance(matrix, DTensor) for matrix in matrices) else torch.optim.Muon
    muon = kind(matrices, lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw")
    return {"muon": muon, "adamw": torch.optim.AdamW(plain, lr=settings.lr, betas=betas, fused=fused)}


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
            group["lr"] = rate
