"""One self-contained HTML page about one or more runs, made from their folders alone.

Words and tables are written in Python, every value through `markup.text`, which escapes it; curves and maps are drawn
in the page by its script, from one JSON island. A content security policy allows that script and that style alone, so
nothing that a name contains can run or reach the network.
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
# Less and less detail, until a page fits: points per curve, depth records per residual, significant digits.
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

    `folders`: run folders and comparison folders, in any mixture. `out`: the file to write, by default report.html in
    the first folder. `models`: more of the page, as `headwater.analyze.prompted.prompted_run` makes them of models that
    read a prompt. Returns the file's path. Raises UserError where a folder is no run, or `out` is another's file.

        write_report(["runs/compare"])  # runs/compare/report.html
    """
    paths = paths_of(folders)
    runs = [*read_runs(paths, models), *models]
    page = make_page(runs, find_order(paths), commands(paths))
    return write_page(beside(paths, "report.html") if out is None else at_home(out), page)


def write_page(path: Path, page: str, *, begins: bytes = DOCTYPE, kind: str = "web page") -> Path:
    """Whole or not at all, over a page of before but nothing else. A link is replaced: what it leads to stays."""
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
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
    runs: list[RecordedRun], order: Sequence[str] = (BASELINE,), again: list[str] | None = None
) -> str:
    """The page as text. `order`: residuals as the table lists them, the baseline first. `again`: the commands that make
    its runs once more."""
    groups = group_runs(runs, order)
    made_by = command_lines(again or [])
    for points, frames, digits in DETAILS:
        page = fill_template(groups, payload(groups, points, frames, digits), commands=made_by)
        if len(page.encode()) <= LIMIT:
            return page
    # Only hundreds of sublayers times dozens of residuals come this far.
    slim = payload(groups, points, frames, digits)
    for group in slim["groups"]:
        for frame in (group["depth"] or {"frames": []})["frames"]:
            frame["mixing"] = None
    note = "The depth-mixing maps are left out: with them the page would exceed 2 MB. Report fewer runs at once."
    return fill_template(groups, slim, [note], commands=made_by)


def payload(groups: list[Group], points: int, frames: int, digits: int) -> dict[str, Any]:
    return {
        "groups": [
            {
                "label": group.label,
                "look": look(colour),
                "baseline": group.baseline is group,
                "against": next(
                    (i for i, other in enumerate(groups) if other is group.baseline), None
                ),
                "curves": {
                    kind: draw_curves(group, kind, points)
                    for kind in ("eval", "train", "difference")
                },
                "depth": draw_depth(group, frames, digits),
                "results": results_data(group),
            }
            for colour, group in enumerate(groups, first_colour(groups))
        ],
        "points": points,
    }


def fill_template(
    groups: list[Group], data: dict[str, Any], notes: list[str] | None = None, **other: str
) -> str:
    """The page. `other` replaces the words and the table of the report by those of another view of the same groups."""
    style, script, frame = page_files()
    words = {
        "view": "report",
        "results": "Results",
        "title": text(headline(groups)),
        "heading": " ".join(
            f"<span>{text(word)}</span>" for word in headline(groups).split()
        ),  # no break inside
        "findings": paragraphs("finding", findings(groups)),
        "facts": facts(groups),
        "rows": "" if has_results(groups) else " hidden",
        "table": html(results_table(groups)),
        "caption": text(caption(groups)),
        "loss": "" if trained(groups) else " hidden",
        "notes": listing("notes", [*(notes or []), *page_notes(groups)]),
        "runs": html(runs_table(groups), 'class="plain"'),
        "settings": settings_table(groups),
        "commands": "",
        "made": text(datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
    }
    return Template(frame).substitute(
        policy=policy(style, script),
        style=style,
        script=script,
        data=json_island(data),
        **(words | other),
    )


def page_files(
    styles: Sequence[str] = ("report",), scripts: Sequence[str] = SCRIPTS, frame: str = "report"
) -> tuple[str, str, str]:
    """Style, script and frame of a page; style and script are written in several files and run as one."""
    folder = resources.files("headwater.analyze").joinpath("page")

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    style = "\n".join(read(f"{name}.css") for name in styles)
    script = '"use strict";\n' + "\n".join(read(f"{name}.js") for name in scripts)
    return style, script, read(f"{frame}.html")


def policy(style: str, script: str) -> str:
    """A page runs this script and has this style, and reaches nothing."""
    return f"default-src 'none'; img-src data:; style-src '{digest(style)}'; script-src '{digest(script)}'"


def digest(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def json_island(data: dict[str, Any]) -> str:
    """JSON that cannot close its script element, whatever its strings contain."""
    packed = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return packed.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
