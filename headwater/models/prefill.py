"""How many tokens of a prompt to read at once: as many as half of the free memory is for.

    tokens = (free - cache) / 2 / rows / (e (D (N + S + 6) + 2 W))

e: bytes of a number; D: the width; N: tensors that the residual holds at its last read, the sources of Attention
Residuals; S: sublayers of a block, whose reads of the finished blocks are there at once; W: what one sublayer's
projections produce, the widest. The bank of sources, D N of these, is what chunks are for: of 128k tokens at width 7168
it would take 15 GB.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from headwater.residuals import AttentionResidual

from .attention import Attention
from .decoder import Decoder
from .mla import MLA

LEAST = 256  # tokens: smaller portions would read the weights too often


def bytes_per_token(model: Decoder) -> int:
    """Bytes that one more token of a portion takes in one row, besides the cache; at most about half of it is not
    counted here."""
    residual, config = model.residual, model.config
    sources = max(len(residual.layout(i)) for i in range(residual.sublayers + 1))
    span = residual.block if isinstance(residual, AttentionResidual) else 1
    experts = 3 * config.experts_per_token * config.expert_width if config.experts else 0
    widest = max(_produced(sublayer) for sublayer in model.sublayers)
    width = config.dim * (sources + span + 6) + 2 * max(widest, experts)
    return width * model.embedding.weight.element_size()


def _produced(sublayer: nn.Module) -> int:
    return sum(
        module.out_features for module in sublayer.modules() if isinstance(module, nn.Linear)
    )


def cache_bytes(model: Decoder, batch: int, room: int) -> int:
    """Bytes of a cache for `batch` rows of `room` tokens."""
    each = sum(
        2 * body.kv_heads * body.head_dim for body in model.modules() if isinstance(body, Attention)
    )
    each += sum(
        body.latent_dim + body.shared_dim for body in model.modules() if isinstance(body, MLA)
    )
    return batch * room * each * model.embedding.weight.element_size()


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on a device, what PyTorch keeps for later included; None if it cannot be known."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def choose_chunk(model: Decoder, batch: int, room: int, free: int | None = None) -> int | None:
    """Tokens of a prompt to read at once.

    Arguments:
        model: a `Decoder`; batch: rows; room: tokens that a row will have in all.
        free: bytes; by default what is free where the model is.

    Returns a number of tokens, or None for all.
    Raises ValueError on a GPU where the cache alone does not fit.

        choose_chunk(model, batch=1, room=131072)
    """
    device = model.embedding.weight.device
    free = free_bytes(device) if free is None else free
    if free is None:
        return None
    cache = cache_bytes(model, batch, room)
    if cache > free and device.type == "cuda":
        fewer = (
            f"take at most {fitting} prompts at once, "
            if (fitting := batch * free // cache)
            else ""
        )
        raise ValueError(
            f"a cache of {batch} rows of {room} tokens takes {cache / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are "
            f"free: {fewer}lower max_new_tokens, or shorten the prompts"
        )
    tokens = max(0, free - cache) // 2 // batch // bytes_per_token(model)
    return None if tokens >= room else max(LEAST, tokens // LEAST * LEAST)
