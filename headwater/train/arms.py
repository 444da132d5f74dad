"""Arms of a comparison: a residual, and where asked switches of the model beside it.

standard    attnres-block:block=4    standard+shortswa=4    ddl+value_residual=true+layers=10
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from headwater.errors import UserError, flags, nearest, user_values
from headwater.runs.settings import Config, ModelConfig, said_of

# With these, arms would not be compared on equal tokens; the residual has a place of its own.
FIXED = ("residual", "size", "vocab_size", "context")
SWITCHES = tuple(f.name for f in fields(ModelConfig) if f.name not in FIXED)


@dataclass(frozen=True)
class Arm:
    """One line of a comparison: `residual` is a spec, `switches` are settings of the model that it changes."""

    residual: str
    switches: Mapping[str, Any]

    def apply(self, config: Config) -> Config:
        """The configuration of this arm's runs, from the one that all share."""
        model = replace(config.model, residual=self.residual, **self.switches)
        return replace(config, model=model)

    @property
    def flags(self) -> tuple[str, ...]:
        """The same, as `headwater train` takes it."""
        values = {name: "none" if value is None else value for name, value in self.switches.items()}
        return tuple(flags(residual=self.residual, **values))

    @property
    def identity(self) -> Hashable:
        """Equal for two spellings of one arm."""
        from headwater.residuals import parse

        name, options = parse(self.residual)
        return (name, *sorted(options.items()), *sorted(self.switches.items()))


def parse_arm(text: str) -> Arm:
    """'residual:options+setting=value+...' as an Arm.

    Raises UserError for what does not exist, or is not an arm's to change.

        parse_arm("standard+shortswa=4").switches  # {"shortswa": 4}
    """
    # A pattern of layers has pluses of its own, and 1e+3
    residual, *words = re.split(r"\+(?=\w+=)", text)
    # Values are checked as settings of a model are.
    switches: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in SWITCHES:
            choices = nearest(key, SWITCHES)
            raise UserError(
                f"arm {text!r}: {key!r} is no setting that an arm may change; {choices}"
            )
        switches[key] = _value(value)
    with said_of(f"arm {text!r}"):
        Config().over({"model": switches})
    arm = Arm(residual, switches)
    # Whether the residual and its options exist shows here.
    with user_values():
        hash(arm.identity)
    return arm


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower())
    except ValueError:
        return text
