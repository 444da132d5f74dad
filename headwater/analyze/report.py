"""One self-contained HTML page about one or more runs, made from their folders alone.

Words and tables are written here, every value through `text`, which escapes it; curves and maps are drawn in the page
by report.js, from one JSON island. A content security policy allows that script and that style alone, so nothing that
a name contains can run or reach the network.
"""

import base64
import hashlib
import json
import math
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from headwater.analyze.groups import BASELINE, Group, Stat, differing, draw_curves, draw_depth, group_runs
from headwater.analyze.runs import RecordedRun, find_baseline, find_runs, read_run

LIMIT = 1_900_000  # bytes; a page is promised to stay under 2 MB
# Less and less detail, until a page fits: points per curve, depth records per residual, significant digits.
DETAILS = ((400, 16, 3), (240, 6, 3), (120, 1, 3), (60, 1, 2))


def write_report(folders: list[Path], out: Path | None = None) -> Path:
    """Write the report of run folders and comparison folders to `out` (default: report.html in the first folder)."""
    folders = [Path(folder) for folder in folders]
    runs = [read_run(folder) for folder in find_runs(folders)]
    out = folders[0] / "report.html" if out is None else Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(make_page(runs, find_baseline(folders)), encoding="utf-8")
    return out


def make_page(runs: list[RecordedRun], baseline: str = BASELINE) -> str:
    groups = group_runs(runs, baseline)
    for points, frames, digits in DETAILS:
        page = fill_template(groups, payload(groups, points, frames, digits))
        if len(page.encode()) <= LIMIT:
            return page
    # Only hundreds of sublayers times dozens of residuals come this far.
    slim = payload(groups, points, frames, digits)
    for group in slim["groups"]:
        for frame in (group["depth"] or {"frames": []})["frames"]:
            frame["mixing"] = None
    note = "The depth-mixing maps are left out: with them the page would exceed 2 MB. Report fewer runs at once."
    return fill_template(groups, slim, [note])


def payload(groups: list[Group], points: int, frames: int, digits: int) -> dict[str, Any]:
    return {
        "groups": [
            {
                "label": group.label,
                "colour": colour,
                "baseline": group.baseline is group,
                "curves": {kind: draw_curves(group, kind, points) for kind in ("eval", "train", "difference")},
                "depth": draw_depth(group, frames, digits),
            }
            for colour, group in enumerate(groups, first_colour(groups))
        ],
        "points": points,
    }


def first_colour(groups: list[Group]) -> int:
    """Colour 0, the neutral one, is kept for the baseline, which comes first where there is one."""
    return 0 if groups[0].baseline is groups[0] else 1


def fill_template(groups: list[Group], data: dict[str, Any], notes: list[str] | None = None, **other: str) -> str:
    """The page. `other` replaces the words and the table of the report by those of another view of the same groups."""
    files = resources.files("headwater.analyze")
    style, script = (files.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    words = {
        "view": "report",
        "results": "Results",
        "title": text(headline(groups)),
        "heading": " ".join(f"<span>{text(word)}</span>" for word in headline(groups).split()),  # no break inside
        "findings": paragraphs("finding", findings(groups)),
        "facts": facts(groups),
        "table": table(groups),
        "caption": text(caption(groups)),
        "notes": listing("notes", [*(notes or []), *page_notes(groups)]),
        "runs": run_rows(groups),
        "made": text(datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
    }
    return Template(files.joinpath("report.html").read_text(encoding="utf-8")).substitute(
        policy=f"default-src 'none'; img-src data:; style-src '{digest(style)}'; script-src '{digest(script)}'",
        style=style,
        script=script,
        data=json_island(data),
        **(words | other),
    )


def digest(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def json_island(data: dict[str, Any]) -> str:
    """JSON that cannot close its script element, whatever its strings contain."""
    packed = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return packed.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def text(value: object) -> str:
    return escape(str(value))


def paragraphs(kind: str, sentences: list[str]) -> str:
    return "\n".join(f'<p class="{kind}">{text(sentence)}</p>' for sentence in sentences)


def listing(kind: str, sentences: list[str], limit: int = 12) -> str:
    if not sentences:
        return ""
    unique = list(dict.fromkeys(sentences))
    rest = [f"… and {len(unique) - limit} more."] if len(unique) > limit else []
    return f'<ul class="{kind}">' + "".join(f"<li>{text(s)}</li>" for s in unique[:limit] + rest) + "</ul>"


def join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def headline(groups: list[Group]) -> str:
    rivals = [group.label for group in groups if group.baseline is not group]
    bases = [group.label for group in groups if group.baseline is group]
    if len(groups) == 1:
        return groups[0].label
    if len(groups) > 4:
        return f"{len(rivals)} residuals against {join(bases)}" if len(bases) == 1 else f"{len(groups)} residuals"
    return f"{join(rivals)} against {join(bases)}" if bases and rivals else join([group.label for group in groups])


def findings(groups: list[Group]) -> list[str]:
    """The result in words: one sentence for each rival of a baseline (the lowest three of many), spread included."""
    said = []
    rivals = [group for group in groups if group.difference() is not None]
    if len(rivals) > 4:
        rivals = sorted(rivals, key=lambda group: mean(group, "loss") or math.inf)[:3]
    for group in rivals:
        difference, loss = group.difference(), group.final("loss")
        if difference is None or loss is None or group.baseline is None:
            continue
        away = f"{abs(difference.mean):.4f} {'below' if difference.mean < 0 else 'above'} {group.baseline.label}"
        amount = f"{group.label} ends at {loss.mean:.4f} nats per token, {away}"
        if difference.spread is None:
            said.append(f"{amount}, on one seed: without a spread, a difference of this size may be chance.")
            continue
        over = f"the spread of {difference.spread:.4f} over {difference.count} seeds"
        verdict = f": within {over}, so no difference is shown." if within_spread(difference) else f", beyond {over}."
        said.append(amount + verdict)
    return said or [
        f"{group.label} {'ends' if group.finished else 'stands'} at {loss.mean:.4f} nats per token."
        for group in groups[:6]
        if (loss := group.final("loss")) is not None
    ]


def within_spread(difference: Stat) -> bool:
    return difference.spread is not None and abs(difference.mean) <= difference.spread


def facts(groups: list[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    counts = {len(group.runs) for group in groups}
    devices = unique([str(run.summary["device"]) for run in runs if run.summary and run.summary.get("device")], 2)
    rows = {
        "Model": " or ".join(unique([model_size(run) for run in runs], 3)),
        "Tokens": " or ".join(unique([count(group.tokens()) for group in groups], 3)) + " per run",
        "Seeds": f"{plain_range(counts)} per residual",
        "Runs": f"{sum(run.summary is not None for run in runs)} of {len(runs)} finished",
        "Device": ", ".join(devices) or "—",
        "Last written": max(run.written for run in runs).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in rows.items())


def unique(values: list[str], limit: int) -> list[str]:
    found = list(dict.fromkeys(values))
    return found[:limit] + (["…"] if len(found) > limit else [])


def plain_range(counts: set[int]) -> str:
    return str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def model_size(run: RecordedRun) -> str:
    model = run.config["model"]
    return f"{model.get('layers', '?')} layers, width {model.get('dim', '?')}"


COLUMNS = (
    "Residual", "Validation loss", "Difference", "Bits per byte", "Parameters", "Extra parameters", "FLOPs per token",
    "Tokens", "Wall-clock", "Peak memory",
)  # fmt: skip


def table(groups: list[Group]) -> str:
    losses = {id(group): loss.mean for group in groups if group.finished and (loss := group.final("loss")) is not None}
    best = min(losses, key=lambda key: losses[key]) if len(losses) > 1 else None
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in COLUMNS)
    body = "".join(
        table_row(group, number, id(group) == best) for number, group in enumerate(groups, first_colour(groups))
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def table_row(group: Group, colour: int, best: bool) -> str:
    base = group.baseline if group.baseline is not group else None
    seeds = f"{len(group.results)} seed{'s' * (len(group.results) != 1)}" + ("" if group.finished else ", unfinished")
    extra = group.final("residual_parameters")
    cells = [
        cell(spread(group.final("loss")), "lowest" if best else "", "best" if best else ""),
        cell(*difference_words(group)),
        cell(spread(group.final("bits_per_byte"))),
        cell(count(mean(group, "parameters"))),
        cell("—" if extra is None else f"{extra.mean:,.0f}", share(extra, group.final("parameters"))),
        cell(count(mean(group, "flops_per_token")), ratio(group, base, "flops_per_token")),
        cell(count(group.tokens())),
        cell(duration(mean(group, "seconds")), ratio(group, base, "seconds")),
        cell(memory(mean(group, "peak_memory_bytes")), ratio(group, base, "peak_memory_bytes")),
    ]
    return f'<tr><th scope="row">{row_name(group, colour)}<small>{text(seeds)}</small></th>{"".join(cells)}</tr>'


def row_name(group: Group, colour: int) -> str:
    again = " again" * (colour > 7)
    return f'<i class="key c{colour % 8}{again}"></i><code>{breakable(group.label)}</code>'


def breakable(name: str) -> str:
    """A residual's options may be long: lines break between them rather than inside a word."""
    return text(name).replace(":", ":<wbr>").replace(",", ",<wbr>")


def cell(value: str, detail: str = "", kind: str = "") -> str:
    small = f"<small>{text(detail)}</small>" if detail else ""
    return f'<td class="{kind}">{text(value)}{small}</td>' if kind else f"<td>{text(value)}{small}</td>"


def difference_words(group: Group) -> tuple[str, str]:
    if group.baseline is group:
        return "baseline", ""
    difference = group.difference()
    if difference is None:
        return "—", "" if group.baseline is None else "no finished seed in common"
    if difference.spread is None:
        return signed(difference), "one seed, no spread"
    return signed(difference), "within the spread" if within_spread(difference) else "beyond the spread"


def mean(group: Group, key: str) -> float | None:
    found = group.final(key)
    return None if found is None else found.mean


def spread(found: Stat | None) -> str:
    if found is None:
        return "—"
    return f"{found.mean:.4f}" + ("" if found.spread is None else f" ± {found.spread:.4f}")


def signed(found: Stat) -> str:
    return spread(Stat(abs(found.mean), found.spread, found.count)).join(["−" if found.mean < 0 else "+", ""])


def share(part: Stat | None, whole: Stat | None) -> str:
    return f"{100 * part.mean / whole.mean:.2g} %" if part and whole and part.mean and whole.mean else ""


def ratio(group: Group, base: Group | None, key: str) -> str:
    mine, theirs = mean(group, key), mean(base, key) if base else None
    return f"× {mine / theirs:.2f}" if mine and theirs else ""


def count(value: float | None) -> str:
    if value is None:
        return "—"
    for unit, size in ((" T", 1e12), (" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}" if abs(value) < 999.5 * size else f"{value / size:.0f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def memory(size: float | None) -> str:
    if size is None:
        return "—"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def caption(groups: list[Group]) -> str:
    words = "Validation loss in nats per token; ± is the standard deviation over seeds."
    if any(group.difference() for group in groups):
        words += " Difference: minus the baseline, seed by seed on equal data; its ± is the spread of these."
        words += " × compares with the baseline."
    return words + " Extra parameters are those the residual adds."


def page_notes(groups: list[Group]) -> list[str]:
    """What a reader must know to read the numbers fairly."""
    notes = []
    keys = differing([group.settings for group in groups])
    if keys:
        notes.append(f"Settings differ beyond the residual: {', '.join(keys[:6] + ['…'] * (len(keys) > 6))}.")
    for group in groups:
        if group.baseline and group.difference() and group.tokens() != group.baseline.tokens():
            seen = f"{count(group.tokens())} tokens, {group.baseline.label} {count(group.baseline.tokens())}"
            notes.append(f"{group.label} saw {seen}: not a fair comparison.")
        waiting = [run.name for run in group.runs if run.summary is None]
        if waiting:
            which = "the table counts only finished runs" if group.finished else "the table shows the last evaluation"
            notes.append(f"Unfinished ({group.label}): {join(waiting)}, without summary.json; {which}.")
        notes += [f"{run.name}: {note}." for run in group.runs for note in run.notes]
    return notes


def run_rows(groups: list[Group]) -> str:
    rows = []
    for group in groups:
        for run in group.runs:
            made = run.summary or {}
            values = [
                run.name,
                group.label,
                run.seed,
                count(run.final("steps")),
                made.get("device"),
                made.get("torch"),
                made.get("headwater"),
            ]
            rows.append(
                "<tr>" + "".join(f"<td>{text('—' if value is None else value)}</td>" for value in values) + "</tr>"
            )
    return "".join(rows)
