"""Tables for terminals of any width."""

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def fitting(table: Table, console: Console) -> Table:
    """`table`, or where its columns would be cut, the same values below each other: a row's name, then a line each.

    Columns that must not be folded are made with no_wrap=True; the first names the row.

        console.print(fitting(table, console))
    """
    if (
        Measurement.get(console, console.options.update(width=10_000), table).minimum
        <= console.width
    ):
        return table
    names, *others = table.columns
    stacked = Table(
        title=table.title, caption=table.caption, box=box.SIMPLE, show_header=False, pad_edge=False
    )
    stacked.caption_justify = table.caption_justify
    stacked.add_column(overflow="fold")
    stacked.add_column(overflow="fold", justify="right")
    for i, name in enumerate(names.cells):
        stacked.add_row(name, style="bold")
        for column in others:
            stacked.add_row(column.header, list(column.cells)[i])
        stacked.add_section()
    return stacked
