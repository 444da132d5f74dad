"""A recipe: one TOML file that describes many runs, each with its whole configuration.

    name = "noise"
    jobs = 2                                           # runs side by side; they share the GPU or the cores

    [config.model]                                     # what all share, as in a file of `headwater train --config`
    size = "small"

    [[runs]]                                           # the product of all lists; there may be several such tables
    "model.residual" = ["standard", "attnres-block"]
    "optim.lr" = [1.5e-3, 3e-3]
    "train.seed" = [0, 1, 2]
    tokens_per_parameter = 20                          # instead of train.steps; of the parameters of the layers

The first seed of every arm is run before the second of any, so that a study cut off has whole pairs. studies.py runs
them.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from headwater.errors import UserError, nearest
from headwater.models.config import ModelConfig
from headwater.runs.settings import Config, DataSettings, flatten, said_of
from headwater.train.data.dataset import Dataset, prepare

KEYS = ("name", "jobs", "keep_weights", "config", "runs")
RATIO = "tokens_per_parameter"


@dataclass(frozen=True)
class PlannedRun:
    """A run of a recipe or a comparison: what messages call it, and its settings."""

    label: str
    config: Config
    arm: str = ""
    """Name of its arm in a comparison, where that is more than its residual."""


@dataclass(frozen=True)
class Recipe:
    """Runs to be made, and how."""

    name: str
    runs: tuple[PlannedRun, ...]
    jobs: int = 1
    keep_weights: bool = False


def read_recipe(path: Path) -> Recipe:
    """Read the runs that a file describes. Raises UserError for a file that does not fit."""
    shape_of.cache_clear()
    prepared.cache_clear()
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"cannot read the recipe {path}: {error}") from None
    for key in values:
        if key not in KEYS:
            raise UserError(f"{path}: unknown key {key!r}; {nearest(key, KEYS)}")
    # One table may be enough, and several may overlap.
    tables = values.get("runs")
    if not isinstance(tables, list) or not tables:
        raise UserError(f"{path}: needs at least one table [[runs]] with lists of settings")
    with said_of(f"{path}: config"):
        base = Config().over(values.get("config", {}))
    runs: dict[Config, PlannedRun] = {}
    with said_of(f"{path}: runs"):
        for table in tables:
            for choice in products(table):
                config = config_of(base, choice)
                # Tables may overlap, in whatever order they name their settings.
                runs.setdefault(config, PlannedRun(words_of(choice), config))
    # The first seed of all runs comes before the second of any.
    by_seed = sorted(runs.values(), key=lambda run: run.config.train.seed)
    return Recipe(
        name=str(values.get("name", path.stem)),
        runs=tuple(by_seed),
        jobs=values.get("jobs", 1),
        keep_weights=values.get("keep_weights", False),
    )


def products(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every choice of one value from each list. A value that is no list is the same in all choices."""
    settings = flatten(dict(table))  # TOML takes a dot without quotes for a table
    lists = [value if isinstance(value, list) else [value] for value in settings.values()]
    return [dict(zip(settings, values, strict=True)) for values in itertools.product(*lists)]


def words_of(choice: Mapping[str, Any]) -> str:
    """The values that a recipe's lists give a run, as its name: residual-standard-lr-0.003-seed-0."""
    return "-".join(f"{key.rpartition('.')[2]}-{value}" for key, value in choice.items())


def config_of(base: Config, choice: Mapping[str, Any]) -> Config:
    """The whole configuration of one choice."""
    nested: dict[str, Any] = {}
    for key, value in choice.items():
        # A setting is named with its section.
        section, dot, name = key.partition(".")
        if dot:
            nested.setdefault(section, {})[name] = value
        elif key != RATIO:
            nested[key] = value  # names no section, which is refused
    config = base.over(nested)
    if RATIO not in choice:
        return config
    steps = steps_for(config, choice[RATIO])
    return replace(config, train=replace(config.train, steps=steps))


def steps_for(config: Config, tokens_per_parameter: float) -> int:
    """Steps that see so many tokens for each parameter of the layers.

    The residual's own parameters do not count, so that all residuals of a size see the same tokens.
    """
    model = model_of(config, prepared(config.data))
    # Embedding and head grow with the vocabulary, not with the layers.
    counts = model.parameter_count()
    inner = counts["total"] - counts["embedding"] - counts["residual"]
    if not model.config.tie_embeddings:
        inner -= model.head.weight.numel()
    tokens_per_step = config.train.batch_size * model.config.context
    return max(1, math.ceil(tokens_per_parameter * inner / tokens_per_step))


def model_of(config: Config, data: Dataset) -> Any:
    """The model of a run, without weights."""
    from headwater.train.run import resolve_model

    return shape_of(resolve_model(config.model, data))


# Many runs of a recipe share a model or a text. Both caches forget when a recipe is read: in a
# notebook a residual's class may have changed since.


@cache
def shape_of(config: ModelConfig) -> Any:
    from headwater.train.run import build_model

    return build_model(config, seed=0, meta=True)


@cache
def prepared(settings: DataSettings) -> Dataset:
    return prepare(settings)
