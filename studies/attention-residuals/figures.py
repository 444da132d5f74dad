"""The pictures of docs/results/study.md, drawn by page.py from the same raw runs: SVG, for light and dark pages."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

STYLE = """<style>
text { fill: #222 } .quiet { fill: #555 } line { stroke: #ddd } .named { fill: currentColor }
.plain { color: #6b6b6b } .block { color: #2b6ca3 } .full { color: #b3690f }
@media (prefers-color-scheme: dark) { text { fill: #e2e2e2 } .quiet { fill: #b0b0b0 } line { stroke: #4a4d57 }
.plain { color: #a8a8a8 } .block { color: #74b3e8 } .full { color: #e5a04b } }
</style>"""  # no ground of its own: a page may be dark
PANEL, HIGH, LEFT, RIGHT, TOP, FLOOR = 380, 280, 52, 84, 36, 236
MAP, EDGE, SHADES = 260, 30, 20
ARMS = {"standard": ("plain", "plain"), "attnres-block": ("block", "Block"), "attnres-full": ("full", "Full")}


class Panel(NamedTuple):
    """`points`: of each arm, at each x one y a run. A line goes through their means."""

    title: str
    across: str
    points: dict[str, dict[float, list[float]]]
    log: bool = False


class Map(NamedTuple):
    """Who reads whom, in the colour of an arm: `shares`, a row for each read, in which 1 is an even share."""

    title: str
    arm: str
    shares: Sequence[Sequence[float]]


def picture(panels: Sequence[Panel | Map], label: str) -> str:
    """Panels side by side; maps, which are square and small, three in a row."""
    wide, high = (MAP, MAP) if isinstance(panels[0], Map) else (PANEL, HIGH)
    columns = 3 if isinstance(panels[0], Map) else len(panels)
    rows = -(-len(panels) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide * columns} {high * rows}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img" aria-label="{label}">',
        STYLE,
    ]
    for index, panel in enumerate(panels):
        at = f"{wide * (index % columns)} {high * (index // columns)}"
        drawn = _cells(panel) if isinstance(panel, Map) else _drawn(panel)
        parts += [f'<g transform="translate({at})">', *drawn, "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _cells(panel: Map) -> list[str]:
    """A cell for each share, the darker the larger, in SHADES steps up to the largest: one path a step."""
    most = max(map(max, panel.shares))
    side = (MAP - 2 * EDGE) / len(panel.shares)
    shades: dict[int, list[str]] = {}
    for row, shares in enumerate(panel.shares):
        for column, share in enumerate(shares):
            if shade := round(SHADES * share / most):
                corner = f"M{EDGE + column * side:.1f} {EDGE + row * side:.1f}"
                shades.setdefault(shade, []).append(f"{corner}h{side:.1f}v{side:.1f}h-{side:.1f}z")
    parts = [
        f'<text x="{EDGE}" y="{EDGE - 10}" font-size="14">{panel.title}</text>',
        f'<g class="{ARMS[panel.arm][0]}">',
    ]
    for shade, cells in sorted(shades.items()):
        parts.append(f'<path d="{"".join(cells)}" fill="currentColor" fill-opacity="{shade / SHADES:.2f}"/>')
    return [
        *parts, "</g>",
        f'<text x="{EDGE}" y="{MAP - EDGE + 16}" class="quiet">sources; darkest: {most:.1f} even shares</text>',
        f'<text transform="translate({EDGE - 8} {MAP - EDGE}) rotate(-90)" class="quiet">reads, the last below</text>',
    ]  # fmt: skip


def _drawn(panel: Panel) -> list[str]:
    xs = sorted({x for points in panel.points.values() for x in points})
    every = [y for points in panel.points.values() for ys in points.values() for y in ys]
    ticks = _ticks(min(every), max(every))
    place_x = _scale([math.log(x) if panel.log else x for x in (xs[0], xs[-1])], LEFT + 8, PANEL - RIGHT)
    place_y = _scale([ticks[0], ticks[-1]], FLOOR, TOP)

    def x(value: float) -> float:
        return place_x(math.log(value) if panel.log else value)

    parts = [f'<text x="{LEFT}" y="18" font-size="14">{panel.title}</text>']
    for tick in ticks:
        at = f"{place_y(tick):.1f}"
        parts.append(f'<line x1="{LEFT}" x2="{PANEL - RIGHT + 8}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at}" dy="4" text-anchor="end" class="quiet">{tick + 0.0:g}</text>')
    for value in xs if len(xs) < 8 else xs[:: len(xs) // 6]:
        parts.append(f'<text x="{x(value):.1f}" y="{FLOOR + 18}" text-anchor="middle" class="quiet">{value:g}</text>')
    middle = (LEFT + PANEL - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{FLOOR + 36}" text-anchor="middle" class="quiet">{panel.across}</text>')
    ends: list[float] = []
    for arm, points in sorted(panel.points.items(), key=lambda item: -statistics.fmean(item[1][max(item[1])])):
        colour, name = ARMS[arm]
        means = {value: statistics.fmean(ys) for value, ys in sorted(points.items())}
        line = " ".join(f"{x(value):.1f},{place_y(mean):.1f}" for value, mean in means.items())
        ends.append(max(place_y(means[max(means)]) + 4, ends[-1] + 13 if ends else 0))  # names do not overlap
        parts.append(
            f'<g class="{colour}"><polyline points="{line}" fill="none" stroke="currentColor" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{x(value):.1f}" cy="{place_y(y):.1f}" r="2.5" fill="currentColor" fill-opacity="0.6"/>'
            for value, ys in points.items()
            for y in ys
        ]
        parts.append(f'<text x="{PANEL - RIGHT + 12}" y="{ends[-1]:.1f}" class="named">{name}</text></g>')
    return parts


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
