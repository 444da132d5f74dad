"""Times as SVG. The stack's: `python -m benchmarks.plot RESULT.json... OUT.svg`; the first file with an arm counts.
Those of decoding are drawn by `benchmarks.tables`."""

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROW, LEFT, WIDTH = 34, 220, 720


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
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for index, (label, forward, both) in enumerate(rows):
        y = 8 + ROW * index
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end" fill="#222222">{label}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{both * scale:.1f}" height="24" fill="#9ec5e8"/>',
            f'<rect x="{LEFT}" y="{y}" width="{forward * scale:.1f}" height="24" fill="#2b6ca3"/>',
            f'<text x="{LEFT + both * scale + 8:.1f}" y="{y + 17}" fill="#222222">{both:.1f} ms</text>',
        ]
    note = "dark: forward; light: forward + backward"
    parts += [f'<text x="{LEFT}" y="{height - 10}" fill="#555555" font-size="12">{note}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


PANEL, HIGH, MARGIN = 360, 250, 46
LINES = {"plain": ("plain", "#777777"), "block": ("Block", "#2b6ca3"), "full": ("Full", "#d98e32")}


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
        f'<rect width="{width}" height="{HIGH + 20}" fill="#ffffff"/>',
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

    parts = [f'<text x="{MARGIN}" y="20" font-size="14" fill="#222222">{panel.title}</text>']
    for tick in range(math.floor(top) + 1):
        parts += [
            f'<line x1="{MARGIN}" x2="{PANEL - MARGIN}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#dddddd"/>',
            f'<text x="{MARGIN - 8}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="#555555">{tick}</text>',
        ]
    for number in panel.numbers:
        shown = f"{number // 1024}k" if number >= 1024 else str(number)
        parts.append(f'<text x="{x(number):.1f}" y="{floor + 18}" text-anchor="middle" fill="#555555">{shown}</text>')
    ends: list[float] = []
    for arm, times in sorted(panel.times.items(), key=lambda item: -item[1][-1]):
        name, colour = LINES[arm]
        points = " ".join(f"{x(number):.1f},{y(ms):.1f}" for number, ms in zip(panel.numbers, times))
        ends.append(max(y(times[-1]) + 4, ends[-1] + 13 if ends else 0))  # names do not overlap
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
            *(
                f'<circle cx="{x(number):.1f}" cy="{y(ms):.1f}" r="3" fill="{colour}"/>'
                for number, ms in zip(panel.numbers, times)
            ),
            f'<text x="{PANEL - MARGIN + 6}" y="{ends[-1]:.1f}" fill="{colour}">{name}</text>',
        ]
    return parts


def main() -> None:
    *sources, target = sys.argv[1:]
    Path(target).write_text(svg(bars([json.loads(Path(source).read_text()) for source in sources])))


if __name__ == "__main__":
    main()
