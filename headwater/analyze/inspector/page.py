"""The inspector's page: one HTML file with its data, or the same page served with a prompt box.

Numbers travel as fixed point, as few bytes each as keep them within 8e-6; a page of 128 tokens and
24 layers stays under 3 MB. Text enters through JSON that cannot close its element and, in the page,
through textContent alone.
"""

import base64
from collections.abc import Callable, Sequence
from string import Template
from typing import Any

import numpy as np
from torch import Tensor

from headwater.analyze.markup import listing, text
from headwater.analyze.report import SHARED, json_island, page_files, policy
from headwater.errors import UserError

from .forward_pass import ForwardPass, Removal, Top

LIMIT = 2_900_000  # bytes; a page is promised to stay under 3 MB
ERROR = 8e-6
SCRIPTS = (
    *SHARED,
    "table",
    *(f"inspect/{name}" for name in ("data", "tokens", "grid", "source", "lens", "plots", "main")),
)
# What is left out until a page fits, more at each level, as the page says it.
LEVELS = (
    "",
    "",  # of what the model expects without a source at one read, the likeliest token alone
    "What the model expects without a source at one read is left out: with it the page would exceed 3 MB.",
    "Weights of each head, and effects at one read, are averages over tokens: the page would exceed 3 MB.",
)
MEANINGS = {
    "scalar": "",
    "channel": "This residual has a weight for each channel or group of channels: the grid shows their average.",
    "operator": "This residual passes sources through matrices: the grid shows how much of a source, along its own "
    "direction, is left in the read. Effects are exact.",
}


def make_page(passes: Sequence[ForwardPass], *, served: bool = False) -> str:
    """The page of one model, or of two on the same tokens.

    `served`: the page has a prompt box and asks its server.
    """
    style, script, frame = page_files(("report", "inspect/inspect"), SCRIPTS, "inspect/inspect")
    connect = "; connect-src 'self'" if served else ""
    title = "Inside " + " and ".join(forward_pass.name for forward_pass in passes)
    for level in range(len(LEVELS)):
        data = payload(passes, level) | {"served": served}
        page = Template(frame).substitute(
            policy=policy(style, script) + connect,
            style=style,
            script=script,
            title=text(_clipped(title, 120)),
            notes=listing("notes", _notes(passes, level)),
            data=json_island(data),
        )
        if len(page.encode()) <= LIMIT:
            break
    return page


def payload(passes: Sequence[ForwardPass], level: int = 0) -> dict[str, Any]:
    """Collect the numbers and texts that the page draws. `level`: how much is left out (`LEVELS`).

    Raises UserError if two models have different tokens.
    """
    first = passes[0]
    for other in passes[1:]:
        if other.tokens != first.tokens:
            raise UserError(
                f"two models side by side need the same tokens; {first.name} has "
                f"{len(first.tokens)} and {other.name} {len(other.tokens)}, cut differently: "
                "inspect them one by one"
            )
    # Every text is sent once, and tokens are places in the list of texts.
    texts = sorted({words for forward_pass in passes for words in forward_pass.texts.values()})
    places = {words: place for place, words in enumerate(texts)}
    return {
        "texts": texts,
        "tokens": [places[words] for words in first.tokens],
        "models": [_model(forward_pass, places, level) for forward_pass in passes],
    }


def _model(forward_pass: ForwardPass, places: dict[str, int], level: int) -> dict[str, Any]:
    # Tokens travel as places in the list of texts.
    place_of_id = np.zeros(max(forward_pass.texts) + 1, dtype=np.int64)
    for token, words in forward_pass.texts.items():
        place_of_id[token] = places[words]
    reads, sources = zip(*forward_pass.pairs)

    def triangle(matrix: Tensor) -> dict[str, Any]:
        """A read has only the sources before it."""
        return pack(matrix[list(reads), list(sources)])

    def top(tokens: Top) -> dict[str, Any]:
        return packed(tokens, place_of_id[tokens.ids.numpy()])

    parts = []
    for name, matrix in forward_pass.parts.items():
        mixing = matrix.mean(-1, keepdim=True) if level > 2 else matrix
        parts.append({"name": name, "mixing": triangle(mixing)})
    experts = []
    for sublayer, chosen in forward_pass.experts.items():
        experts.append({"sublayer": sublayer, **packed(chosen, chosen.ids)})
    return {
        "name": forward_pass.name,
        "residual": forward_pass.residual,
        "kinds": forward_pass.kinds,
        "meaning": MEANINGS[forward_pass.mixes],
        "loss": pack(forward_pass.loss),
        "mixing": triangle(forward_pass.mixing),
        "parts": parts,
        "readSize": pack(forward_pass.read_size),
        "sourceSize": pack(forward_pass.source_size),
        "reads": top(forward_pass.reads),
        "sources": top(forward_pass.sources),
        "experts": experts,
        "removed": _removal(forward_pass.removed, top, 0),
        "removedAt": _removal(forward_pass.removed_at, top, level),
    }


def _removal(
    removal: Removal | None, top: Callable[[Top], Any], level: int
) -> dict[str, Any] | None:
    if removal is None:
        return None
    loss = removal.loss.mean(-1, keepdim=True) if level > 2 else removal.loss
    if level > 1:
        return {"loss": pack(loss), "top": None}
    tokens = removal.top
    if level == 1:
        tokens = Top(tokens.ids[..., :1], tokens.probabilities[..., :1])
    return {"loss": pack(loss), "top": top(tokens)}


def packed(top: Top, ids: Tensor | np.ndarray) -> dict[str, Any]:
    return {"count": ids.shape[-1], "ids": pack(ids), "p": pack(top.probabilities)}


def pack(values: Tensor | np.ndarray) -> dict[str, Any]:
    """Numbers as fixed point in base64: value = low + step * integer, little-endian.

    `bytes` is the size of each integer: the smallest one that keeps errors below `ERROR`. Whole
    numbers stay what they are.
    """
    flat = np.asarray(values).ravel()
    low = float(flat.min(initial=0))
    span = float(flat.max(initial=0)) - low
    whole = np.issubdtype(flat.dtype, np.integer)

    # As few bytes as keep steps below twice the error; whole numbers have steps of one.
    coarsest = 1.0 if whole else 2 * ERROR
    size = 1
    while size < 4 and span > coarsest * (256**size - 1):
        size += 1
    step = 1.0 if whole else (span / (256**size - 1) or 1.0)

    # The low bytes of 32-bit integers, without the zeros above them.
    steps = (flat.astype(np.float64) - low) / step
    integers = np.rint(steps).astype("<u4")
    low_bytes = integers.view(np.uint8).reshape(-1, 4)[:, :size]
    data = base64.b64encode(low_bytes.tobytes()).decode()
    return {"low": low, "step": step, "bytes": size, "data": data}


def _notes(passes: Sequence[ForwardPass], level: int) -> list[str]:
    notes = []
    for forward_pass in passes:
        prefix = f"{forward_pass.name}: " if len(passes) > 1 else ""
        notes += [_clipped(prefix + note, 400) for note in forward_pass.notes]
    if LEVELS[level]:
        notes.append(LEVELS[level])
    return notes


def _clipped(words: str, limit: int) -> str:
    return words if len(words) <= limit else words[:limit] + "…"
