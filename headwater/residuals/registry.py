"""Names and options: `attnres-block:block=4,heads=8` becomes a Residual. The only registry in the package."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .base import Residual

R = TypeVar("R", bound=type[Residual])


@dataclass(frozen=True)
class Entry:
    """A registered name: the class, the options it fixes, and the annotated options that are left to the user."""

    name: str
    build: type[Residual]
    fixed: Mapping[str, Any]
    options: Mapping[str, Any]
    takes_kinds: bool


_entries: dict[str, Entry] = {}


def register(name: str, **fixed: Any) -> Callable[[R], R]:
    """Make a Residual known as `name`. Its keyword-only arguments become options; `fixed` ones are set by the name."""

    def add(cls: R) -> R:
        hints = get_type_hints(cls.__init__)
        keywords = [p.name for p in inspect.signature(cls).parameters.values() if p.kind is p.KEYWORD_ONLY]
        options = {k: hints[k] for k in keywords if k not in fixed and k != "kinds"}
        _entries[name] = Entry(name, cls, fixed, options, "kinds" in keywords)
        return cls

    return add


def names() -> tuple[str, ...]:
    """Every registered name, the plain residual first."""
    return tuple(sorted(_entries, key=lambda name: (name != "standard", name)))


def entry(name: str) -> Entry:
    if name not in _entries:
        near = difflib.get_close_matches(name, _entries, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"unknown residual '{name}'.{hint} Valid names: {', '.join(sorted(_entries))}")
    return _entries[name]


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """'name:key=value,key=value' to (name, options), each value checked against the option's type."""
    name, _, text = spec.partition(":")
    known = entry(name).options
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if key not in known:
            valid = ", ".join(known) or "none"
            raise ValueError(f"residual '{name}' has no option '{key}'. Valid options: {valid}")
        if key in options:
            raise ValueError(f"option '{key}' of residual '{name}' is given twice")
        if not equals:
            raise ValueError(f"option '{key}' of residual '{name}' needs a value: {key}=...")
        options[key] = _convert(f"{name}:{key}", value, known[key])
    return name, options


def build(spec: str, dim: int, sublayers: int, kinds: Sequence[str] | None = None) -> Residual:
    """The residual that `spec` names. `kinds` names each sublayer ("attention", "mlp"); by default they alternate."""
    name, options = parse(spec)
    known = entry(name)
    layout = {"kinds": kinds} if known.takes_kinds else {}
    residual = known.build(dim, sublayers, **known.fixed, **options, **layout)
    residual.spec = spec
    return residual


def with_options(spec: str, **options: Any) -> str:
    """The spec with these options in place of its own, as far as its residual has them."""
    name, _, text = spec.partition(":")
    chosen = {key: value for key, value in options.items() if key in entry(name).options}
    words = [word for word in text.split(",") if word and word.partition("=")[0] not in chosen]
    words += [f"{key}={value}" for key, value in chosen.items()]
    return ":".join(filter(None, (name, ",".join(words))))


def pinned(residual: Residual) -> str:
    """Its spec with every derived option written out: a saved model must not change where such a default does."""
    name, given = parse(residual.spec)
    free = [key for key in residual.derived if key in entry(name).options and given.get(key) is None]
    return with_options(residual.spec, **{key: getattr(residual, key) for key in free})


def _convert(label: str, text: str, kind: Any) -> Any:
    choices = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for choice in choices:
        value = _convert_one(text, choice)
        if value is not _no:
            return value
    raise ValueError(f"{label} must be {' or '.join(_describe(c) for c in choices)}, got '{text}'")


_no = object()


def _convert_one(text: str, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        return text if text in get_args(kind) else _no
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), _no)
    if kind is NoneType:
        return None if text.lower() == "none" else _no
    try:
        return kind(text)
    except ValueError:
        return _no


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    return {bool: "true or false", int: "a whole number", float: "a number", NoneType: "none"}.get(kind, "text")
