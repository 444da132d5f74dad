"""The page about the command line, made from the parsers that read it."""

import argparse
import re
import sys
import warnings
from typing import Any
from unittest.mock import patch

import tyro

from headwater import cli

SHAPE = (tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff)
INTRODUCTION = """\
# Command line

`headwater COMMAND --help` prints the same on a terminal. Flags of lists take several words: `--seeds 0 1 2`.
A flag beats the file given with `--config`, and the file beats the default.
"""


class Asked(Exception):
    pass


def page() -> str:
    parts, shown = [INTRODUCTION], dict[str, str]()
    for name, command in cli.COMMANDS.items():
        parser = parser_of(command)
        parts.append(
            f"## {name}\n\n{(command.__doc__ or '').strip()}\n\n{tables(name, parser, shown)}"
        )
    return "\n".join(parts)


def parser_of(command: Any) -> argparse.ArgumentParser:
    """The parser that a command would use, which it makes when it is called."""

    def ask(
        flags: Any, argv: list[str], command: Any, default: Any = None, name: str | None = None
    ) -> None:
        raise Asked(flags, default)

    with patch.object(sys.modules[command.__module__], "parse", ask):
        try:
            command([])
        except Asked as asked:
            flags, default = asked.args
    extra = {} if default is None else {"default": default}
    with warnings.catch_warnings():
        # Tyro has no other way to a parser as data
        warnings.simplefilter("ignore", DeprecationWarning)
        return tyro.extras.get_parser(flags, config=SHAPE, **extra)


def tables(name: str, parser: argparse.ArgumentParser, shown: dict[str, str]) -> str:
    """A table for each group of flags; one group is not named. `shown`: the command that has a named one already."""
    found, again = [], list[str]()
    positional = [action.metavar for action in parser._actions if not action.option_strings]
    usage = " ".join(["headwater", name, *(str(word) for word in positional), "[FLAGS]"])
    for group in parser._action_groups:
        rows = [row(action) for action in group._group_actions if action.dest != "help"]
        title = str(group.title).removesuffix(" options").capitalize()
        named = title not in ("Options", "Positional arguments")
        table = wrapped("| flag | takes | default | |\n|---|---|---|---|\n" + "\n".join(rows))
        if named and shown.setdefault(table, name) != name:
            again.append(f"**{title}** as of [{shown[table]}](#{shown[table]})")
        elif rows:
            found.append(f"**{title}**\n\n{table}" if named else table)
    if again:
        found.append(f"The flags of {', '.join(again)}.\n")
    return f"`{usage}`\n\n" + "\n".join(found or ["It takes no flags.\n"])


def wrapped(table: str) -> str:
    """For docs/assets/site.css, which makes a paragraph of each row on a phone."""
    return f'<div class="flags" markdown>\n\n{table}\n\n</div>\n'


def row(action: argparse.Action) -> str:
    text = str(action.help or "")
    default = re.search(r"\s*\((?:default: (.*)|required|repeatable)\)$", text, re.DOTALL)
    said = text[: default.start()] if default else text
    value = (default[1] if default and default[1] else "").strip()
    flag = ", ".join(f"`{word}`" for word in action.option_strings) or f"`{action.metavar}`"
    takes = "" if not action.option_strings or action.metavar is None else f"`{metavar(action)}`"
    cells = (flag, takes, f"`{value}`" if value and value != "None" else "", said)
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def metavar(action: argparse.Action) -> str:
    return str(action.metavar).replace("{None}|", "")
