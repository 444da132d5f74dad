"""The portions in which prompts are read: as many tokens as half of the free memory is for.

    tokens = (free - cache) / 2 / rows / (e (D (N + S + 6) + 2 W))

e: bytes of a number; D: the width; N: tensors that the residual holds at its last read, the sources
of Attention Residuals; S: reads that it computes at once, those of a block; W: what one sublayer's
projections produce, the widest. Portions are there for the bank of sources, D N of these numbers:
for 128k tokens at width 7168 it would take 15 GB.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from headwater.models.decoder import Decoder

# Tokens: smaller portions would read the weights too often.
LEAST = 256


def bytes_per_token(model: Decoder) -> int:
    """Bytes that one more token of a portion takes in one row, besides the cache.

    Real use can be up to twice this.
    """
    residual, config = model.residual, model.config
    sources = max(len(residual.layout(i)) for i in range(residual.sublayers + 1))
    widest = max(_produced(sublayer) for sublayer in model.sublayers)
    # A token meets its chosen experts, with three matrices each.
    if config.experts:
        widest = max(widest, 3 * config.experts_per_token * config.expert_width)
    width = config.dim * (sources + residual.reads_at_once + 6) + 2 * widest
    return width * model.embedding.weight.element_size()


def _produced(sublayer: nn.Module) -> int:
    """Count the channels that a sublayer's projections produce."""
    linear = (module for module in sublayer.modules() if isinstance(module, nn.Linear))
    return sum(module.out_features for module in linear)


def cache_bytes(model: Decoder, batch: int, room: int) -> int:
    """Bytes of a cache for `batch` rows of `room` tokens."""
    cache = model.new_cache(batch, room, torch.device("meta"))
    tensors = (tensor for entry in cache.entries if entry for tensor in entry.tensors())
    return sum(tensor.nbytes for tensor in tensors)


def free_bytes(device: torch.device) -> int | None:
    """Free bytes of a device, with what PyTorch keeps for later; None if it cannot be known."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def choose_chunk(model: Decoder, batch: int, room: int, free: int | None = None) -> int | None:
    """Choose how many tokens of a prompt to read at once.

    Arguments:
        model: a `Decoder`.
        batch: rows.
        room: tokens that a row will have in all.
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
        fitting = batch * free // cache
        cure = f"take at most {fitting} prompts at once, " if fitting else ""
        raise ValueError(
            f"a cache of {batch} rows of {room} tokens takes {cache / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free: {cure}lower max_new_tokens, or shorten the prompts"
        )
    # Half of what the cache leaves, in whole multiples of the least portion.
    tokens = max(0, free - cache) // 2 // batch // bytes_per_token(model)
    return None if tokens >= room else max(LEAST, tokens // LEAST * LEAST)
