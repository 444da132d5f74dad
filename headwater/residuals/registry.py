"""Names and options: `attnres-block:block=4,heads=8` becomes a Residual. The only registry in the package."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from headwater.errors import UserError

from .base import Residual
from .layerwise import ALL_KINDS, sublayer_kinds
from .plugins import absence, flags_for, is_own, load_entry_points

NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
COMMON = {
    "eps": "added to the mean square in its norms"
}  # options that need no sentence in every docstring
R = TypeVar("R", bound=type[Residual])


@dataclass(frozen=True)
class Entry:
    """A registered name: the class, the options it fixes, and the annotated options that are left to the user."""

    name: str
    build: type[Residual]
    fixed: Mapping[str, Any]
    options: Mapping[str, Any]
    takes_kinds: bool
    formula: str


_entries: dict[str, Entry] = {}


def register(name: str, *, formula: str | None = None, **fixed: Any) -> Callable[[R], R]:
    """Make a Residual known as `name`, to `build`, `headwater train --residual` and everything else that takes a name.

    Arguments: `name`, small letters, digits, dots and dashes; `formula`, what tables show, by default the first line of
    the class's docstring; `fixed`, options that the name sets. The class's other keyword-only arguments become options,
    and need annotations: text is converted to what they say (int, float, bool, str, Literal, or one of them | None).
    `kinds`, if it is among them, is given the kind of each sublayer.

    Returns a decorator that gives the class back.
    Raises ValueError for a name that cannot be one or that another class has, for a class that is no Residual, and for
    an option without a type or that is not keyword-only.

        @register("leaky")
        class LeakyResidual(StreamResidual): ...
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"a residual's name is made of small letters, digits, dots and dashes; got {name!r}"
        )

    def add(cls: R) -> R:
        namesake = _entries.get(name)
        if namesake is not None and _place(namesake.build) != _place(
            cls
        ):  # the same place: a module loaded again
            raise ValueError(
                f"residual '{name}' is registered already, by {_place(namesake.build)}: choose another name"
            )
        if not issubclass(cls, Residual):
            raise ValueError(
                f"residual '{name}' must be a subclass of Residual or StreamResidual; got {_place(cls)}"
            )
        hints = get_type_hints(cls.__init__)
        parameters = inspect.signature(cls).parameters.values()
        keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        if surplus := [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][2:]:
            raise ValueError(
                f"'{surplus[0]}' of residual '{name}' is no option: write `*,` before it in __init__"
            )
        if bare := [k for k in keywords if k not in hints]:
            raise ValueError(
                f"option '{bare[0]}' of residual '{name}' needs a type, for example {bare[0]}: float"
            )
        options = {k: hints[k] for k in keywords if k not in fixed and k != "kinds"}
        text = (
            next(iter((cls.__doc__ or "").strip().splitlines()), "") if formula is None else formula
        )
        _entries[name] = Entry(name, cls, fixed, options, "kinds" in keywords, text)
        return cls

    return add


def _place(cls: type[Residual]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def names() -> tuple[str, ...]:
    """Returns every registered name, the plain residual first; those of installed packages too."""
    load_entry_points()
    return tuple(sorted(_entries, key=lambda name: (name != "standard", name)))


def entry(name: str) -> Entry:
    """Look up what is registered as `name`, or by the module of a saved name@module.

    Returns an `Entry`: class, fixed options, options left to the user.
    Raises ValueError if nothing is; the message names the nearest, or what to import.
    """
    name, _, module = name.partition("@")
    if name not in _entries:
        load_entry_points()
    if name not in _entries and module:
        raise ValueError(absence(name, module))
    if name not in _entries:
        raise ValueError(
            f"unknown residual '{name}'.{_near(name, _entries)} Valid names: {', '.join(sorted(_entries))}. "
            "One of your own: import the module that registers it, or name it with --plugin"
        )
    registered = _entries[name]
    if module and registered.build.__module__ != module:
        raise ValueError(
            f"residual '{name}' was registered by '{module}' where it was saved, and is by "
            f"'{_place(registered.build)}' here"
        )
    return registered


def _near(word: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(valid), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


class Option(NamedTuple):
    """An option of a residual, as one writes it: `name=default`; in words what it takes, and what it means."""

    name: str
    default: str
    takes: str
    meaning: str


def options_of(name: str) -> tuple[type[Residual], list[Option]]:
    """The class behind a registered `name`, and the options that are left to the user.

    Returns (class, options), each option with its name, its default as one writes it, in words what it takes, and what
    the class's docstring says of it: what follows the option's name in backticks, up to the end of the sentence or the
    next option after a semicolon.
    Raises ValueError for a name that is not registered.

    for option in options_of("attnres-block")[1]:
        print(f"{option.name}={option.default}: {option.meaning}")
    """
    registered = entry(name)
    defaults = inspect.signature(registered.build).parameters
    return registered.build, [
        Option(
            key,
            _spell(defaults[key].default),
            " or ".join(_describe(choice) for choice in _choices(kind)),
            _meaning(key, registered.build.__doc__ or ""),
        )
        for key, kind in registered.options.items()
    ]


def _meaning(option: str, docstring: str) -> str:
    match = re.search(
        rf"`{option}`[:,]? (.+?)(?:[.;] `|\.(?: [A-Z]|$))", " ".join(docstring.split())
    )
    return match[1] if match else COMMON.get(option, "")


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a `spec`, "name:key=value,key=value".

    Returns (name, options), each value converted to the option's type.
    Raises ValueError for an unknown name or option, an option given twice or without a value, or a value of another
    type; the message lists what is valid.

        parse("attnres-block:block=4,key_norm=false")  # ("attnres-block", {"block": 4, "key_norm": False})
    """
    if not isinstance(spec, str):
        description = spec.__name__ if isinstance(spec, type) else f"a {type(spec).__name__}"
        raise ValueError(
            f"a residual is given by its name, such as 'attnres-block:block=4'; got {description}"
        )
    name, _, text = spec.partition(":")
    valid_options = entry(name).options
    name = name.partition("@")[0]
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if key not in valid_options:
            valid = ", ".join(valid_options) or "none"
            raise ValueError(
                f"residual '{name}' has no option '{key}'.{_near(key, valid_options)} Valid options: {valid}"
            )
        if key in options:
            raise ValueError(f"option '{key}' of residual '{name}' is given twice")
        if not equals:
            raise ValueError(f"option '{key}' of residual '{name}' needs a value: {key}=...")
        options[key] = _convert(f"{name}:{key}", value, valid_options[key])
    return name, options


def build(spec: str, dim: int, sublayers: int, kinds: Sequence[str] | None = None) -> Residual:
    """The residual of a network.

    Arguments:
        spec: a registered name, with options if you like: "attnres-block:block=4,heads=8".
        dim: D, channels of the residual stream.
        sublayers: attentions and MLPs counted one by one: twice the layers of a usual decoder.
        kinds: of each sublayer, "attention", "mlp" ..., which some residuals tell apart; by default they alternate.

    Returns a `Residual`, a module: `begin`, then `read` and `write` for each sublayer, then `end`.
    Raises ValueError for an unknown name, option or kind, and for sizes that do not fit it; the message lists what is
    valid.

        residual = build("attnres-full", dim=512, sublayers=24)
        state = residual.begin(torch.randn(2, 16, 512))
    """
    name, options = parse(spec)
    registered = entry(name)
    layout = {"kinds": kinds} if registered.takes_kinds else {}
    residual = registered.build(dim, sublayers, **registered.fixed, **options, **layout)
    residual.spec = spec
    if kinds is not None:
        residual.kinds = sublayer_kinds(sublayers, kinds, ALL_KINDS)
    return residual


def with_options(spec: str, **options: Any) -> str:
    """Returns the `spec` with these `options` in place of its own, as far as its residual has them."""
    name, _, text = spec.partition(":")
    chosen = {key: value for key, value in options.items() if key in entry(name).options}
    words = [word for word in text.split(",") if word and word.partition("=")[0] not in chosen]
    words += [f"{key}={value}" for key, value in chosen.items()]
    return ":".join(filter(None, (name, ",".join(words))))


def pinned(residual: Residual) -> str:
    """Returns the spec of a `residual` with every derived option written out: a saved model must not change where such
    a default does. It also says which module registered a residual that is not headwater's own."""
    name, options = parse(residual.spec)
    free = [
        key for key in residual.derived if key in entry(name).options and options.get(key) is None
    ]
    return located(with_options(residual.spec, **{key: getattr(residual, key) for key in free}))


def located(spec: str) -> str:
    """Returns the `spec` with the module that registered its residual, name@module:options, unless that is
    headwater's own."""
    name, colon, text = spec.partition(":")
    module = plugin_of(spec)
    return spec if module is None else f"{name.partition('@')[0]}@{module}{colon}{text}"


def plugin_of(spec: str) -> str | None:
    """Returns the module that registered the residual of a `spec`; None for those of headwater."""
    module = entry(spec.partition(":")[0]).build.__module__
    return None if is_own(module) else module


def how_to_test(spec: str) -> str | None:
    """Returns what to run to test the residual of a `spec` by itself; None for those of headwater, which are tested."""
    module = plugin_of(spec)
    flags = flags_for([module])
    return (
        None
        if module is None
        else f"To test the residual by itself: headwater residuals --check {spec}{flags}"
    )


@contextmanager
def suspected(spec: str) -> Iterator[None]:
    """A traceback out of here ends with how to test the residual of a `spec`, if that is a user's own."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, UserError) and (advice := how_to_test(spec)):
            error.add_note(advice)
        raise


def _convert(label: str, text: str, kind: Any) -> Any:
    choices = _choices(kind)
    for choice in choices:
        with suppress(KeyError, ValueError):
            return _convert_one(text, choice)
    raise ValueError(f"{label} must be {' or '.join(_describe(c) for c in choices)}, got '{text}'")


def _convert_one(text: str, kind: Any) -> Any:
    """Raises KeyError or ValueError for a text of another kind."""
    if get_origin(kind) is Literal:
        return {word: word for word in get_args(kind)}[text]
    if kind is bool:
        return {"true": True, "false": False}[text.lower()]
    if kind is NoneType:
        return {"none": None}[text.lower()]
    return kind(text)


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _spell(value: Any) -> str:
    """Write a value as a spec has it."""
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    return {bool: "true or false", int: "a whole number", float: "a number", NoneType: "none"}.get(
        kind, "text"
    )
