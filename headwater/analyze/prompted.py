"""A model that reads one prompt, in the form of a run, so that a report can show it."""

from datetime import UTC, datetime
from typing import Any

from torch import Tensor

from headwater.analyze.inspector.inspection import Inspection
from headwater.residuals.measures import entropy
from headwater.runs.record import RecordedRun


def prompted_run(inspection: Inspection, *, dim: int, layers: int) -> RecordedRun:
    """One forward pass in place of a run: a depth record, and nothing of training.

    `inspection`: what `headwater.inspect` returns, `removals="none"` will do; the page calls the
    model by its name.
    `dim`, `layers`: the width of the stream and the decoder layers. Returns one of the `models`
    that `write_report` takes.

        inspection = headwater.inspect(model, tokens, name="llama-attnres", removals="none")
        run = prompted_run(inspection, dim=2048, layers=16)
        write_report([], Path("report.html"), models=[run])
    """
    tokens = len(inspection.ids)
    record = {
        "kind": "depth",
        "step": 0,
        "tokens": tokens,
        "sublayers": list(inspection.kinds),
        "output_norm": _over_tokens(inspection.source_size[1:]),
        "read_norm": _over_tokens(inspection.read_size),
        "mixing": inspection.mixing.mean(-1).tolist(),
        "entropy": entropy(inspection.mixing).mean(-1).tolist(),
    }
    config: dict[str, Any] = {
        "model": {"residual": inspection.residual, "dim": dim, "layers": layers}
    }
    return RecordedRun(
        name=inspection.name,
        residual=inspection.name,
        seed=None,
        config=config,
        summary={"tokens": tokens},  # no loss: that of a prompt is none of held-out text
        train=[],
        evals=[],
        depth=[record],
        notes=[f"not a run: one forward pass over a prompt of {tokens} tokens", *inspection.notes],
        written=datetime.now(UTC),
        beside=1,
    )


def _over_tokens(sizes: Tensor) -> list[float]:
    """Root mean square over tokens too, of sizes (places, T) that are one over channels."""
    return sizes.square().mean(-1).sqrt().tolist()
