"""The options of a residual: their bounds, and the text that says them,
`block=4,key_norm=false`."""

import re
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

# Options that need no sentence in every docstring.
COMMON = {"eps": "added to the mean square in its norms"}


def check_range(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise ValueError unless an option lies between `least` and `most`, both included."""
    if value >= least and (most is None or value <= most):
        return
    bounds = f"be at least {least}" if most is None else f"lie between {least} and {most}"
    raise ValueError(f"{name} must {bounds}, got {value}")


def convert(label: str, text: str, kind: Any) -> Any:
    """Return a text as a value of the type that an option is annotated with.

    Raises ValueError that names the option and what it takes.
    """
    for choice in _choices(kind):
        try:
            return _value(text, choice)
        except (KeyError, ValueError):
            # Another type of the annotation may fit.
            continue
    raise ValueError(f"{label} must be {describe(kind)}, got '{text}'")


def _value(text: str, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        # A word that is none of these is a KeyError.
        return dict(zip(get_args(kind), get_args(kind)))[text]
    if kind is bool:
        return {"true": True, "false": False}[text.lower()]
    if kind is NoneType:
        return {"none": None}[text.lower()]
    return kind(text)


def spell(value: Any) -> str:
    """Write a value as a spec has it."""
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def describe(kind: Any) -> str:
    """Say in words what an option takes."""
    words = {bool: "true or false", int: "a whole number", float: "a number", NoneType: "none"}
    descriptions = []
    for choice in _choices(kind):
        if get_origin(choice) is Literal:
            descriptions.append("one of " + ", ".join(get_args(choice)))
        else:
            descriptions.append(words.get(choice, "text"))
    return " or ".join(descriptions)


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def meaning(option: str, docstring: str) -> str:
    """Return what a docstring says of an option: the rest of the sentence behind `option`, or up to
    the next option after a semicolon."""
    # Lines of a docstring are joined first.
    text = " ".join(docstring.split())
    match = re.search(rf"`{option}`[:,]? (.+?)(?:[.;] `|\.(?: [A-Z]|$))", text)
    return match[1] if match else COMMON.get(option, "")
