"""Numbers as pictures: lines by residual, and maps of who reads whom, as SVG for light and dark pages."""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

# Colours on white and on black, that people with any colour vision tell apart; the three residuals of most pictures
# have the same in all of them.
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
LETTER, APART = (
    7.5,
    36,
)  # how wide one of a name is in a wide font; how far apart the numbers across are at least
MAP, EDGE, SHADES = 260, 30, 20
SIDE = 5  # from one line with intervals to the next


def _style() -> str:
    """No ground of its own: a page may be dark, and its pictures are then asked for in dark."""
    light, dark = (
        " ".join(f".{name} {{ color: {pair[shade]} }}" for name, pair in COLOURS.items())
        for shade in (0, 1)
    )
    return (
        "<style>\ntext { fill: #222 } .quiet { fill: #555 } line { stroke: #ddd } .named { fill: currentColor }\n"
        f"{light}\n@media (prefers-color-scheme: dark) {{ text {{ fill: #e2e2e2 }} .quiet {{ fill: #b0b0b0 }} "
        f"line {{ stroke: #4a4d57 }}\n{dark} }}\n</style>"
    )


class Line(NamedTuple):
    """`points`: at each x one y a run. `curve`: what goes through them, if not their means; it may be empty. `spans`,
    by x: from where to where an interval reaches, which may be infinity."""

    name: str
    colour: str
    points: Mapping[float, Sequence[float]]
    curve: Sequence[tuple[float, float]] | None = None
    spans: Mapping[float, tuple[float, float]] = {}


class Panel(NamedTuple):
    """`label` writes a number of the axis across. `zero`: the axis upwards begins there."""

    title: str
    across: str
    lines: Sequence[Line]
    log: bool = False
    zero: bool = False
    label: Callable[[float], str] = "{:g}".format


class Map(NamedTuple):
    """Who reads whom, in one of COLOURS: `shares`, a row for each read, in which 1 is an even share."""

    title: str
    colour: str
    shares: Sequence[Sequence[float]]


def colours_of(arms: Collection[str]) -> dict[str, str]:
    """One of COLOURS for each residual; beyond nine they come again."""
    free = [name for name in COLOURS if name not in {colour for colour, _ in ARMS.values()}]
    others = [arm for arm in arms if arm not in ARMS]
    return {
        arm: ARMS[arm][0] if arm in ARMS else free[others.index(arm) % len(free)] for arm in arms
    }


def lines_of(points: Mapping[str, Mapping[float, Sequence[float]]]) -> list[Line]:
    """A line for each residual, under its short name if it has one."""
    colours = colours_of(points)
    return [Line(ARMS.get(arm, ("", arm))[1], colours[arm], at) for arm, at in points.items()]


def picture(panels: Sequence[Panel | Map], label: str) -> str:
    """Panels two in a row; maps, which are square and small, three."""
    wide, high = (MAP, MAP) if isinstance(panels[0], Map) else (_width(panels), HIGH)
    columns = min(3 if isinstance(panels[0], Map) else 2, len(panels))
    rows = -(-len(panels) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide * columns} {high * rows}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img" aria-label="{escape(label)}">',
        _style(),
    ]
    for index, panel in enumerate(panels):
        at = f"{wide * (index % columns)} {high * (index // columns)}"
        drawn = _cells(panel) if isinstance(panel, Map) else _drawn(panel)
        parts += [f'<g transform="translate({at})">', *drawn, "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _width(panels: Sequence[Panel | Map]) -> int:
    """A panel and the longest name beside it."""
    names = [line.name for panel in panels if isinstance(panel, Panel) for line in panel.lines]
    return PANEL - RIGHT + max([RIGHT, *(20 + math.ceil(LETTER * len(name)) for name in names)])


def _cells(panel: Map) -> list[str]:
    """Cells, the darker the larger their share, in SHADES steps up to the largest: one path a step, in which equal
    neighbours of a row are one piece."""
    most = max(map(max, panel.shares))
    shades: dict[int, list[str]] = {}
    for row, shares in enumerate(panel.shares):
        column = 0
        for shade, alike in groupby(round(SHADES * share / most) for share in shares):
            wide = len([*alike])
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
        f'<text x="{EDGE}" y="{MAP - EDGE + 16}" class="quiet">sources; the most: {most:.1f} even shares</text>',
        f'<text transform="translate({EDGE - 8} {MAP - EDGE}) rotate(-90)" class="quiet">reads, the last below</text>',
    ]  # fmt: skip


def _drawn(panel: Panel) -> list[str]:
    xs = sorted({x for line in panel.lines for x in line.points})
    every = [
        y
        for line in panel.lines
        for ys in (*line.points.values(), *line.spans.values())
        for y in ys
    ]
    every = [y for y in every if math.isfinite(y)]
    ticks = _ticks(0 if panel.zero else min(every), max(every))
    spanned = [
        line for line in panel.lines if line.spans
    ]  # side by side, so that no interval hides another
    room = SIDE * max(0, len(spanned) - 1) / 2
    place_x = _scale(
        [math.log(x) if panel.log else x for x in (xs[0], xs[-1])],
        LEFT + 8 + room,
        PANEL - RIGHT - room,
    )
    place_y = _scale([ticks[0], ticks[-1]], FLOOR, TOP)

    def at(x: float, y: float, aside: float = 0.0) -> tuple[float, float]:
        across = place_x(math.log(x) if panel.log else x) + aside
        return round(across, 1), round(place_y(min(max(y, ticks[0]), ticks[-1])), 1)

    parts = [f'<text x="{LEFT}" y="18" font-size="14">{escape(panel.title)}</text>']
    for tick in ticks:
        y = at(xs[0], tick)[1]
        parts.append(f'<line x1="{LEFT}" x2="{PANEL - RIGHT + 8}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end" class="quiet">{tick + 0.0:g}</text>'
        )
    last = -math.inf
    for value in xs:
        x, shown = at(value, ticks[0])[0], escape(panel.label(value))
        if x - last > APART:
            parts.append(
                f'<text x="{x}" y="{FLOOR + 18}" text-anchor="middle" class="quiet">{shown}</text>'
            )
            last = x
    middle = (LEFT + PANEL - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{FLOOR + 36}" text-anchor="middle" class="quiet">{escape(panel.across)}</text>'
    )
    ends = [(at(*(line.curve or _means(line))[-1])[1], line) for line in panel.lines]
    ends.sort(key=lambda item: item[0])
    for (_, line), end in zip(ends, _spaced([y + 4 for y, _ in ends])):
        aside = SIDE * spanned.index(line) - room if line in spanned else 0.0
        parts.append(f'<g class="{line.colour}">')
        path = [at(x, y, aside) for x, y in (_means(line) if line.curve is None else line.curve)]
        parts.append(
            f'<polyline points="{" ".join(f"{x},{y}" for x, y in path)}" fill="none" stroke="currentColor" '
            'stroke-width="2"/>'
        )
        for value, (low, high) in line.spans.items():
            (x, bottom), (_, top) = at(value, low, aside), at(value, high, aside)
            parts.append(
                f'<path d="M{x} {bottom}V{top}" stroke="currentColor" stroke-opacity="0.5"/>'
            )
        for value, ys in line.points.items():
            for x, y in (at(value, y, aside) for y in ys):
                parts.append(
                    f'<circle cx="{x}" cy="{y}" r="2.5" fill="currentColor" fill-opacity="0.6"/>'
                )
        name = escape(line.name)
        parts.append(
            f'<text x="{PANEL - RIGHT + 12}" y="{end:.1f}" class="named">{name}</text></g>'
        )
    return parts


def _means(line: Line) -> list[tuple[float, float]]:
    return [(x, statistics.fmean(ys)) for x, ys in sorted(line.points.items())]


def _spaced(ends: Sequence[float]) -> list[float]:
    """Where names go, from the top: beside their ends, unless they would overlap, or stand among the numbers below."""
    found: list[float] = []
    floor = min(HIGH - 6, max(FLOOR, TOP + 13 * (len(ends) - 1)))
    for end in ends:
        found.append(max([end, *(before + 13 for before in found[-1:])]))
    for index in reversed(range(len(found))):
        found[index] = min(found[index], floor - 13 * (len(found) - 1 - index))
    return found


def _scale(values: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    first, last = values
    return lambda value: low + (high - low) * (value - first) / ((last - first) or 1)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers around what there is, four to seven of them."""
    span = (high - low) or 1
    step = 10 ** math.floor(math.log10(span))
    step = next(step * part for part in (0.1, 0.2, 0.25, 0.5, 1, 2) if span / (step * part) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 9) for number in range(first, last + 1)]
