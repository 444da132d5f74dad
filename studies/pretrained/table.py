"""Print the table of the trained models from runs.jsonl, and which rates the first seed chooses.

    PYTHONPATH=. python studies/pretrained/table.py RUNS

RUNS is the runs.jsonl that train.py writes, a line for each run.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from headwater.runs.stats import Paired, judge, summarize

CHOOSING = 0  # the seed that chooses rates, and is not counted afterwards
TEXTS = ("prose", "code")


def mean_loss(run: dict[str, Any]) -> float:
    return statistics.fmean(run["after"][text] for text in TEXTS)


def choices(runs: list[dict[str, Any]]) -> list[str]:
    rows = ["| arm | rate | factor | mean held-out loss |", "|---|---|---|---|"]
    chosen = [run for run in runs if run["seed"] == CHOOSING]
    for run in sorted(chosen, key=lambda run: (run["arm"], mean_loss(run))):
        rows.append(
            f"| {run['arm']} | {run['rate']:g} | {run['factor']:g} | {mean_loss(run):.4f} |"
        )
    return rows


def results(runs: list[dict[str, Any]]) -> list[str]:
    losses: dict[str, dict[int, float]] = {}
    parts: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        if run["seed"] == CHOOSING:
            continue
        losses.setdefault(run["arm"], {})[run["seed"]] = mean_loss(run)
        for text in TEXTS:
            parts.setdefault(run["arm"], {}).setdefault(text, []).append(run["after"][text])
    verdicts = judge(losses, dict.fromkeys(losses, "plain")) if "plain" in losses else {}
    rows = ["| arm | prose | code | less plain, 95 % | verdict |", "|---|---|---|---|---|"]
    for arm, texts in parts.items():
        cells = [str(summarize(texts[text])) for text in TEXTS]
        rows.append(f"| {arm} | {' | '.join(cells)} | {difference(verdicts.get(arm))} |")
    return rows


def difference(paired: Paired | None) -> str:
    if paired is None:
        return " | "
    half = "" if paired.half_width is None else f" ± {paired.half_width:.4f}"
    return f"{paired.mean:+.4f}{half} | {paired.verdict}"


def main() -> None:
    runs = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    print("\n".join(["Seed 0, which chooses:", "", *choices(runs), ""]))
    print("\n".join(["All other seeds, nats per token:", "", *results(runs)]))


if __name__ == "__main__":
    main()
