"""The table of a report: a row for each residual, with its differences drawn seed by seed."""

from collections.abc import Callable

from headwater.analyze.markup import breakable, count, duration, memory, text
from headwater.analyze.words import interval, mean
from headwater.runs.groups import Group, lowest_of
from headwater.runs.stats import Paired, Stat, minus
from headwater.runs.tables import Cell, Table

DRAWN = "Seed by seed"  # the column of drawings; a page without differences has none
COLUMNS = (
    "Residual", "Validation loss", "Difference", DRAWN, "Bits per byte", "Parameters", "FLOPs per token",
    "Wall\u2011clock", "Peak memory",
)  # fmt: skip
WIDTH, HEIGHT, EDGE = 172, 30, 8  # of the drawing in a row, in pixels
COLOURS = 7  # besides colour 0, the baseline's
NO_CELL = Cell("—")

Scale = tuple[float, float]


def first_colour(groups: list[Group]) -> int:
    """Return 0, the neutral colour, if the page begins with the baseline."""
    return 0 if groups[0].baseline is groups[0] else 1


def look(colour: int) -> str:
    """Name the n-th colour's classes: seven hues, then these hues with other dashes and marks."""
    if colour == 0:
        return "c0"
    turn, hue = divmod(colour - 1, COLOURS)
    return f"c{hue + 1} look{turn % 4}"


def name_cell(group: Group, colour: int, detail: str = "") -> Cell:
    """Make the first cell of a row: the group's label behind a dot of its colour."""
    name = f'<i class="key {look(colour)}"></i><code>{breakable(group.label)}</code>'
    return Cell(group.label, detail=detail, html=name)


def results_table(groups: list[Group]) -> Table:
    """List losses, differences and costs of the groups, the baseline first."""
    # All rows are drawn on one scale; without differences the column of drawings goes.
    lowest, scale = lowest_of(groups), difference_scale(groups)
    columns: list[str | Cell] = [*COLUMNS]
    together = groups[0].comparisons
    if together > 1:
        # A line of the head ends after the comma.
        corrected = f"95\u00a0%\u00a0for\u00a0all\u00a0{together}"
        columns[columns.index("Difference")] = f"Difference, {corrected}"
    place_of_drawing = columns.index(DRAWN)
    columns[place_of_drawing : place_of_drawing + 1] = [] if scale is None else [axis(scale)]
    rows = []
    for colour, group in enumerate(groups, first_colour(groups)):
        rows.append(_row(group, colour, group is lowest, scale))
    return Table(columns, rows)


def _row(group: Group, colour: int, lowest: bool, scale: Scale | None) -> list[Cell]:
    loss = stat_cell(group, "loss")
    if lowest:
        loss = Cell(loss.text, detail="lowest", order=loss.order, kind="best")
    cells = [name_cell(group, colour, seeds(group)), loss, difference_cell(group)]
    if scale:
        cells.append(Cell("", html=drawing(group, colour, scale)))
    return [*cells, stat_cell(group, "bits_per_byte"), *_costs(group)]


def stat_cell(group: Group, key: str) -> Cell:
    stat = group.final(key)
    return NO_CELL if stat is None else Cell(stat.text(), order=stat.mean)


def _costs(group: Group) -> list[Cell]:
    """Make the cells of parameters, operations, time and memory, with the baseline's multiples."""
    extra = mean(group, "residual_parameters")
    forms = {"flops_per_token": count, "seconds": duration, "peak_memory_bytes": memory}
    cells = [cost_cell(group, "parameters", count, f"+ {extra:,.0f}" if extra else "")]
    for key, form in forms.items():
        # Runs that shared the machine say nothing of how fast a residual is.
        fair = key != "seconds" or group.timed
        cells.append(cost_cell(group, key, form, ratio(group, key) if fair else ""))
    return cells


def cost_cell(group: Group, key: str, form: Callable[[float | None], str], detail: str) -> Cell:
    value = mean(group, key)
    return Cell(form(value), detail, value)


def ratio(group: Group, key: str) -> str:
    """Write how many times the baseline's number the group's number is."""
    if group.baseline is None or group.baseline is group:
        return ""
    ours, theirs = mean(group, key), mean(group.baseline, key)
    return f"× {ours / theirs:.2f}" if ours and theirs else ""


def seeds(group: Group) -> str:
    """Count the runs that a row speaks of, and the others."""
    counted = len(group.results)
    stopped = sum(bool(run.stopped) for run in group.runs)
    unfinished = sum(run.summary is None for run in group.runs) - stopped
    words = [f"{counted} seed{'s' * (counted != 1)}"]
    if stopped:
        words.append(f"{stopped} stopped")
    if unfinished:
        words.append(f"{unfinished} unfinished")
    return ", ".join(words)


def difference_cell(group: Group) -> Cell:
    if group.baseline is group:
        return Cell("baseline", order=0.0)
    paired = group.difference()
    if paired is None:
        return Cell("—", "" if group.baseline is None else "no finished seed in common")
    return Cell(Stat(paired.mean, None, 1).text(sign="+"), paired.verdict, paired.mean)


def difference_scale(groups: list[Group]) -> Scale | None:
    """Find the range of all drawings: zero, every seed, and intervals if they leave seeds apart.

    The interval of two seeds reaches twenty times further than they do. Drawn whole, it would show
    nothing else.
    """
    differences = [paired for group in groups if (paired := group.difference()) is not None]
    if not differences:
        return None
    ends = [0.0]
    for paired in differences:
        ends += paired.values
    # Intervals are drawn to two and a half times the farthest seed.
    edge = 2.5 * max(map(abs, ends))
    for paired in differences:
        if paired.interval:
            low, high = paired.interval
            ends += [max(low, -edge), min(high, edge)]
    low, high = min(ends), max(ends)
    return (low, high) if high > low else (-1.0, 1.0)


def place(value: float, scale: Scale) -> float:
    """Return a value's position in the drawing, in pixels."""
    low, high = scale
    part = (value - low) / (high - low)
    return round(EDGE + part * (WIDTH - 2 * EDGE), 1)


def axis(scale: Scale) -> Cell:
    """Make the head of the column: zero and both ends. An end that is near zero has no room."""
    zero = place(0.0, scale)
    marks = [_mark(zero, "middle", "0")]
    for value, x, anchor in zip(scale, (0.0, float(WIDTH)), ("start", "end"), strict=True):
        if value != 0 and abs(place(value, scale) - zero) >= 56:
            marks.append(_mark(x, anchor, minus(f"{value:+.2g}")))
    size = f'width="{WIDTH}" height="14"'
    svg = f'<svg class="strip" {size} aria-hidden="true">{"".join(marks)}</svg>'
    return Cell(DRAWN, html=DRAWN + svg, sortable=False)


def _mark(x: float, anchor: str, words: str) -> str:
    return f'<text x="{x}" y="11" text-anchor="{anchor}">{words}</text>'


def drawing(group: Group, colour: int, scale: Scale) -> str:
    """Draw a dot for each seed, a bar for the interval and a line at the baseline."""
    zero, middle = place(0.0, scale), HEIGHT / 2
    parts = [f'<line class="zero" x1="{zero}" x2="{zero}" y1="0" y2="{HEIGHT}"/>']
    # The bar lies below the dots, and the mean's mark above them.
    paired = group.difference()
    if paired is not None:
        parts += bar(paired, scale)
        for value in paired.values:
            x = place(value, scale)
            parts.append(f'<circle class="seed" cx="{x}" cy="{middle}" r="3.2"/>')
        parts.append(f'<path class="mean" d="M{place(paired.mean, scale)},{middle - 8}v16"/>')
    label = "baseline" if group.baseline is group else spoken(paired)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg class="strip {look(colour)}" {size} role="img" aria-label="{text(label)}">'
    return f"{head}{''.join(parts)}</svg>"


def bar(paired: Paired, scale: Scale) -> list[str]:
    """Draw the interval. An end beyond the scale becomes an arrow at the end of the scale."""
    if paired.interval is None:
        return []
    y = HEIGHT / 2
    low, high = paired.interval
    left, right = (place(min(max(end, scale[0]), scale[1]), scale) for end in (low, high))
    parts = [f'<line class="interval" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>']
    # An arrow points the way in which the interval goes on.
    ends = (left, -1, low < scale[0]), (right, 1, high > scale[1])
    for x, way, beyond in ends:
        shape = f"M{x},{y - 5}v10"
        if beyond:
            shape = f"M{x - 1 * way},{y - 4}l{5 * way},4l{-5 * way},4"
        parts.append(f'<path class="interval" d="{shape}"/>')
    return parts


def spoken(paired: Paired | None) -> str:
    """Describe the drawing for a screen reader."""
    if paired is None:
        return "no difference known"
    values = ", ".join(minus(f"{value:+.4f}") for value in paired.values)
    around = f"; 95 % interval {interval(paired)}" if paired.interval else ""
    return f"Differences by seed {values}{around}: {paired.verdict}"
