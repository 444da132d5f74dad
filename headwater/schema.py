"""Settings that are declared once: their types, their bounds, and what another value would change.

    @dataclass(frozen=True, kw_only=True)
    class OptimSettings(Section, section="optim"):
        lr: float = setting(3e-3, above=0)

Files, flags and Python all end in the constructor of a section, and it checks every value. The
settings of a model are in models/config.py and the other settings of a run in runs/settings.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from headwater.errors import SettingError, UnknownSetting, nearest

Effect = Literal["numbers", "rounding", "records"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Bounds of a setting, and its marks."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    changes: Effect = "numbers"
    """Effect of another value: on the numbers of a run, only on their rounding, or only on what is
    kept, what is shown and which process computes it."""
    resumable: bool = False
    """A run may go on with another value although it changes numbers."""
    felt_by: Literal["all", "queries"] = "all"
    """The residuals that feel the setting: all of them, or those that have queries."""

    def bounds(self) -> str:
        """Say what a value must be, as the end of "must be"."""
        words = {
            "at least": self.least,
            "at most": self.most,
            "above": self.above,
            "below": self.below,
        }
        return " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)

    def holds(self, value: float) -> bool:
        return not (
            (self.least is not None and value < self.least)
            or (self.most is not None and value > self.most)
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        )


def setting(default: Any, **marks: Any) -> Any:
    """Declare a field of a section: its default, and the bounds and marks of a `Setting`."""
    return field(default=default, metadata={"setting": Setting(**marks)})


def setting_of(declared: Field[Any]) -> Setting:
    """Read the bounds and marks of a field."""
    return declared.metadata.get("setting") or Setting()


class Section:
    """A group of settings. Subclasses are frozen dataclasses."""

    section: ClassVar[str]

    def __init_subclass__(cls, section: str | None = None) -> None:
        if section is not None:
            cls.section = section

    def __post_init__(self) -> None:
        owner: Any = type(self)
        kinds = types_of(owner)
        for declared in fields(self):  # type: ignore[arg-type]
            name = self.dotted(declared.name)
            value = converted(getattr(self, declared.name), kinds[declared.name], name)
            marks = setting_of(declared)
            if type(value) in (int, float) and not marks.holds(value):
                raise SettingError(name, f"must be {marks.bounds()}", value)
            object.__setattr__(self, declared.name, value)

    def dotted(self, name: str) -> str:
        return f"{self.section}.{name}" if self.section else name

    def require(self, holds: bool, name: str, must: str) -> None:
        """Refuse the value of a setting unless a condition on several settings holds."""
        if not holds:
            raise SettingError(self.dotted(name), must, getattr(self, name))

    def over(self, values: Mapping[str, Any]) -> Self:
        """Return this section with other values of some settings, as a file or flags give them."""
        names = [declared.name for declared in fields(self)]  # type: ignore[arg-type]
        for key in values:
            if key not in names:
                raise UnknownSetting(f"unknown setting {key!r}; {nearest(key, names)}")
        return replace(self, **values)  # type: ignore[type-var]


@cache
def types_of(section: Any) -> dict[str, Any]:
    return get_type_hints(section)


def converted(value: Any, kind: Any, name: str) -> Any:
    """Return a value as the type of its setting. Whole numbers become floats, lists become
    tuples."""
    value = plain(value)
    options = options_of(kind)
    for option in options:
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if get_origin(option) is tuple and isinstance(value, list | tuple):
            item_kind = get_args(option)[0]
            return tuple(converted(item, item_kind, name) for item in value)
        if option is float and type(value) in (int, float) and math.isfinite(value):
            return float(value)
        if isinstance(option, type) and fits(value, option):
            return value
    raise SettingError(name, f"must be {' or '.join(map(described, options))}", value)


def plain(value: Any) -> Any:
    """Return a number, switch or word of numpy, as a sweep has it, as Python's."""
    numpy = type(value).__module__ == "numpy"
    return value.item() if numpy and getattr(value, "ndim", 1) == 0 else value


def options_of(kind: Any) -> tuple[Any, ...]:
    """List the types that a value may have."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def fits(value: Any, kind: type) -> bool:
    if kind in (int, float, bool):  # True is no number here, and no float is whole
        return kind is not float and type(value) is kind
    return isinstance(value, kind)


def described(kind: Any) -> str:
    """Name a type for somebody who writes a file."""
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each {described(get_args(kind)[0])}"
    names = {int: "an integer", float: "a finite number", str: "a string", bool: "true or false"}
    return names.get(kind, "none" if kind is type(None) else kind.__name__)
