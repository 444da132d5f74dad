"""The depth-mixing maps of runs side by side on one page, with the measures of each: a view of the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.analyze import measures
from headwater.analyze.markup import paragraphs, text
from headwater.analyze.provenance import command_lines, commands
from headwater.analyze.report import fill_template, payload, write_page
from headwater.analyze.results import NO_CELL, first_colour, name_cell
from headwater.folders import at_home
from headwater.residuals import build
from headwater.runs.groups import Group, group_runs
from headwater.runs.record import RecordedRun, beside, find_order, paths_of, read_runs
from headwater.runs.tables import Cell, Table, html

COLUMNS = (
    "Residual",
    "Mixes",
    "Row sum",
    "Entropy",
    "Effective sources",
    "Effective depth",
    "Rank across depth",
)
MEASURES = (
    measures.row_sums,
    measures.entropy,
    measures.effective_sources,
    measures.effective_depth,
)
FINDING = (
    "Every residual here is linear in its sources once its weights are fixed: what a sublayer reads is a row of "
    "weights over the embedding and all earlier outputs. These are the rows, averaged over tokens and seeds."
)
CAPTION = (
    "Measures of the averaged map: means over reads; entropy in nats; effective depth is the mean distance in "
    "sublayers to what is read; rank across depth is the largest rank of the map below a cut, at most n for n streams. "
    "Mixes: one weight for all channels, one per channel (the map shows their mean), or a matrix (the map shows how "
    "much of a source is left in its share)."
)


def write_matrix(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    models: Sequence[RecordedRun] = (),
) -> Path:
    """Write the depth-mixing maps of runs and comparisons, with their measures, as one HTML file.

    `folders`: run folders and comparison folders. `out`: the file to write, by default matrix.html in the first folder.
    `models`: more of the page, as `headwater.analyze.prompted.prompted_run` makes them of a model that reads a prompt.
    Returns the file's path. Raises UserError where a folder is no run, or `out` is another's file.

        write_matrix(["runs/compare"])  # runs/compare/matrix.html
    """
    paths = paths_of(folders)
    groups = group_runs([*read_runs(paths, models), *models], find_order(paths))
    data = payload(groups, points=1, frames=1, digits=4)
    page = fill_template(
        groups,
        data,
        view="matrix",
        results="Measures",
        title="Depth-mixing matrices",
        heading="Who reads whom",
        findings=paragraphs("finding", [FINDING]),
        rows="",
        table=html(measure_table(groups, data)),
        caption=text(CAPTION),
        commands=command_lines(commands(paths)),
    )
    return write_page(beside(paths, "matrix.html") if out is None else at_home(out), page)


def measure_table(groups: list[Group], data: dict[str, Any]) -> Table:
    """The measures of each group's last map; a group without depth records has a row without numbers."""
    rows = []
    for colour, (group, drawn) in enumerate(zip(groups, data["groups"]), first_colour(groups)):
        triangle = drawn["depth"] and drawn["depth"]["frames"][-1]["mixing"]
        cells = [NO_CELL] * len(COLUMNS[1:])
        if triangle:
            cells = measured(group, square(triangle))
        rows.append([name_cell(group, colour), *cells])
    return Table(COLUMNS, rows)


def measured(group: Group, matrix: Tensor) -> list[Cell]:
    """What the residual's weights are, and five numbers of its map."""
    model = group.runs[0].config["model"]
    residual, width = model.get("residual", group.residual), int(model["dim"])
    cells = [Cell(build(residual, width, len(matrix) - 1).mixes)]
    for measure in MEASURES:
        value = measure(matrix).mean().item()
        cells.append(Cell(f"{value:.2f}", order=value))
    rank = int(measures.semiseparable_rank(matrix, tolerance=1e-2))
    return [*cells, Cell(str(rank), order=rank)]


def square(triangle: list[float | None]) -> Tensor:
    """The lower triangle that a record keeps row after row, as a matrix."""
    size = int((2 * len(triangle)) ** 0.5)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    rows, columns = torch.tril_indices(size, size)
    matrix[rows, columns] = torch.tensor(
        [0.0 if value is None else value for value in triangle], dtype=torch.float64
    )
    return matrix
