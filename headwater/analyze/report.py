"""One self-contained HTML page about one or more runs, made from their folders alone.

Words and tables are written in Python, every value through `markup.text`, which escapes it; curves
and maps are drawn in the page by its script, from one JSON island. A content security policy allows
that script and that style alone, so nothing that a name contains can run or reach the network.
"""

import base64
import errno
import hashlib
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from headwater.analyze.curves import draw_curves, draw_depth
from headwater.analyze.markup import listing, paragraphs, text
from headwater.analyze.mixing_table import mixing_table
from headwater.analyze.provenance import (
    command_lines,
    commands,
    facts,
    results_data,
    runs_table,
    settings_table,
)
from headwater.analyze.results import first_colour, look, results_table
from headwater.analyze.words import caption, findings, has_results, headline, page_notes, trained
from headwater.errors import UserError, spell
from headwater.folders import at_home, replace_file
from headwater.runs.groups import BASELINE, Group, group_runs
from headwater.runs.record import RecordedRun, beside, find_order, paths_of, read_runs
from headwater.runs.tables import html

LIMIT = 1_900_000  # bytes; a page is promised to stay under 2 MB
# Less and less detail, until a page fits: points per curve, depth records per residual, significant
# digits.
DETAILS = ((400, 16, 3), (240, 6, 3), (120, 1, 3), (60, 1, 2))
DOCTYPE = b"<!doctype html>"
# In this order: each uses what stands above it.
SHARED = ("nodes", "numbers", "axes", "explore", "colour", "save")  # with the inspector
SCRIPTS = (*SHARED, "basics", "loss", "depth", "maps", "measures", "table", "download", "main")


def write_report(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    models: Sequence[RecordedRun] = (),
) -> Path:
    """Write the report of runs and comparisons as one HTML file that needs no network.

    `folders`: run folders and comparison folders, in any mixture. `out`: the file to write, by
    default report.html in the first folder. `models`: more of the page, as
    `headwater.analyze.prompted.prompted_run` makes them of models that read a prompt. Returns the
    file's path. Raises UserError where a folder is no run, or `out` is another's file.

        write_report(["runs/compare"])  # runs/compare/report.html
    """
    paths = paths_of(folders)
    runs = [*read_runs(paths, models), *models]
    page = make_page(runs, find_order(paths), commands(paths))
    return write_page(beside(paths, "report.html") if out is None else at_home(out), page)


def write_page(path: Path, page: str, *, begins: bytes = DOCTYPE, kind: str = "web page") -> Path:
    """Write a page whole or not at all, over an earlier page but nothing else; returns its path.

    A link is replaced, and the file that it leads to stays.
    """
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # Only a file that begins as our pages do is ours to replace.
    if path.is_file() and not path.is_symlink():
        with path.open("rb") as file:
            if file.read(len(begins)).lower() != begins:
                raise UserError(
                    f"{path} is no {kind}, and would be overwritten: choose another {spell('out')}"
                )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page.encode())
    return path


def make_page(
    runs: list[RecordedRun], order: Sequence[str] = (BASELINE,), again: Sequence[str] = ()
) -> str:
    """The page as text.

    `order`: residuals as the table lists them, the baseline first. `again`: commands that make its
    runs once more.
    """
    groups = group_runs(runs, order)
    words = words_of_page(groups, again)
    # The words stay as they are; curves and maps get coarser until the page is small enough.
    for points, frames, digits in DETAILS:
        page = fill_template(words, payload(groups, points, frames, digits))
        if len(page.encode()) <= LIMIT:
            break
    return page


def payload(groups: list[Group], points: int, frames: int, digits: int) -> dict[str, Any]:
    """Collect the numbers that the page's script draws."""
    # A group names its baseline by its place in the list.
    places = {id(group): i for i, group in enumerate(groups)}
    entries = []
    for colour, group in enumerate(groups, first_colour(groups)):
        kinds = ("eval", "train", "difference")
        entries.append(
            {
                "label": group.label,
                "look": look(colour),
                "baseline": group.baseline is group,
                "against": places.get(id(group.baseline)),
                "curves": {kind: draw_curves(group, kind, points) for kind in kinds},
                "depth": draw_depth(group, frames, digits),
                "results": results_data(group),
            }
        )
    return {"groups": entries, "points": points}


def words_of_page(groups: list[Group], again: Sequence[str]) -> dict[str, str]:
    """The parts of the page that are written here: sentences and tables, as HTML."""
    title = headline(groups)
    mixing = mixing_table(groups)
    return {
        "title": text(title),
        # A line of the heading ends between words, never inside one.
        "heading": " ".join(f"<span>{text(word)}</span>" for word in title.split()),
        "findings": paragraphs("finding", findings(groups)),
        "facts": facts(groups),
        "rows": "" if has_results(groups) else " hidden",
        "table": html(results_table(groups)),
        "caption": text(caption(groups)),
        "loss": "" if trained(groups) else " hidden",
        "mapped": " hidden" if mixing is None else "",
        "mixing": "" if mixing is None else html(mixing, 'id="mixing"'),
        "notes": listing("notes", page_notes(groups)),
        "runs": html(runs_table(groups), 'class="plain"'),
        "settings": settings_table(groups),
        "commands": command_lines(again),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def fill_template(words: dict[str, str], data: dict[str, Any]) -> str:
    """Put words and data into the frame of the page, with its style and script."""
    style, script, frame = page_files()
    parts = {"policy": policy(style, script), "style": style, "script": script}
    return Template(frame).substitute(parts, data=json_island(data), **words)


def page_files(
    styles: Sequence[str] = ("report",), scripts: Sequence[str] = SCRIPTS, frame: str = "report"
) -> tuple[str, str, str]:
    """Return style, script and frame of a page; several files are one style or script."""
    folder = resources.files("headwater.analyze").joinpath("page")

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    style = "\n".join(read(f"{name}.css") for name in styles)
    script = '"use strict";\n' + "\n".join(read(f"{name}.js") for name in scripts)
    return style, script, read(f"{frame}.html")


def policy(style: str, script: str) -> str:
    """Write the page's policy: it runs this script, has this style, and reaches nothing."""
    return f"default-src 'none'; img-src data:; style-src '{digest(style)}'; script-src '{digest(script)}'"


def digest(source: str) -> str:
    sha256 = hashlib.sha256(source.encode()).digest()
    return "sha256-" + base64.b64encode(sha256).decode()


def json_island(data: dict[str, Any]) -> str:
    """JSON that cannot close its script element, whatever its strings contain."""
    packed = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return packed.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
