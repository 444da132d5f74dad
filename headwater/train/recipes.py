"""What one TOML file says of many runs: each of them with its whole configuration.

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

import difflib
import itertools
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from headwater.errors import UserError, nearest
from headwater.models.config import ModelConfig
from headwater.train.config import Config, DataSettings, check, override
from headwater.train.data.dataset import Dataset, prepare
from headwater.train.differences import differences

KEYS = ("name", "jobs", "keep_weights", "config", "runs")
RATIO = "tokens_per_parameter"
# Settings as a recipe names them, by the flags of `headwater train`.
SETTINGS = {
    f"--{setting.name.replace('_', '-')}": f"{section.name}.{setting.name}"
    for section in fields(Config)
    for setting in fields(getattr(Config(), section.name))
}


@dataclass(frozen=True)
class Recipe:
    """What a study's file says: `runs` by the name of their folder."""

    name: str
    runs: dict[str, Config]
    jobs: int = 1
    keep_weights: bool = False


@contextmanager
def in_words_of_recipes() -> Iterator[None]:
    """What is raised inside, and what its runs said, names a flag of theirs: here as the setting that a recipe has."""
    try:
        yield
    except UserError as error:
        error.args = (as_settings(str(error)),)
        raise


def as_settings(said: str) -> str:
    """`--clip 1` is `optim.clip = 1` in a recipe, and `--resume` to run it again."""

    def setting(found: re.Match[str]) -> str:
        flag, value = found.groups()
        if flag not in SETTINGS:
            return found[0]
        return SETTINGS[flag] + (f" = {value.lower()}" if value else "")

    said = re.sub(r"(?<![\w-])(--[a-z][a-z-]*[a-z])(?: (\d+|True|False)\b)?", setting, said)
    return said.replace("--resume", "the same command")


def read_recipe(path: Path) -> Recipe:
    """The runs that a file describes, each with its whole configuration."""
    shape_of.cache_clear()
    prepared.cache_clear()
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no recipe at {path}") from None
    except IsADirectoryError:
        said = "is a folder, and a recipe is a TOML file that names settings and lists of them: give that file"
        raise UserError(f"{path} {said}") from None
    except (ValueError, OSError) as error:
        raise UserError(f"cannot read the recipe {path}: {error}") from None
    for key in values:
        if key not in KEYS:
            raise UserError(f"{path}: unknown key {key!r}; {instead_of(key)}")
    name, tables = values.get("name", path.stem), values.get("runs")
    if not isinstance(name, str) or not name:
        raise UserError(
            f"{path}: name must be a word, which its folder has under runs/; got {name!r}"
        )
    if isinstance(tables, dict):
        raise UserError(
            f"{path}: write [[runs]], as there may be several such tables, instead of [runs]"
        )
    if (
        not isinstance(tables, list)
        or not tables
        or not all(isinstance(table, dict) for table in tables)
    ):
        raise UserError(f"{path}: needs at least one table [[runs]] with lists of settings")
    jobs, keep = values.get("jobs", 1), values.get("keep_weights", False)
    if type(jobs) is not int or jobs < 1 or type(keep) is not bool:
        raise UserError(
            f"{path}: jobs must be a whole number from 1, keep_weights true or false; got {jobs!r}, {keep!r}"
        )
    refuse_lists(values.get("config"), f"{path}: config")
    base = override(Config(), values.get("config", {}), f"{path}: config")
    runs: dict[str, Config] = {}
    for table in tables:
        for key, value in table.items():
            if value == []:
                raise UserError(
                    f"{path}: runs: the list of {key} is empty, so there is nothing to run"
                )
            refuse_flat(base, key, value, f"{path}: runs")
        for choice in products(table):
            config, folder = config_of(base, choice, f"{path}: runs"), folder_name(choice)
            if runs.get(folder, config) != config:
                listing = "\n  ".join(
                    differences(asdict(runs[folder]), asdict(config), frozenset())
                )
                raise UserError(f"{path}: two runs would share the folder {folder}:\n  {listing}")
            if (
                config not in runs.values()
            ):  # tables may overlap, in whatever order they name their settings
                runs[folder] = config
    runs = dict(
        sorted(runs.items(), key=lambda item: item[1].train.seed)
    )  # else in the file's order
    return Recipe(str(name), runs, jobs, keep)


def instead_of(key: str) -> str:
    """What whoever wrote this key at the top of a recipe may have meant."""
    if key in ("plugin", "plugins"):
        return "a module that registers residuals is named to the command: --plugin MODULE"
    if hasattr(Config(), key):
        return f"what all runs share stands under [config.{key}], and lists of it under [[runs]]"
    if setting := setting_near(key):
        section, _, name = setting.partition(".")
        return f'{name} stands under [config.{section}], or as "{setting}" under [[runs]], where it may be a list'
    return nearest(key, KEYS)


def refuse_lists(shared: Any, where: str) -> None:
    """What all runs share has one value, unless it is a list itself; whoever gives several means runs with each."""
    for section, settings in shared.items() if isinstance(shared, dict) else ():
        for name, value in settings.items() if isinstance(settings, dict) else ():
            default = getattr(getattr(Config(), section, None), name, ())
            if isinstance(value, list) and not isinstance(default, tuple):
                each = f'"{section}.{name}" = {value} under [[runs]]'
                raise UserError(
                    f"{where}: {section}: {name} is one value for all runs; for a run with each, write {each}"
                )


def products(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every choice of one value from each list; what is no list is the same in all."""
    lists = [value if isinstance(value, list) else [value] for value in table.values()]
    return [dict(zip(table, values, strict=True)) for values in itertools.product(*lists)]


def refuse_flat(base: Config, key: str, value: Any, where: str) -> None:
    """A setting that is a list, of files as a rule, needs a list of such: whoever names two in one list may mean a run
    with each of them, or runs with both."""
    section, _, name = key.partition(".")
    given = value if isinstance(value, list) else [value]
    if isinstance(getattr(getattr(base, section, None), name, None), tuple) and not isinstance(
        given[0], list
    ):
        both = f", or {[given]} for all of them in one run" if len(given) > 1 else ""
        each = " for a run with each" if both else ""
        raise UserError(
            f'{where}: "{key}" is a list itself: write {[[item] for item in given]}{each}{both}'
        )


def config_of(base: Config, choice: Mapping[str, Any], where: str) -> Config:
    nested: dict[str, Any] = {}
    for key, value in choice.items():
        if key != RATIO:
            section, dot, name = key.partition(".")
            if isinstance(value, dict):  # TOML takes a dot without quotes for a table
                inner = next(iter(value), "...")
                raise UserError(
                    f'{where}: write the section and the setting in quotes: "{key}.{inner}" = ...'
                )
            if not dot:
                raise UserError(
                    f"{where}: {key!r} must name its section, {example_of(key)}; or be {RATIO!r}"
                )
            nested.setdefault(section, {})[name] = value
    config = override(base, nested, where)
    if RATIO in choice:
        if "train.steps" in choice:
            raise UserError(
                f'{where}: {RATIO} says how many steps a run takes, and so does "train.steps": give one'
            )
        ratio = choice[RATIO]
        if type(ratio) not in (int, float) or not 0 < ratio < math.inf:
            raise UserError(f"{where}: {RATIO} must be a number above zero; got {ratio!r}")
        config = replace(config, train=replace(config.train, steps=steps_for(config, ratio)))
    return check(config)


def example_of(key: str) -> str:
    """The setting that a key without a section is nearest to; else one that everybody knows."""
    return f'such as "{near}"' if (near := setting_near(key)) else 'as "optim.lr" does'


def setting_near(key: str) -> str | None:
    """The setting, with its section, that a key without one is nearest to, such as `seeds`."""
    named = {name.partition(".")[2]: name for name in SETTINGS.values()}
    close = difflib.get_close_matches(key, named, n=1)
    return named[close[0]] if close else None


def steps_for(config: Config, tokens_per_parameter: float) -> int:
    """Steps that see so many tokens for each parameter of the layers. The residual's own do not count, so that all
    residuals of a size see the same tokens."""
    model = model_of(config, prepared(config.data))
    counts = model.parameter_count()
    inner = counts["total"] - counts["embedding"] - counts["residual"]
    inner -= 0 if model.config.tie_embeddings else model.head.weight.numel()
    return max(
        1,
        math.ceil(tokens_per_parameter * inner / (config.train.batch_size * model.config.context)),
    )


def model_of(config: Config, data: Dataset) -> Any:
    from headwater.train.run import resolve_model

    return shape_of(resolve_model(config.model, data))


@cache
def shape_of(config: ModelConfig) -> Any:
    """Once for all runs of a recipe that share it, and so `prepared`: both forget when a recipe is read."""
    from headwater.train.run import build_model

    return build_model(config, seed=0, meta=True)


@cache
def prepared(settings: DataSettings) -> Dataset:
    return prepare(settings)


def folder_name(choice: Mapping[str, Any]) -> str:
    """What tells a run from the others, as a name that any file system takes."""
    words = [f"{key.rpartition('.')[2]}-{value}" for key, value in choice.items()]
    return re.sub(r"[^\w.,=+-]+", "_", "-".join(words))
