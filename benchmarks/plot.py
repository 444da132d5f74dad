"""The stack's times as SVG: `python -m benchmarks.plot RESULT.json... OUT.svg`; the first file with an arm counts."""

import json
import sys
from pathlib import Path
from typing import Any

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


def main() -> None:
    *sources, target = sys.argv[1:]
    Path(target).write_text(svg(bars([json.loads(Path(source).read_text()) for source in sources])))


if __name__ == "__main__":
    main()
