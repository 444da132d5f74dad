"""One table, four renderers: a terminal of any width, HTML, Markdown, and plain aligned text.

    table = Table(["residual", "bits/byte"], [["standard", "1.2345"], ["mhc", "1.2301"]])
    print_table(table, Console())

The first column names the row. A cell is text, or a `Cell` where a page shows more than the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

# Control characters without tab and line end, and Unicode's marks of direction.
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Cell:
    """A cell of a page: `text`, and what only HTML shows of it."""

    text: str
    detail: str = ""
    """A smaller line below the text."""
    order: float | None = None
    """The number that its column is sorted by, if that is not the text."""
    kind: str = ""
    """A class of the style sheet."""
    html: str = ""
    """Markup in place of the text, such as a drawing; whoever writes it has escaped its values."""
    sortable: bool = True
    """In the head: whether a click sorts by this column."""


@dataclass(frozen=True)
class Table:
    columns: Sequence[str | Cell]
    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    caption: str = ""


def print_table(table: Table, console: Console) -> None:
    """Print to a terminal; where columns would be cut, each row's values stand below each other
    instead."""
    from rich.measure import Measurement

    # Measured as if there were room for everything.
    drawing = _side_by_side(table)
    wide = console.options.update(width=10_000)
    if Measurement.get(console, wide, drawing).minimum > console.width:
        drawing = _stacked(table)
    console.print(drawing)


def _side_by_side(table: Table) -> RichTable:
    """One line a row. Only the row's name may be folded; gaps are narrow, so that more fits into 80
    columns."""
    drawing = _rich(table, show_edge=False, padding=(0, 1, 0, 0))
    name, *numbers = texts(table.columns)
    drawing.add_column(name, overflow="fold", min_width=13)
    for column in numbers:
        drawing.add_column(column, justify="right", no_wrap=True)
    for row in table.rows:
        drawing.add_row(*_rich_texts(row))
    return drawing


def _stacked(table: Table) -> RichTable:
    """A row's name, then a line for each of its values."""
    drawing = _rich(table, show_header=False)
    drawing.add_column(overflow="fold")
    drawing.add_column(overflow="fold", justify="right")
    headers = texts(table.columns)[1:]
    for row in table.rows:
        name, *values = _rich_texts(row)
        drawing.add_row(name, style="bold")
        for header, value in zip(headers, values, strict=True):
            drawing.add_row(header, value)
        drawing.add_section()
    return drawing


def _rich(table: Table, **options: object) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable

    lines = box.SIMPLE if options.get("show_header") is False else box.SIMPLE_HEAD
    title, caption = table.title or None, table.caption or None
    drawing = RichTable(title=title, caption=caption, box=lines, pad_edge=False, **options)  # type: ignore[arg-type]
    drawing.caption_justify = "left"
    return drawing


def _rich_texts(row: Sequence[str | Cell]) -> list[str]:
    """Brackets in names are text, not rich's markup."""
    from rich.markup import escape as escape_markup

    return [escape_markup(printable(text)) for text in texts(row)]


def printable(text: str) -> str:
    """Spell characters out that a terminal obeys: escape codes, and marks that turn text around.

    A name of a run, an option or a generated text could else move the cursor or rename the window.
    Line ends and tabs stay.
    """
    return OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def html(table: Table, attributes: str = 'id="table"') -> str:
    """A <table>. Every text is escaped; `Cell.html` stands as it is."""
    head = "".join(f'<th scope="col"{_marks(cell)}>{_inside(cell)}</th>' for cell in table.columns)
    lines = []
    for first, *others in table.rows:
        cells = "".join(f"<td{_marks(cell)}>{_inside(cell)}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{_inside(first)}</th>{cells}</tr>')
    # The page's script finds head and body by their elements.
    body = "".join(lines)
    return f"<table {attributes}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _marks(cell: str | Cell) -> str:
    """Attributes of a cell: its class, and what the page's script sorts by."""
    if isinstance(cell, str):
        return ""
    style = f' class="{cell.kind}"' if cell.kind else ""
    order = f' data-value="{cell.order!r}"' if cell.order is not None else ""
    fixed = "" if cell.sortable else " data-fixed"
    return style + order + fixed


def _inside(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return escape(cell)
    detail = f"<small>{escape(cell.detail)}</small>" if cell.detail else ""
    return (cell.html or escape(cell.text)) + detail


def markdown(table: Table) -> str:
    """A table of Markdown; a bar inside a cell is escaped, as it would end the cell even in
    code."""
    lines = [texts(table.columns), ["---"] * len(table.columns)]
    for row in table.rows:
        lines.append([text.replace("|", "\\|") for text in texts(row)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plain(table: Table) -> str:
    """Lines of aligned text, without a head where columns have no names."""
    # A table whose columns have no names has no head.
    lines = [texts(row) for row in table.rows]
    if any(texts(table.columns)):
        lines.insert(0, texts(table.columns))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = []
    # Without spaces at the ends of lines.
    for line in lines:
        padded = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
        aligned.append("  ".join(padded).rstrip())
    return "\n".join(aligned)


def texts(cells: Sequence[str | Cell]) -> list[str]:
    return [cell if isinstance(cell, str) else cell.text for cell in cells]
