"""Whether two configurations describe one run, or what differs.

A run goes on, and counts for a comparison or a study, only as what it began as; but more has come to be set since the
first runs, some settings only say what is kept, and a text is the same wherever it lies.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import fields, replace
from typing import Any

from headwater.models.config import ModelConfig
from headwater.train.config import Config, DataSettings, LogSettings, ParallelSettings, flatten

# Other values of these change what is kept and shown and who computes it, never what.
OUTER = frozenset(
    {
        "data.cache",
        *(
            f"train.{name}"
            for name in (
                "log_every",
                "eval_every",
                "depth_every",
                "save_every",
                "keep",
                "async_save",
            )
        ),
        *(f"parallel.{f.name}" for f in fields(ParallelSettings)),
        *(f"log.{f.name}" for f in fields(LogSettings)),
    }
)
# A run may be resumed with other values of these as well: of how a step is computed, which changes rounding alone, and
# of which steps to leave out, so that a run which one bad batch has stopped can go on.
FREE = OUTER | {
    *(f"train.{name}" for name in ("accumulate", "checkpoint_activations", "compile", "graph")),
    *(f"train.{name}" for name in ("skip_nonfinite", "skip_spikes", "spike_sigmas")),
}

CORPUS = frozenset(
    {"source_hash", "tokenizer_hash", "split"}
)  # equal where two runs have seen the same tokens
TEXT = frozenset(
    f"data.{f.name}" for f in fields(DataSettings)
)  # what tokens are made of, with the files

# The settings of a model before there were layer patterns: a decoder that lacks the others has their defaults.
OLD_MODEL = frozenset(
    {
        "vocab_size",
        "dim",
        "layers",
        "heads",
        "kv_heads",
        "mlp_dim",
        "context",
        "residual",
        "shortswa",
    }
    | {"value_residual", "qk_norm", "tie_embeddings", "fp32_stream", "rope_theta", "norm_eps"}
)

# What runs did that were begun before a setting existed.
BEFORE: Mapping[str, Any] = {
    "data.text_field": "text",
    "optim.query_lr": 1.0,
    "train.init_from": "",
    "train.graph": False,
    **{f"model.{f.name}": f.default for f in fields(ModelConfig) if f.name not in OLD_MODEL},
}


def with_before(base: Config) -> Config:
    """`base` with what runs did that were begun before a setting existed: under what a saved configuration says."""
    changes: dict[str, dict[str, Any]] = {}
    for key, value in BEFORE.items():
        section, name = key.split(".")
        changes.setdefault(section, {})[name] = value
    return replace(
        base, **{name: replace(getattr(base, name), **values) for name, values in changes.items()}
    )


def differences(
    saved: dict[str, Any],
    asked: dict[str, Any],
    free: frozenset[str] = FREE,
    before: Mapping[str, Any] = BEFORE,
) -> list[str]:
    """The keys that change the run and are not equal, with both values, compared as JSON (where tuples are lists);
    settings come before what follows from them. Where the tokens are known to be the same, what their text is called
    and where it lies does not count. `before`: values of keys that the saved configuration may be too old to have."""
    known = saved.get("corpus", {})
    if known.keys() >= CORPUS and known == asked.get("corpus"):
        free = free | TEXT
    old, new = as_compared(saved, before), as_compared(asked)
    keys = [
        key for key in old.keys() | new.keys() if key not in free and old.get(key) != new.get(key)
    ]
    keys.sort(key=lambda key: (key.startswith("corpus."), key))
    return [f"{key}: {old.get(key)!r} there, {new.get(key)!r} asked for" for key in keys]


def fingerprint(values: dict[str, Any], free: frozenset[str] = FREE) -> Hashable:
    """Equal for configurations without `differences`, if both call their text the same."""
    compared = as_compared(values, BEFORE)
    return frozenset(
        (key, frozen(value))
        for key, value in compared.items()
        if key not in free and value is not None
    )


def frozen(value: Any) -> Hashable:
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def as_compared(values: dict[str, Any], before: Mapping[str, Any] = {}) -> dict[str, Any]:
    return {**before, **flatten(json.loads(json.dumps(values)))}
