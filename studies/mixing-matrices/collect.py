"""The last mixing matrix of every run of a comparison: `python studies/mixing-matrices/collect.py FOLDER`.

Matrices of residuals that the comparison has not stay as they are.
"""

import json
import sys
from pathlib import Path

OUT = Path(__file__).parent / "results.json"


def last_depth(run: Path) -> dict:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "depth"][-1]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    runs = {
        run.name.rpartition("-seed")[0]: last_depth(run)
        for run in sorted((folder / "runs").iterdir())
    }
    first = next(iter(runs.values()))
    matrices = {
        name: [[round(value, 4) for value in row] for row in record["mixing"]]
        for name, record in runs.items()
    }
    matrices = {**json.loads(OUT.read_text())["matrices"], **matrices}
    found = {"steps": first["step"], "sublayers": first["sublayers"], "matrices": matrices}
    OUT.write_text(json.dumps(found, separators=(",", ":")) + "\n")
