"""The inspector's page: one HTML file with its data inside, or the same page served with a prompt box.

Numbers travel as fixed point, as few bytes each as keep them within 8e-6; a page of 128 tokens and 24 layers stays
under 3 MB. Text enters through JSON that cannot close its element and, in the page, through textContent alone.
"""

import base64
from collections.abc import Callable, Sequence
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from headwater.analyze.markup import listing, text
from headwater.analyze.report import SHARED, json_island, page_files, policy
from headwater.errors import UserError

if TYPE_CHECKING:
    from .inspection import Inspection, Removal, Top

LIMIT = 2_900_000  # bytes; a page is promised to stay under 3 MB
ERROR = 8e-6
SCRIPTS = (
    *SHARED,
    "table",
    *(f"inspect/{name}" for name in ("data", "tokens", "grid", "source", "lens", "plots", "main")),
)
# Less and less, until a page fits: what is left out, in the order in which it goes.
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


def make_page(inspections: Sequence["Inspection"], *, served: bool = False) -> str:
    """The page of one model, or of two on the same tokens. `served`: it has a prompt box and asks its server."""
    style, script, frame = page_files(("report", "inspect/inspect"), SCRIPTS, "inspect/inspect")
    connect = "; connect-src 'self'" if served else ""
    title = "Inside " + " and ".join(inspection.name for inspection in inspections)
    for level in range(len(LEVELS)):
        data = payload(inspections, level) | {"served": served}
        page = Template(frame).substitute(
            policy=policy(style, script) + connect,
            style=style,
            script=script,
            title=text(_clipped(title, 120)),
            notes=listing("notes", _notes(inspections, level)),
            data=json_island(data),
        )
        if len(page.encode()) <= LIMIT:
            break
    return page


def payload(inspections: Sequence["Inspection"], level: int = 0) -> dict[str, Any]:
    """What the page draws. `level`: how much is left out (see `LEVELS`).

    Raises UserError if two models have different tokens.
    """
    first = inspections[0]
    for other in inspections[1:]:
        if other.tokens != first.tokens:
            raise UserError(
                f"two models side by side need the same tokens; {first.name} has {len(first.tokens)} and {other.name} "
                f"{len(other.tokens)}, cut differently: inspect them one by one"
            )
    texts = sorted({words for inspection in inspections for words in inspection.texts.values()})
    place = {words: i for i, words in enumerate(texts)}
    return {
        "texts": texts,
        "tokens": [place[words] for words in first.tokens],
        "models": [_model(inspection, place, level) for inspection in inspections],
    }


def _model(inspection: "Inspection", place: dict[str, int], level: int) -> dict[str, Any]:
    known = np.zeros(max(inspection.texts) + 1, dtype=np.int64)
    for token, words in inspection.texts.items():
        known[token] = place[words]
    rows, columns = zip(*inspection.pairs)

    def triangle(matrix: Tensor) -> Tensor:
        return matrix[list(rows), list(columns)]

    def top(found: "Top") -> dict[str, Any]:
        return packed(found, known[found.ids.numpy()])

    means = level > 2
    return {
        **{name: getattr(inspection, name) for name in ("name", "residual", "kinds")},
        "meaning": MEANINGS[inspection.mixes],
        "loss": pack(inspection.loss),
        "mixing": pack(triangle(inspection.mixing)),
        "parts": [
            {"name": name, "mixing": pack(triangle(m.mean(-1, keepdim=True) if means else m))}
            for name, m in inspection.parts.items()
        ],
        "readSize": pack(inspection.read_size),
        "sourceSize": pack(inspection.source_size),
        "reads": top(inspection.reads),
        "sources": top(inspection.sources),
        "experts": [
            {"sublayer": i, **packed(chosen, chosen.ids)}
            for i, chosen in inspection.experts.items()
        ],
        "removed": _removal(inspection.removed, top, 0),
        "removedAt": _removal(inspection.removed_at, top, level),
    }


def _removal(
    removal: "Removal | None", top: Callable[["Top"], Any], level: int
) -> dict[str, Any] | None:
    if removal is None:
        return None
    loss = removal.loss.mean(-1, keepdim=True) if level > 2 else removal.loss
    kept = (
        type(removal.top)(removal.top.ids[..., :1], removal.top.probabilities[..., :1])
        if level
        else removal.top
    )
    return {"loss": pack(loss), "top": None if level > 1 else top(kept)}


def packed(found: "Top", ids: Tensor | np.ndarray) -> dict[str, Any]:
    return {"count": ids.shape[-1], "ids": pack(ids), "p": pack(found.probabilities)}


def pack(values: Tensor | np.ndarray) -> dict[str, Any]:
    """Numbers as fixed point in base64: value = low + step * integer, little-endian, `bytes` each; whole numbers stay
    what they are."""
    flat = np.asarray(values).ravel()
    low = float(flat.min(initial=0))
    span = float(flat.max(initial=0)) - low
    whole = np.issubdtype(flat.dtype, np.integer)
    coarse = 1.0 if whole else 2 * ERROR
    size = next((n for n in (1, 2, 3) if span <= coarse * (256**n - 1)), 4)
    step = 1.0 if whole else (span / (256**size - 1) or 1.0)
    integers = np.rint((flat.astype(np.float64) - low) / step).astype("<u4")
    packed = integers.view(np.uint8).reshape(-1, 4)[:, :size].tobytes()
    return {"low": low, "step": step, "bytes": size, "data": base64.b64encode(packed).decode()}


def _notes(inspections: Sequence["Inspection"], level: int) -> list[str]:
    many = len(inspections) > 1
    found = [f"{one.name}: {note}" if many else note for one in inspections for note in one.notes]
    return [_clipped(note, 400) for note in found] + list(filter(None, [LEVELS[level]]))


def _clipped(words: str, limit: int) -> str:
    return words if len(words) <= limit else words[:limit] + "…"
