"""Times as SVG. The stack's: `python -m benchmarks.plot RESULT.json... OUT.svg`; the first file with an arm counts.
Those of decoding are drawn by `benchmarks.tables`."""

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROW, LEFT, WIDTH = 34, 220, 720
# Without a ground of its own: a page may be dark, and its pictures are then asked for in dark.
STYLE = """<style>
text { fill: #222222 } .quiet { fill: #555555 } line { stroke: #dddddd } .named { fill: currentColor }
.plain { color: #6b6b6b } .block { color: #2b6ca3 } .full { color: #b3690f }
@media (prefers-color-scheme: dark) {
text { fill: #e2e2e2 } .quiet { fill: #b0b0b0 } line { stroke: #4a4d57 }
.plain { color: #a8a8a8 } .block { color: #74b3e8 } .full { color: #e5a04b }
}
</style>"""


def bars(results: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(label, forward ms, forward + backward ms) per arm: medians with the host in the loop, and graph replays."""
    rows: dict[str, tuple[float, float]] = {}
    for arm in (arm for result in results for arm in result.get("stack", {}).get("arms", []) if "both" in arm):
        rows.setdefault(arm["arm"], (arm["forward"]["ms"], arm["both"]["ms"]))
        if "forward_graph" in arm:
            rows.setdefault(f"{arm['arm']}, CUDA graph", (arm["forward_graph"]["ms"], arm["both_graph"]["ms"]))
    return [(label, *times) for label, times in rows.items()]


def svg(rows: list[tuple[str, float, float]]) -> str:
    longest = max(both for _, _, both in rows)
    scale = (WIDTH - LEFT - 90) / longest
    height = ROW * len(rows) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" '
        'font-size="14" role="img" aria-label="Milliseconds per step, forward and forward plus backward">',
        STYLE,
    ]
    for index, (label, forward, both) in enumerate(rows):
        y = 8 + ROW * index
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end">{label}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{both * scale:.1f}" height="24" fill="#9ec5e8"/>',
            f'<rect x="{LEFT}" y="{y}" width="{forward * scale:.1f}" height="24" fill="#2b6ca3"/>',
            f'<text x="{LEFT + both * scale + 8:.1f}" y="{y + 17}">{both:.1f} ms</text>',
        ]
    note = "dark: forward; light: forward + backward"
    parts += [f'<text x="{LEFT}" y="{height - 10}" class="quiet" font-size="12">{note}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


PANEL, HIGH, MARGIN = 360, 250, 46
LINES = {"plain": "plain", "block": "Block", "full": "Full"}  # names by arm, which is their colour in STYLE


class Panel(NamedTuple):
    """Milliseconds of each arm by a number that doubles: title, numbers, and of each arm as many times."""

    title: str
    numbers: list[int]
    times: dict[str, list[float]]


def panel_of(title: str, found: dict[str, Any]) -> Panel:
    """Of a part of `benchmarks.generate`, whose entries end in the number."""
    rows = {int(name.split()[-1]): arms for name, arms in found.items() if isinstance(arms, dict)}
    return Panel(title, list(rows), {arm: [arms[arm]["ms"] for arms in rows.values()] for arm in LINES})


def lines(panels: list[Panel], label: str) -> str:
    """Panels side by side, each from zero to its own highest time."""
    width = PANEL * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HIGH + 20}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img" aria-label="{label}">',
        STYLE,
    ]
    for index, panel in enumerate(panels):
        parts += [f'<g transform="translate({PANEL * index} 0)">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel) -> list[str]:
    first, last = (math.log2(number) for number in (panel.numbers[0], panel.numbers[-1]))
    top = max(max(times) for times in panel.times.values()) * 1.05
    floor, span = HIGH - 30, PANEL - 2 * MARGIN

    def x(number: int) -> float:
        return MARGIN + span * (math.log2(number) - first) / (last - first)

    def y(ms: float) -> float:
        return floor - (floor - 34) * ms / top

    parts = [f'<text x="{MARGIN}" y="20" font-size="14">{panel.title}</text>']
    for tick in range(math.floor(top) + 1):
        parts += [
            f'<line x1="{MARGIN}" x2="{PANEL - MARGIN}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>',
            f'<text x="{MARGIN - 8}" y="{y(tick) + 4:.1f}" text-anchor="end" class="quiet">{tick}</text>',
        ]
    for number in panel.numbers:
        shown = f"{number // 1024}k" if number >= 1024 else str(number)
        parts.append(f'<text x="{x(number):.1f}" y="{floor + 18}" text-anchor="middle" class="quiet">{shown}</text>')
    ends: list[float] = []
    for arm, times in sorted(panel.times.items(), key=lambda item: -item[1][-1]):
        points = " ".join(f"{x(number):.1f},{y(ms):.1f}" for number, ms in zip(panel.numbers, times))
        ends.append(max(y(times[-1]) + 4, ends[-1] + 13 if ends else 0))  # names do not overlap
        parts += [
            f'<g class="{arm}"><polyline points="{points}" fill="none" stroke="currentColor" stroke-width="2"/>',
            *(
                f'<circle cx="{x(number):.1f}" cy="{y(ms):.1f}" r="3" fill="currentColor"/>'
                for number, ms in zip(panel.numbers, times)
            ),
            f'<text x="{PANEL - MARGIN + 6}" y="{ends[-1]:.1f}" class="named">{LINES[arm]}</text></g>',
        ]
    return parts


def main() -> None:
    *sources, target = sys.argv[1:]
    Path(target).write_text(svg(bars([json.loads(Path(source).read_text()) for source in sources])))


if __name__ == "__main__":
    main()
