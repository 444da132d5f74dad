"""Pictures as SVG for light and dark pages: lines by residual, and maps of who reads whom."""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from itertools import cycle, groupby
from typing import NamedTuple

# Colours on white and on black that people with any colour vision tell apart; the three residuals
# of most pictures have the same ones in all of them.
COLOURS = {
    "plain": ("#6b6b6b", "#a8a8a8"), "block": ("#2b6ca3", "#74b3e8"), "full": ("#b3690f", "#e5a04b"),
    "other0": ("#1b7f5c", "#4fc79b"), "other1": ("#a3417c", "#e08bbb"), "other2": ("#7a6a00", "#d9c84a"),
    "other3": ("#5b4fa8", "#a79df0"), "other4": ("#b03a2e", "#f08a7c"), "other5": ("#2f7d8c", "#76c7d6"),
}  # fmt: skip
ARMS = {
    "standard": ("plain", "plain"),
    "attnres-block": ("block", "Block"),
    "attnres-full": ("full", "Full"),
}
PANEL, HIGH, LEFT, RIGHT, TOP, FLOOR = 380, 280, 52, 84, 36, 236
LETTER = 7.5  # the width of a letter of a name in a wide font
APART = 36  # the least distance of the numbers across
MAP, EDGE, SHADES = 260, 30, 20
SIDE = 5  # from one line with intervals to the next


def _style() -> str:
    """Colours for light and dark pages; no background, since a page has its own."""
    light = " ".join(f".{name} {{ color: {on_white} }}" for name, (on_white, _) in COLOURS.items())
    dark = " ".join(f".{name} {{ color: {on_black} }}" for name, (_, on_black) in COLOURS.items())
    return (
        "<style>\ntext { fill: #222 } .quiet { fill: #555 } line { stroke: #ddd } .named { fill: currentColor }\n"
        f"{light}\n@media (prefers-color-scheme: dark) {{ text {{ fill: #e2e2e2 }} .quiet {{ fill: #b0b0b0 }} "
        f"line {{ stroke: #4a4d57 }}\n{dark} }}\n</style>"
    )


class Line(NamedTuple):
    """A line with its dots.

    `points`: at each x one y a run. `curve`: the line through them, if not their means; it may be
    empty. `spans`: the ends of an interval by x, which may be infinite.
    """

    name: str
    colour: str
    points: Mapping[float, Sequence[float]]
    curve: Sequence[tuple[float, float]] | None = None
    spans: Mapping[float, tuple[float, float]] = {}


class Panel(NamedTuple):
    """Lines over two axes. `label` writes a number across; `zero` begins the axis upwards at 0."""

    title: str
    across: str
    lines: Sequence[Line]
    log: bool = False
    zero: bool = False
    label: Callable[[float], str] = "{:g}".format


class Map(NamedTuple):
    """A map of who reads whom. `shares`: a row for each read, in which 1 is an even share."""

    title: str
    colour: str
    shares: Sequence[Sequence[float]]


def colours_of(arms: Collection[str]) -> dict[str, str]:
    """A name of COLOURS for each residual; beyond nine residuals they come again."""
    reserved = {colour for colour, _ in ARMS.values()}
    free = cycle(name for name in COLOURS if name not in reserved)
    colours = {}
    for arm in arms:
        colours[arm] = ARMS[arm][0] if arm in ARMS else next(free)
    return colours


def lines_of(points: Mapping[str, Mapping[float, Sequence[float]]]) -> list[Line]:
    """A line for each residual, under its short name if it has one."""
    colours, lines = colours_of(points), []
    for arm, at in points.items():
        _, name = ARMS.get(arm, ("", arm))
        lines.append(Line(name, colours[arm], at))
    return lines


def picture(panels: Sequence[Panel | Map], label: str) -> str:
    """An SVG with panels two in a row, or maps, which are square and small, three in a row."""
    # Panels fill rows from the left.
    wide, high, columns = _width(panels), HIGH, 2
    if isinstance(panels[0], Map):
        wide, high, columns = MAP, MAP, 3
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide * columns} {high * rows}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img" aria-label="{escape(label)}">',
        _style(),
    ]
    for index, panel in enumerate(panels):
        place = f"{wide * (index % columns)} {high * (index // columns)}"
        elements = _cells(panel) if isinstance(panel, Map) else _panel(panel)
        parts += [f'<g transform="translate({place})">', *elements, "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _width(panels: Sequence[Panel | Map]) -> int:
    """The width of a panel with the longest name beside it."""
    names = [line.name for panel in panels if isinstance(panel, Panel) for line in panel.lines]
    longest = max(map(len, names), default=0)
    return PANEL - RIGHT + max(RIGHT, 20 + math.ceil(LETTER * longest))


def _cells(panel: Map) -> list[str]:
    """Cells, the darker the larger their share, in SHADES steps up to the largest.

    There is one path a step, in which equal neighbours of a row are one piece.
    """
    # Equal neighbours join, and cells of one shade are one path: that keeps the file small.
    largest = max(map(max, panel.shares))
    shades: dict[int, list[str]] = {}
    for row, shares in enumerate(panel.shares):
        column = 0
        steps = [round(SHADES * share / largest) for share in shares]
        for shade, neighbours in groupby(steps):
            wide = len([*neighbours])
            if shade:
                shades.setdefault(shade, []).append(f"M{column} {row}h{wide}v1h-{wide}z")
            column += wide
    placed = f"translate({EDGE} {EDGE}) scale({(MAP - 2 * EDGE) / len(panel.shares):.4f})"
    parts = [
        f'<text x="{EDGE}" y="{EDGE - 10}" font-size="14">{escape(panel.title)}</text>',
        f'<g class="{panel.colour}" transform="{placed}" shape-rendering="crispEdges">',
    ]
    for shade, cells in sorted(shades.items()):
        parts.append(
            f'<path d="{"".join(cells)}" fill="currentColor" fill-opacity="{shade / SHADES:.2f}"/>'
        )
    return [
        *parts, "</g>",
        f'<text x="{EDGE}" y="{MAP - EDGE + 16}" class="quiet">sources; the most: {largest:.1f} even shares</text>',
        f'<text transform="translate({EDGE - 8} {MAP - EDGE}) rotate(-90)" class="quiet">reads, the last below</text>',
    ]  # fmt: skip


class _Axes:
    """The places of numbers in a panel: the range of both axes, and room for intervals."""

    def __init__(self, panel: Panel) -> None:
        self.log = panel.log
        self.xs = sorted({x for line in panel.lines for x in line.points})

        # The axis upwards holds all dots, and the ends of intervals that have one.
        values: list[float] = []
        for line in panel.lines:
            for ys in (*line.points.values(), *line.spans.values()):
                values += filter(math.isfinite, ys)
        self.ticks = _ticks(0 if panel.zero else min(values), max(values))

        # Lines with intervals stand side by side, so that no interval hides another one.
        self.spanned = [line for line in panel.lines if line.spans]
        self.room = SIDE * max(0, len(self.spanned) - 1) / 2
        across = [self._across(x) for x in self.xs]
        self._place_x = _scale(across, LEFT + 8 + self.room, PANEL - RIGHT - self.room)
        self._place_y = _scale(self.ticks, FLOOR, TOP)

    def _across(self, x: float) -> float:
        return math.log(x) if self.log else x

    def aside(self, line: Line) -> float:
        return SIDE * self.spanned.index(line) - self.room if line in self.spanned else 0.0

    def place(self, x: float, y: float, aside: float = 0.0) -> tuple[float, float]:
        """The place of a point; what lies beyond the axis upwards stands at its end."""
        x = self._place_x(self._across(x)) + aside
        y = self._place_y(min(max(y, self.ticks[0]), self.ticks[-1]))
        return round(x, 1), round(y, 1)


def _panel(panel: Panel) -> list[str]:
    axes = _Axes(panel)
    parts = [f'<text x="{LEFT}" y="18" font-size="14">{escape(panel.title)}</text>']
    parts += _numbers_upwards(axes)
    parts += _numbers_across(axes, panel)

    # Names stand beside the ends of their lines, from the top.
    def end_of(line: Line) -> float:
        x, y = (line.curve or _means(line))[-1]
        return axes.place(x, y)[1]

    lines = sorted(panel.lines, key=end_of)
    ends = _spaced([end_of(line) + 4 for line in lines])
    for line, end in zip(lines, ends, strict=True):
        parts += _line(line, axes, end)
    return parts


def _numbers_upwards(axes: _Axes) -> list[str]:
    parts = []
    for tick in axes.ticks:
        y = axes.place(axes.xs[0], tick)[1]
        parts.append(f'<line x1="{LEFT}" x2="{PANEL - RIGHT + 8}" y1="{y}" y2="{y}"/>')
        place = f'x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end"'
        parts.append(f'<text {place} class="quiet">{tick + 0.0:g}</text>')
    return parts


def _numbers_across(axes: _Axes, panel: Panel) -> list[str]:
    """The numbers that have room, and the name of the axis."""
    parts = []
    last = -math.inf
    for value in axes.xs:
        x = axes.place(value, axes.ticks[0])[0]
        # A number too close to the one before it is left out.
        if x - last > APART:
            place = f'x="{x}" y="{FLOOR + 18}" text-anchor="middle"'
            parts.append(f'<text {place} class="quiet">{escape(panel.label(value))}</text>')
            last = x
    place = f'x="{(LEFT + PANEL - RIGHT) / 2}" y="{FLOOR + 36}" text-anchor="middle"'
    return [*parts, f'<text {place} class="quiet">{escape(panel.across)}</text>']


def _line(line: Line, axes: _Axes, end: float) -> list[str]:
    """The curve, the intervals, the dots, and the name, which stands at the height `end`."""
    aside = axes.aside(line)
    curve = _means(line) if line.curve is None else line.curve
    places = [axes.place(x, y, aside) for x, y in curve]
    path = " ".join(f"{x},{y}" for x, y in places)
    parts = [
        f'<g class="{line.colour}">',
        f'<polyline points="{path}" fill="none" stroke="currentColor" stroke-width="2"/>',
    ]
    for value, (low, high) in line.spans.items():
        x, bottom = axes.place(value, low, aside)
        top = axes.place(value, high, aside)[1]
        parts.append(f'<path d="M{x} {bottom}V{top}" stroke="currentColor" stroke-opacity="0.5"/>')
    for value, ys in line.points.items():
        for y in ys:
            x, height = axes.place(value, y, aside)
            place = f'cx="{x}" cy="{height}"'
            parts.append(f'<circle {place} r="2.5" fill="currentColor" fill-opacity="0.6"/>')
    name = f'x="{PANEL - RIGHT + 12}" y="{end:.1f}" class="named"'
    return [*parts, f"<text {name}>{escape(line.name)}</text></g>"]


def _means(line: Line) -> list[tuple[float, float]]:
    return [(x, statistics.fmean(ys)) for x, ys in sorted(line.points.items())]


def _spaced(ends: Sequence[float]) -> list[float]:
    """Move names apart, from the top, that would overlap or stand among the numbers below."""
    # Downwards, each name at least a line below the one before it.
    places: list[float] = []
    for end in ends:
        places.append(max(end, places[-1] + 13) if places else end)

    # Upwards again, from the numbers below, or from the picture's end if there are many names.
    needed = TOP + 13 * (len(ends) - 1)
    floor = min(HIGH - 6, max(FLOOR, needed))
    for below, index in enumerate(reversed(range(len(places)))):
        places[index] = min(places[index], floor - 13 * below)
    return places


def _scale(values: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    """The line from the first value, at `low`, to the last one, at `high`."""
    first = values[0]
    span = (values[-1] - first) or 1
    return lambda value: low + (high - low) * (value - first) / span


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers around a range, four to seven of them."""
    # The power of ten below the range; its parts are the steps that read well.
    span = (high - low) or 1
    power = 10 ** math.floor(math.log10(span))
    # The smallest round step that leaves six gaps or fewer.
    steps = [power * part for part in (0.1, 0.2, 0.25, 0.5, 1, 2)]
    step = next(step for step in steps if span / step <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 9) for number in range(first, last + 1)]
