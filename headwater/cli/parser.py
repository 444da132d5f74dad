"""A command line from dataclasses: every field of a `Section` is a flag.

A field marked POSITIONAL is an argument without a flag, and a field that holds another section is a
group of flags. argv is read once, and only what was typed is kept, so that `--config` can stand
below the flags.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin

from headwater.errors import UserError
from headwater.folders import at_home
from headwater.models.config import SIZES
from headwater.runs.settings import SECTIONS
from headwater.runs.tables import Table, plain
from headwater.schema import described, options_of, setting_of, types_of

T = TypeVar("T")
Commanded = Callable[[list[str]], None]


# An argument without a flag.
POSITIONAL = {"positional": True}
# The flags of a run. The field is what was typed: a mapping of sections, as a file has it.
SETTINGS = {"sections": SECTIONS}


def parse(flags: type[T], argv: Sequence[str], command: Commanded, name: str | None = None) -> T:
    """Read the words after a command.

    Arguments:
        flags: the dataclass to fill.
        argv: the words.
        command: the function of the command; its text is shown by --help.
        name: the name of the command, where it is not the name of the function.

    Returns the dataclass, filled. Plugins that it names are imported.
    Raises: `UserError` for a flag that there is not, and a value that a flag cannot have.
    """
    parser = parser_for(flags, command, name)
    spelled = [with_dashes(word) for word in argv]
    typed, unknown = parser.parse_known_intermixed_args(spelled)
    if unknown:
        parser.error(f"unknown flag {unknown[0]}{near(unknown[0], parser)}")
    filled: T = instance(flags, vars(typed))

    # Plug-ins register their residuals when they are imported.
    if plugins := getattr(filled, "plugin", ()):
        from headwater.residuals import import_plugins

        import_plugins(plugins)
    return filled


def with_dashes(word: str) -> str:
    """Spell `--batch_size=8` as `--batch-size=8`."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def near(word: str, parser: argparse.ArgumentParser) -> str:
    """Suggest the flag whose name, or whose help's first words, is nearest to a word."""
    word, text = word.partition("=")[0], parser.format_help()
    # --learning-rate means --lr, whose help begins with "Largest learning rate".
    described: dict[str, str] = {}
    for flag, *words in re.findall(r"^  (--[a-z][a-z0-9-]*) \S+\s+(\w+) (\w+) (\w+)", text, re.M):
        for pair in pairwise(words):
            described.setdefault(f"--{'-'.join(pair)}".lower(), flag)
    meant = [described[name] for name in difflib.get_close_matches(word, described, 1, 0.85)]
    # Every flag that the help names, aliases included.
    close = meant or difflib.get_close_matches(word, re.findall(r"--[a-z][a-z0-9-]*", text), 1)
    return f", did you mean {close[0]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the list of all flags."""

    def error(self, message: str) -> NoReturn:
        refusal = UserError(f"{message}\n{self.prog} --help lists what it takes")
        refusal.exit_code = 2  # the shell's convention for a wrong command line
        raise refusal


def parser_for(flags: type, command: Commanded, name: str | None = None) -> Parser:
    """Make the parser of a command from its dataclass."""
    positional = [field.name.upper() for field in fields(flags) if field.metadata.get("positional")]
    # A value that was not typed is no attribute of the result. Descriptions keep their lines, as the
    # table of sizes needs.
    parser = Parser(
        prog=f"headwater {name or command.__name__}",
        usage=" ".join(["%(prog)s", *positional, "[FLAGS]"]),
        description=command.__doc__,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=28),
    )
    kinds, texts = types_of(flags), texts_of(flags)
    for declared in fields(flags):
        name, kind = declared.name, kinds[declared.name]
        if "sections" in declared.metadata:
            for section, content in declared.metadata["sections"].items():
                add_group(parser, f"{name}.{section}.", section, content())
        elif is_dataclass(kind):
            add_group(parser, f"{name}.", name, default_of(declared))
        else:
            add(parser, "", declared, kind, texts[name], declared.default)
    return parser


def default_of(declared: Field[Any]) -> Any:
    return cast(Callable[[], Any], declared.default_factory)()


def add_group(parser: Parser, prefix: str, title: str, section: Any) -> None:
    """Add a group of flags: the fields of a section, whose values are the defaults."""
    # The group of the model begins with the table of named sizes.
    description = summary(section)
    if title == "model":
        description += f"\n\n{plain(sizes())}"
    group = parser.add_argument_group(title, description)
    owner: Any = type(section)
    kinds, texts = types_of(owner), texts_of(owner)
    if title == "model":
        text = "Named size of the model, whose values the other flags override. (default: tiny)"
        group.add_argument("--size", dest=f"{prefix}size", metavar="NAME", help=text)
    for declared in fields(section):
        name = declared.name
        add(group, prefix, declared, kinds[name], texts[name], getattr(section, name))


def sizes() -> Table:
    """List the named sizes of models."""
    columns = ("layers", "dim", "heads", "kv_heads", "mlp_dim", "context", "experts")
    rows = []
    for name, values in SIZES.items():
        rows.append([name, *(str(values.get(column, "")) for column in columns)])
    return Table(["size", *columns], rows)


def summary(section: Any) -> str:
    """The first paragraph of a section's docstring."""
    return inspect.cleandoc(section.__doc__ or "").partition("\n\n")[0]


def add(parser: Any, prefix: str, declared: Field[Any], kind: Any, text: str, default: Any) -> None:
    """Add the flag of one field; without a default it is required."""
    name, required = declared.name, default is MISSING
    if bounds := setting_of(declared).bounds():
        text = f"{text} {bounds.capitalize()}."
    if not declared.metadata.get("positional"):
        text += ending(default)
    options: dict[str, Any] = {"help": text.replace("%", "%%")}
    if kind is bool:
        options |= {"action": argparse.BooleanOptionalAction, "default": argparse.SUPPRESS}
        parser.add_argument(flag_of(name), dest=prefix + name, **options)
        return
    # A list has the type of its items.
    item = get_args(kind)[0] if get_origin(kind) is tuple else kind
    options |= {"type": reader(item), "metavar": metavar(item)}
    if declared.metadata.get("positional"):
        options["metavar"] = name.upper()
        if get_origin(kind) is tuple:
            options["nargs"] = count_of(kind, required)
        parser.add_argument(name, **options)
        return
    if name == "plugin":
        # One value per flag, because an argument without a flag may follow.
        options["action"] = "append"
    elif get_origin(kind) is tuple:
        # A list that is given twice is the longer list.
        options |= {"nargs": count_of(kind), "action": "extend"}
    names = [flag_of(name), *declared.metadata.get("aliases", ())]
    parser.add_argument(*names, dest=prefix + name, required=required, **options)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def count_of(kind: Any, required: bool = True) -> str | int:
    """Count the words that a tuple takes, in argparse's terms."""
    items = get_args(kind)
    if items[-1] is not ...:
        return len(items)
    return "+" if required else "*"


def ending(default: Any) -> str:
    """The end of a flag's help: its default."""
    if default is MISSING:
        return " (required)"
    if default is None or default == () or default == "":
        return ""
    if isinstance(default, bool):
        return " (default: on)" if default else " (default: off)"
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    # A line end in a prompt would break the help.
    text = repr(default) if "\n" in str(default) else str(default)
    return f" (default: {text})"


def reader(kind: Any) -> Callable[[str], Any]:
    """Make the function that reads the word after a flag."""

    # The first type that the word can be decides.
    def read(word: str) -> Any:
        for option in options_of(kind):
            for value in readings(word, option):
                return value
        must = " or ".join(described(option) for option in options_of(kind))
        raise argparse.ArgumentTypeError(f"must be {must}; got {word!r}")

    return read


def readings(word: str, option: Any) -> Iterator[Any]:
    """Yield the word as a value of this type, if it is one."""
    if get_origin(option) is Literal:
        if word in get_args(option):
            yield word
    elif option is type(None):
        if word.lower() == "none":
            yield None
    elif option is Path:
        yield at_home(word)
    else:
        try:
            yield option(word)
        except ValueError:
            return


def metavar(kind: Any) -> str:
    """Name what a flag takes, as --help shows it: INT, PATH, {adamw,muon}."""
    words = []
    for option in options_of(kind):
        if get_origin(option) is Literal:
            words.append("{" + ",".join(map(str, get_args(option))) + "}")
        elif option is not type(None):
            words.append(option.__name__.upper())
    return "|".join(words)


def instance(flags: type[T], typed: Mapping[str, Any]) -> T:
    """Fill a dataclass with what was typed, by dotted name; inner sections too."""
    values: dict[str, Any] = {}
    for declared in fields(flags):  # type: ignore[arg-type]
        name = declared.name
        # Typed names are dotted: settings.optim.lr, sampling.top_k, out.
        inner = within(typed, name)
        if "sections" in declared.metadata:
            values[name] = {part: within(inner, part) for part in declared.metadata["sections"]}
        elif inner:
            values[name] = replace(default_of(declared), **inner)
        elif name in typed:
            values[name] = typed[name]
    return flags(**values)


def within(typed: Mapping[str, Any], part: str) -> dict[str, Any]:
    """The values whose dotted name begins with this part, without it."""
    start = f"{part}."
    return {name[len(start) :]: value for name, value in typed.items() if name.startswith(start)}


def texts_of(section: Any) -> dict[str, str]:
    """The texts below the fields of a dataclass and of the classes above it, from their source."""
    texts = {declared.name: "" for declared in fields(section)}
    owners: list[Any] = [owner for owner in reversed(section.__mro__) if is_dataclass(owner)]
    for owner in owners:
        # A text is the string that follows its field.
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        statements = body.body  # type: ignore[attr-defined]
        for statement, after in pairwise(statements):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
                name, text = ast.unparse(statement.target), ast.literal_eval(after.value)
                texts[name] = " ".join(text.split())
    return texts
