"""The house's docstrings as Markdown: `Arguments:` becomes a list, and what is indented after a blank line is code."""

import re
from typing import Any

import griffe

HEAD = re.compile(r"^(Arguments|Raises|Returns)\b([^:\n]*):$")
ITEM = re.compile(r"^([\w, ]+): ")


class HouseStyle(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Paragraphs as they are, lists of arguments as lists, examples as code."""
    blocks = re.split(r"\n\s*\n", text.strip("\n"))
    return "\n\n".join(_code(block) if _indented(block) else _paragraph(block) for block in blocks)


def _indented(block: str) -> bool:
    return all(line.startswith("    ") for line in block.splitlines())


def _code(block: str) -> str:
    lines = [line[4:] for line in block.splitlines()]
    return "```py\n" + "\n".join(lines) + "\n```"


def _paragraph(block: str) -> str:
    lines: list[str] = []
    inside = False  # a list under its head
    for line in block.splitlines():
        head, item = HEAD.match(line), ITEM.match(line.strip())
        if head:
            inside, line = True, f"\n**{head[1]}**{head[2]}\n"
        elif inside and line.startswith("    ") and item and not line.startswith("     "):
            line = f"- `{item[1]}`: {line.strip()[item.end() :]}"
        elif inside and line.startswith("    "):
            line = f"  {line.strip()}" if lines[-1].startswith(("- ", "  ")) else line.strip()
        else:
            begins = re.match(
                r"(Arguments|Returns|Raises|Arguments of the constructor)\b(:?)", line
            )
            inside = False
            line = f"\n**{begins[1]}**{begins[2]}{line[begins.end() :]}" if begins else line
        lines.append(line)
    return "\n".join(lines).strip("\n")
