"""Names and options: `attnres-block:block=4,heads=8` becomes a Residual. The package's one
registry."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, get_type_hints

from headwater.errors import UserError, as_flag, command

from .base import Residual
from .layerwise import ALL_KINDS, sublayer_kinds
from .options import convert, describe, meaning, spell
from .plugins import absence, load_entry_points, top_of

NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
R = TypeVar("R", bound=type[Residual])


@dataclass(frozen=True)
class Entry:
    """A registered name: its class, the options that it fixes, and the types of all others."""

    name: str
    build: type[Residual]
    fixed: Mapping[str, Any]
    options: Mapping[str, Any]
    takes_kinds: bool
    formula: str


_entries: dict[str, Entry] = {}


def register(name: str, *, formula: str | None = None, **fixed: Any) -> Callable[[R], R]:
    """Make a Residual known as `name`, to `build`, `headwater train --residual` and everything else
    that takes a name.

    Arguments:
        name: small letters, digits, dots and dashes.
        formula: what tables show, by default the first line of the class's docstring.
        fixed: options that the name sets.

    The class's other arguments behind `dim` and `sublayers` become options, and need annotations:
    text is converted to what they say (int, float, bool, str, Literal, or one of them | None).
    `kinds`, if it is among them, is given the kind of each sublayer.

    Returns a decorator that gives the class back.
    Raises ValueError for a name that cannot be one or that another class has, and for an option
        without a type.

        @register("leaky")
        class LeakyResidual(StreamResidual): ...
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"a residual's name is made of small letters, digits, dots and dashes; got {name!r}"
        )

    def add(cls: R) -> R:
        # A class of the same place is a module that was loaded again.
        namesake = _entries.get(name)
        if namesake is not None and _place(namesake.build) != _place(cls):
            raise ValueError(
                f"residual '{name}' is registered already, by {_place(namesake.build)}: choose "
                "another name"
            )
        types = get_type_hints(cls.__init__)
        arguments = list(inspect.signature(cls).parameters)[2:]
        options = {}
        for option in arguments:
            if option in fixed or option == "kinds":
                continue
            if option not in types:
                raise ValueError(
                    f"option '{option}' of residual '{name}' needs a type, for example "
                    f"{option}: float"
                )
            options[option] = types[option]
        text = formula or (cls.__doc__ or "").strip().partition("\n")[0]
        _entries[name] = Entry(name, cls, fixed, options, "kinds" in arguments, text)
        return cls

    return add


def _place(cls: type[Residual]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def names() -> tuple[str, ...]:
    """Return every registered name, also of installed packages; the plain residual comes first."""
    load_entry_points()
    return tuple(sorted(_entries, key=lambda name: (name != "standard", name)))


def entry(name: str) -> Entry:
    """Look up what is registered as `name`, or as the name of a saved name@module.

    Returns an `Entry`: class, fixed options, options left to the user.
    Raises ValueError if nothing is; the message names the nearest, or what to import.
    """
    # Installed packages are asked only for names that nobody has registered.
    name, _, module = name.partition("@")
    if name not in _entries:
        load_entry_points()
    if name not in _entries and module:
        raise ValueError(absence(name, module))
    if name not in _entries:
        raise ValueError(
            f"unknown residual '{name}'.{_near(name, _entries)} Valid names: "
            f"{', '.join(sorted(_entries))}. If it is yours, import the module that registers it, "
            f"in a command by {as_flag('plugin', ['MODULE'])}"
        )
    # Another class of the same name would be another model.
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
    """An option of a residual as a user writes it, `name=default`: in words what it takes, and what
    it means."""

    name: str
    default: str
    takes: str
    meaning: str


def options_of(name: str) -> tuple[type[Residual], list[Option]]:
    """List the options that a registered `name` leaves to the user.

    Returns the class, and an `Option` for each: its name, its default as a user writes it, in words
    what it takes, and what the class's docstring says of it.
    Raises ValueError for a name that is not registered.

        for option in options_of("attnres-block")[1]:
            print(f"{option.name}={option.default}: {option.meaning}")
    """
    registered = entry(name)
    arguments = inspect.signature(registered.build).parameters
    docstring = registered.build.__doc__ or ""
    options = []
    for key, kind in registered.options.items():
        default = spell(arguments[key].default)
        options.append(Option(key, default, describe(kind), meaning(key, docstring)))
    return registered.build, options


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a `spec`, "name:key=value,key=value".

    Returns (name, options), each value converted to the option's type.
    Raises ValueError for an unknown name or option, and for a value of another type; the message
        lists what is valid.

        # ("attnres-block", {"block": 4, "key_norm": False})
        parse("attnres-block:block=4,key_norm=false")
    """
    if not isinstance(spec, str):
        description = spec.__name__ if isinstance(spec, type) else f"a {type(spec).__name__}"
        raise ValueError(
            f"a residual is given by its name, such as 'attnres-block:block=4'; got {description}"
        )
    name, _, text = spec.partition(":")
    types = entry(name).options
    name = name.partition("@")[0]
    options: dict[str, Any] = {}
    # Each item is an option with its value.
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in types:
            raise ValueError(
                f"residual '{name}' has no option '{key}'.{_near(key, types)} Valid options: "
                f"{', '.join(types) or 'none'}"
            )
        options[key] = convert(f"{name}:{key}", value, types[key])
    return name, options


def build(spec: str, dim: int, sublayers: int, kinds: Sequence[str] | None = None) -> Residual:
    """Build the residual of a network.

    Arguments:
        spec: a registered name, with options if you like: "attnres-block:block=4,heads=8".
        dim: D, channels of the residual stream.
        sublayers: attentions and MLPs counted one by one: twice the layers of a usual decoder.
        kinds: of each sublayer, "attention", "mlp" ..., which some residuals tell apart; by default
            they alternate.

    Returns a `Residual`, a module: `begin`, then `read` and `write` for each sublayer, then `end`.
    Raises ValueError for an unknown name, option or kind, and for sizes that do not fit it; the
        message lists what is valid.

        residual = build("attnres-full", dim=512, sublayers=24)
        state = residual.begin(torch.randn(2, 16, 512))
    """
    name, options = parse(spec)
    registered = entry(name)
    # Some residuals tell layers apart by the kinds of their sublayers.
    if registered.takes_kinds:
        options["kinds"] = kinds
    residual = registered.build(dim, sublayers, **registered.fixed, **options)
    residual.spec = spec
    if kinds is not None:
        residual.kinds = sublayer_kinds(sublayers, kinds, ALL_KINDS)
    return residual


def with_options(spec: str, **options: Any) -> str:
    """Return the `spec` with these `options` in place of its own, as far as its residual has
    them."""
    name, _, text = spec.partition(":")
    items: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        option, _, word = item.partition("=")
        items[option] = word
    for key, value in options.items():
        if key in entry(name).options:
            # Options that change go last.
            items.pop(key, None)
            items[key] = value
    words = ",".join(f"{key}={value}" for key, value in items.items())
    return f"{name}:{words}" if words else name


def pinned(residual: Residual) -> str:
    """Return the spec of a `residual` with every derived option written out.

    A saved model must not change where the default of such an option does. The spec also says which
    module registered a residual that is not headwater's own.
    """
    # Options that the user gave stay as they are.
    name, options = parse(residual.spec)
    derived = {}
    for key in residual.derived:
        if key in entry(name).options and options.get(key) is None:
            derived[key] = getattr(residual, key)
    return located(with_options(residual.spec, **derived))


def located(spec: str) -> str:
    """Return the `spec` with the module that registered its residual, name@module:options, unless
    that is headwater's own."""
    name, colon, text = spec.partition(":")
    module = plugin_of(spec)
    return spec if module is None else f"{name.partition('@')[0]}@{module}{colon}{text}"


def plugin_of(spec: str) -> str | None:
    """Return the module that registered the residual of a `spec`; None for those of headwater."""
    module = entry(spec.partition(":")[0]).build.__module__
    return None if top_of(module) == "headwater" else module


def how_to_test(spec: str) -> str | None:
    """Return what to run to test the residual of a `spec` by itself.

    None for those of headwater, which are tested.
    """
    module = plugin_of(spec)
    if module is None:
        return None
    # A script has no name to import.
    modules = [] if module == "__main__" else [module]
    line = command("residuals", spec, check=True, plugin=modules)
    return f"To test the residual by itself: {line}"


@contextmanager
def suspected(spec: str) -> Iterator[None]:
    """A traceback out of here ends with how to test the residual of a `spec`, if it is a user's."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, UserError) and (advice := how_to_test(spec)):
            error.add_note(advice)
        raise
