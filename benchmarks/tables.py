"""The table of costs in docs/residuals.md, from benchmarks/results: `python -m benchmarks.tables`."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "residuals.md"
RATIOS = ("eager_over_straightforward", "compiled_over_straightforward")
MARKS = re.compile("(?<=<!-- cost:begin -->\n).*?(?=<!-- cost:end -->)", re.DOTALL)
COLUMNS = (
    "residual",
    "CPU time",
    "memory",
    "H200 time",
    "memory",
    "CPU, eager / formula",
    "compiled / formula",
    "H200, eager / formula",
    "compiled / formula",
)
HEAD = f"""\
Steps relative to `standard` at 12 layers, eager, on two cores (`cpu-residuals.json`) and on one H200 with products in
bf16 and the stream in fp32 (`h200-residuals.json`); then relative to the compiled formula, at 2 layers on the CPU (and
`cpu-residuals-rest.json`) and at 3 on the H200 (`h200-residuals-rule.json`). Dashes: on the H200, 19 processes compiled
on 16 cores, and these were not ready after 85 seconds.

| {" | ".join(COLUMNS)} |
|{"---|" * len(COLUMNS)}
"""


def summary(*files: str) -> dict[str, dict[str, Any]]:
    """By residual; of several files the first that has a number gives it."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        for row in json.loads((ROOT / "benchmarks" / "results" / file).read_text())["summary"]:
            found[row["residual"]] = row | found.get(row["residual"], {})
    return found


def table() -> str:
    cpu, gpu = summary("cpu-residuals.json", "cpu-residuals-rest.json"), summary("h200-residuals.json")
    rule = summary("h200-residuals-rule.json")
    lines = []
    for name in cpu:
        cells = [side[name].get(key) for side in (cpu, gpu) for key in ("eager_time", "eager_memory")]
        cells += [side.get(name, {}).get(key) for side in (cpu, rule) for key in RATIOS]
        lines.append(" | ".join([f"| `{name}`", *("-" if cell is None else f"{cell:.2f}" for cell in cells)]) + " |\n")
    return HEAD + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(MARKS.sub(lambda _: table(), PAGE.read_text()))
