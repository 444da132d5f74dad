"""Instances of classes that are made at run time pickle and copy: with the recipe that makes their class again."""

from collections.abc import Callable
from typing import Any

Maker = Callable[[Any], type]


def remakable(maker: Maker, base: type) -> dict[str, Any]:
    """Members for a class that `maker(base)` makes; `maker` is a function that can be imported, and makes it once."""
    return {"recipe": (maker, getattr(base, "recipe", base)), "__reduce_ex__": _reduce}


def blank(recipe: tuple[Maker, Any]) -> Any:
    """An instance without attributes; pickle and copy then fill it."""
    cls: Any = _class_of(recipe)
    return cls.__new__(cls)


def _class_of(recipe: Any) -> type:
    if isinstance(recipe, type):
        return recipe
    maker, base = recipe
    return maker(_class_of(base))


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    return blank, (self.recipe,), self.__dict__
