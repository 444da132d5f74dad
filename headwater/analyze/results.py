"""The table of a report: one row a residual, with the differences to the baseline drawn seed by seed."""

from headwater.analyze.markup import breakable, count, duration, memory, text
from headwater.analyze.words import interval, mean
from headwater.runs.groups import Group, told_lowest
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
    """Colour 0, the neutral one, belongs to the baseline, which comes first if there is one."""
    return 0 if groups[0].baseline is groups[0] else 1


def look(colour: int) -> str:
    """Classes of the n-th colour: seven hues, then the same hues with another dash and another mark."""
    if colour == 0:
        return "c0"
    turn, hue = divmod(colour - 1, COLOURS)
    return f"c{hue + 1} look{turn % 3}"


def name_cell(group: Group, colour: int, detail: str = "") -> Cell:
    """The first cell of a row: the group's label behind a dot of its colour."""
    name = f'<i class="key {look(colour)}"></i><code>{breakable(group.label)}</code>'
    return Cell(group.label, detail=detail, html=name)


def results_table(groups: list[Group]) -> Table:
    """Losses, differences and costs of the groups, the baseline first."""
    lowest, scale = told_lowest(groups), difference_scale(groups)
    columns: list[str | Cell] = []
    for name in COLUMNS:
        if name != DRAWN:
            columns.append(name)
        elif scale:
            columns.append(Cell(name, html=text(name) + axis(scale), sortable=False))
    rows = []
    for colour, group in enumerate(groups, first_colour(groups)):
        rows.append(_row(group, colour, group is lowest, scale))
    return Table(columns, rows)


def _row(group: Group, colour: int, lowest: bool, scale: Scale | None) -> list[str | Cell]:
    loss = Cell(plain(group.final("loss")), order=mean(group, "loss"))
    if lowest:
        loss = Cell(loss.text, detail="lowest", order=loss.order, kind="best")
    cells: list[str | Cell] = [name_cell(group, colour, seeds(group)), loss, difference_cell(group)]
    if scale:
        cells.append(Cell("", html=drawing(group, colour, scale)))
    bits = Cell(plain(group.final("bits_per_byte")), order=mean(group, "bits_per_byte"))
    return [*cells, bits, *_costs(group)]


def _costs(group: Group) -> list[Cell]:
    """Parameters, operations, time and memory, as numbers and as multiples of the baseline's."""
    base = group.baseline if group.baseline is not group else None
    parameters, flops = mean(group, "parameters"), mean(group, "flops_per_token")
    seconds, peak = mean(group, "seconds"), mean(group, "peak_memory_bytes")
    time = ratio(group, base, "seconds") if group.timed else ""
    return [
        Cell(count(parameters), added(group.final("residual_parameters")), parameters),
        Cell(count(flops), ratio(group, base, "flops_per_token"), flops),
        Cell(duration(seconds), time, seconds),
        Cell(memory(peak), ratio(group, base, "peak_memory_bytes"), peak),
    ]


def seeds(group: Group) -> str:
    """How many runs a row speaks of, and what became of the others."""
    counted = len(group.results)
    stopped = sum(bool(run.stopped) for run in group.runs)
    unfinished = sum(run.summary is None for run in group.runs) - stopped
    words = [f"{counted} seed{'s' * (counted != 1)}"]
    if stopped:
        words.append(f"{stopped} stopped")
    if unfinished:
        words.append(f"{unfinished} unfinished")
    return ", ".join(words)


def plain(stat: Stat | None) -> str:
    return "—" if stat is None else stat.text()


def difference_cell(group: Group) -> Cell:
    if group.baseline is group:
        return Cell("baseline", order=0.0)
    paired = group.difference()
    if paired is None:
        return Cell("—", "" if group.baseline is None else "no finished seed in common")
    return Cell(Stat(paired.mean, None, 1).text(sign="+"), paired.verdict, paired.mean)


def difference_scale(groups: list[Group]) -> Scale | None:
    """The range of all drawings: every seed and zero, and intervals as far as they leave seeds apart.

    The interval of two seeds reaches twenty times further than they do; drawn whole it would show nothing else.
    """
    differences = [paired for group in groups if (paired := group.difference()) is not None]
    if not differences:
        return None
    ends = [0.0]
    for paired in differences:
        ends += paired.values
    most = 2.5 * max(map(abs, ends))
    for paired in differences:
        if paired.interval:
            low, high = paired.interval
            ends += [max(low, -most), min(high, most)]
    low, high = min(ends), max(ends)
    return (low, high) if high > low else (-1.0, 1.0)


def place(value: float, scale: Scale) -> float:
    """A value's position in the drawing, in pixels."""
    low, high = scale
    return round(EDGE + (value - low) / (high - low) * (WIDTH - 2 * EDGE), 1)


def axis(scale: Scale) -> str:
    """Zero and both ends, above the column. An end that is near zero has no room."""
    zero = place(0.0, scale)
    marks = [_mark(zero, "middle", "0")]
    for value, x, anchor in ((scale[0], 0.0, "start"), (scale[1], float(WIDTH), "end")):
        if value != 0 and abs(place(value, scale) - zero) >= 56:
            marks.append(_mark(x, anchor, minus(f"{value:+.2g}")))
    size = f'width="{WIDTH}" height="14"'
    return f'<svg class="strip" {size} aria-hidden="true">{"".join(marks)}</svg>'


def _mark(x: float, anchor: str, words: str) -> str:
    return f'<text x="{x}" y="11" text-anchor="{anchor}">{words}</text>'


def drawing(group: Group, colour: int, scale: Scale) -> str:
    """A dot for each seed, a bar for the interval (an arrow where it goes on), a line at the baseline."""
    zero, middle = place(0.0, scale), HEIGHT / 2
    parts = [f'<line class="zero" x1="{zero}" x2="{zero}" y1="0" y2="{HEIGHT}"/>']
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
    """The interval, cut at the ends of the scale; an end that is cut becomes an arrow."""
    if paired.interval is None:
        return []
    y = HEIGHT / 2
    low, high = (min(max(end, scale[0]), scale[1]) for end in paired.interval)
    line = f'x1="{place(low, scale)}" x2="{place(high, scale)}" y1="{y}" y2="{y}"'
    parts = [f'<line class="interval" {line}/>']
    for end, visible, way in ((paired.interval[0], low, -1), (paired.interval[1], high, 1)):
        x = place(visible, scale)
        shape = f"M{x},{y - 5}v10"
        if end != visible:
            shape = f"M{x - 1 * way},{y - 4}l{5 * way},4l{-5 * way},4"
        parts.append(f'<path class="interval" d="{shape}"/>')
    return parts


def spoken(paired: Paired | None) -> str:
    """The drawing in words, for a screen reader."""
    if paired is None:
        return "no difference known"
    values = ", ".join(minus(f"{value:+.4f}") for value in paired.values)
    around = f"; 95 % interval {interval(paired)}" if paired.interval else ""
    return f"Differences by seed {values}{around}: {paired.verdict}"


def added(extra: Stat | None) -> str:
    return "" if extra is None or not extra.mean else f"+ {extra.mean:,.0f}"


def ratio(group: Group, base: Group | None, key: str) -> str:
    """How many times the baseline's number the group's is."""
    ours, theirs = mean(group, key), mean(base, key) if base else None
    return f"× {ours / theirs:.2f}" if ours and theirs else ""
