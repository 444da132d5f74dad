"""The page about the command line, made from the parsers that read it."""

import argparse
import re
import sys
from typing import Any
from unittest.mock import patch

from headwater import cli
from headwater.cli.parser import Parser, parser_for

INTRODUCTION = """\
# Command line

`headwater COMMAND --help` prints the same on a terminal. Flags of lists take several words: `--seeds 0 1 2`.
A flag beats the file given with `--config`, and the file beats the default.
[Training](../guides/training.md#sizes-and-parts) has the sizes of `--size`.
"""


class Asked(Exception):
    pass


def page() -> str:
    parts, shown = [INTRODUCTION], dict[str, str]()
    for name, command in cli.COMMANDS.items():
        parser = parser_of(command)
        about = (command.__doc__ or "").strip()
        parts.append(f"## {name}\n\n{about}\n\n{tables(name, parser, shown)}")
    return "\n".join(parts)


def parser_of(command: Any) -> Parser:
    """Make the parser that a command makes when it is called."""

    def ask(flags: Any, argv: list[str], command: Any, name: str | None = None) -> None:
        raise Asked(parser_for(flags, command, name))

    with patch.object(sys.modules[command.__module__], "parse", ask):
        try:
            command([])
        except Asked as asked:
            return asked.args[0]
    raise AssertionError(f"{command} reads no flags")


def tables(name: str, parser: Parser, shown: dict[str, str]) -> str:
    """Write a table for each group of flags. `shown`: the command that has a named group already."""
    sections, repeated = [], list[str]()
    for group in parser._action_groups:
        rows = [row(action) for action in group._group_actions if action.dest != "help"]
        title = str(group.title).capitalize()
        named = title not in ("Options", "Positional arguments")
        table = wrapped("| flag | takes | default | |\n|---|---|---|---|\n" + "\n".join(rows))
        if named and shown.setdefault(table, name) != name:
            repeated.append(f"**{title}** as of [{shown[table]}](#{shown[table]})")
        elif rows:
            sections.append(f"**{title}**\n\n{table}" if named else table)
    if repeated:
        sections.append(f"The flags of {', '.join(repeated)}.\n")
    usage = parser.format_usage().removeprefix("usage: ").strip()
    return f"`{usage}`\n\n" + "\n".join(sections or ["It takes no flags.\n"])


def wrapped(table: str) -> str:
    """Mark a table for docs/assets/site.css, which makes a paragraph of each row on a phone."""
    return f'<div class="flags" markdown>\n\n{table}\n\n</div>\n'


def row(action: argparse.Action) -> str:
    """Write the row of a flag; its default stands at the end of its help."""
    text = str(action.help or "").replace("%%", "%")
    default = re.search(r"\s*\((?:default: (.*)|required)\)$", text, re.DOTALL)
    about = text[: default.start()] if default else text
    value = (default[1] if default else "") or ""
    flag = ", ".join(f"`{word}`" for word in action.option_strings) or f"`{action.metavar}`"
    takes = f"`{action.metavar}`" if action.option_strings and action.metavar else ""
    cells = (flag, takes, f"`{value}`" if value else "", about)
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
