"""What a model does along its depth, as one JSON record: norms, gradients, and which read takes from which source."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwater.models import Decoder
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
    with torch.no_grad(), record(model.residual) as trace:
        model(tokens)
    matrix = mixing(model.residual, trace.sources).flatten(2)  # (L + 1, L + 1, tokens)
    return {
        "sublayers": list(model.sublayer_kinds),
        "output_norm": [_rms(y) for y in trace.sources[1:]],
        "read_norm": [_rms(torch.stack(x) if isinstance(x, tuple) else x) for x in trace.reads],
        "mixing": [[round(value, 6) for value in row] for row in matrix.mean(-1).tolist()],
        "entropy": entropy(matrix).mean(-1).tolist(),  # (L + 1,)
    }


def _rms(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()
