"""Times as SVG. The stack's: `python -m benchmarks.plot RESULT.json... OUT.svg`; the first file with an arm counts.
Those of decoding are drawn by `benchmarks.tables`."""

import json
import sys
from pathlib import Path
from typing import Any

from headwater.analyze.plot import Line, Panel

ROW, LEFT, WIDTH = 34, 270, 720
STYLE = """<style>
text { fill: #222222 } .quiet { fill: #555555 }
@media (prefers-color-scheme: dark) { text { fill: #e2e2e2 } .quiet { fill: #b0b0b0 } }
</style>"""


def bars(results: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """List (label, forward ms, forward + backward ms) of each arm, the fastest first."""
    rows: dict[str, tuple[float, float]] = {}
    for result in results:
        for arm in result.get("stack", {}).get("arms", []):
            if "both" in arm:
                rows.setdefault(arm["arm"], (arm["forward"]["ms"], arm["both"]["ms"]))
    return sorted(((label, *times) for label, times in rows.items()), key=lambda row: row[2])


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
        light, dark = ("#94c0dd", "#1a609c") if "headwater" in label else ("#c9cdd3", "#8a919c")
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end">{label}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{both * scale:.1f}" height="24" fill="{light}"/>',
            f'<rect x="{LEFT}" y="{y}" width="{forward * scale:.1f}" height="24" fill="{dark}"/>',
            f'<text x="{LEFT + both * scale + 8:.1f}" y="{y + 17}">{both:.1f} ms</text>',
        ]
    note = "dark: forward; light: forward + backward"
    parts += [
        f'<text x="{LEFT}" y="{height - 10}" class="quiet" font-size="12">{note}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


LINES = {"plain": "plain", "block": "Block", "full": "Full"}  # names by arm, which is their colour


def panel_of(title: str, across: str, results: dict[str, Any]) -> Panel:
    """Milliseconds, of a part of `benchmarks.generate`, whose entries end in a number that doubles."""
    rows = {int(name.split()[-1]): arms for name, arms in results.items() if isinstance(arms, dict)}
    lines = [
        Line(name, arm, {number: [arms[arm]["ms"]] for number, arms in rows.items()})
        for arm, name in LINES.items()
    ]
    return Panel(title, across, lines, log=True, zero=True, label=_thousands)


def _thousands(number: float) -> str:
    return f"{number / 1024:g}k" if number >= 1024 else f"{number:g}"


def main() -> None:
    *sources, target = sys.argv[1:]
    Path(target).write_text(svg(bars([json.loads(Path(source).read_text()) for source in sources])))


if __name__ == "__main__":
    main()
