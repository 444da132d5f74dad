"""The table of a report under the depth-mixing maps: a few numbers of each map."""

from typing import Any

import torch
from torch import Tensor

from headwater.analyze import measures
from headwater.analyze.curves import draw_depth
from headwater.analyze.results import NO_CELL, first_colour, name_cell
from headwater.residuals import build
from headwater.runs.groups import Group
from headwater.runs.tables import Cell, Table

MEASURES = {
    "Row sum": measures.row_sums,
    "Entropy": measures.entropy,
    "Effective sources": measures.effective_sources,
    "Effective depth": measures.effective_depth,
}
COLUMNS = ("Residual", "Mixes", *MEASURES, "Rank across depth")
RANK_TOLERANCE = 1e-2  # of the largest singular value: a page keeps few digits of a map


def mixing_table(groups: list[Group]) -> Table | None:
    """The measures of each group's last map. None if no group has a map."""
    rows = []
    any_map = False
    for colour, group in enumerate(groups, first_colour(groups)):
        depth = draw_depth(group, frames=1, digits=4)
        triangle = depth and depth["frames"][-1]["mixing"]
        cells = [NO_CELL] * len(COLUMNS[1:])
        if triangle:
            any_map = True
            cells = _measured(group.runs[0].config["model"], square(triangle))
        rows.append([name_cell(group, colour), *cells])
    return Table(COLUMNS, rows) if any_map else None


def _measured(model: dict[str, Any], matrix: Tensor) -> list[Cell]:
    """The kind of the residual's weights, and five numbers of its map."""
    cells = [_kind(model, len(matrix) - 1)]
    for measure in MEASURES.values():
        value = measure(matrix).mean().item()
        cells.append(Cell(f"{value:.2f}", order=value))
    rank = int(measures.semiseparable_rank(matrix, RANK_TOLERANCE))
    return [*cells, Cell(str(rank), order=rank)]


def _kind(model: dict[str, Any], sublayers: int) -> Cell:
    """The residual's `mixes`; a dash where the module of the residual is not imported."""
    try:
        with torch.device("meta"):
            residual = build(str(model["residual"]), int(model["dim"]), sublayers)
    except ValueError:
        return NO_CELL
    return Cell(residual.mixes)


def square(triangle: list[float | None]) -> Tensor:
    """Turn the lower triangle that a record keeps row after row into a matrix."""
    size = int((2 * len(triangle)) ** 0.5)
    values = [0.0 if value is None else value for value in triangle]
    matrix = torch.zeros(size, size, dtype=torch.float64)
    rows, columns = torch.tril_indices(size, size)
    matrix[rows, columns] = torch.tensor(values, dtype=torch.float64)
    return matrix
