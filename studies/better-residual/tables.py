"""Makes the table of a call from its archive: losses, and differences from Block seed by seed with their intervals.

    PYTHONPATH=. python studies/better-residual/tables.py runs/screening.tar.xz [--fresh]

`--fresh`: the seeds were not used to choose, so each interval stands for itself. Else it is widened for as many
comparisons as there are arms that are no baselines (Bonferroni), which is how the best of many is corrected for.
"""

import argparse
import json
import tarfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.runs.stats import Paired, minus, pair, summarize

BASELINES = ("standard", "block", "full", "muddformer")
Losses = dict[int, float | None]


@dataclass(frozen=True)
class Record:
    """A run that has a result; `evaluations` are its bits per byte by step."""

    arm: str
    size: str
    steps: int
    rate: float
    seed: int
    summary: dict[str, Any]
    evaluations: dict[int, float]

    @property
    def loss(self) -> float:
        return self.summary["bits_per_byte"]


def read_archive(path: Path) -> tuple[list[Record], list[str]]:
    """The runs that ended, and the names of the others."""
    texts: dict[str, dict[str, str]] = defaultdict(dict)
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                *_, run, name = member.name.split("/")
                texts[run][name] = file.read().decode(errors="replace")
    records, missing = [], []
    for run, files in sorted(texts.items()):
        if "summary.json" in files:
            records.append(record_of(run, files))
        else:
            missing.append(run)
    return records, missing


def record_of(run: str, files: dict[str, str]) -> Record:
    config = json.loads(files["config.json"])
    evaluations = {}
    for line in files["metrics.jsonl"].splitlines():
        values = json.loads(line)
        if values["kind"] == "eval":
            evaluations[values["step"]] = values["bits_per_byte"]
    return Record(
        arm=run.partition("-rate-")[0],
        size=f"width {config['model']['dim']}, {config['model']['layers']} layers",
        steps=config["train"]["steps"],
        rate=config["optim"]["lr"],
        seed=config["train"]["seed"],
        summary=json.loads(files["summary.json"]),
        evaluations=evaluations,
    )


def by_seed(records: list[Record], arm: str, step: int | None = None) -> Losses:
    """An arm's loss at the end, or at a step, by seed."""
    losses: Losses = {}
    for record in records:
        if record.arm == arm:
            losses[record.seed] = record.loss if step is None else record.evaluations.get(step)
    return losses


def difference(ours: Losses, theirs: Losses, comparisons: int) -> list[str]:
    """Mean, interval and verdict of ours less theirs."""
    values = pair(ours, theirs)
    if not values:
        return ["", "", ""]
    paired = Paired(values, comparisons)
    mean = minus(f"{paired.mean:+.4f}")
    if paired.interval is None:
        return [mean, "-", paired.verdict]
    low, high = paired.interval
    return [mean, minus(f"{low:+.4f} to {high:+.4f}"), paired.verdict]


def table(records: list[Record], fresh: bool) -> str:
    """The rows of runs that share size, steps and rate, the lowest loss first."""
    arms = {record.arm for record in records}
    comparisons = 1 if fresh else max(1, len(arms - {*BASELINES}))
    half = min(min(records[0].evaluations) * 2, records[0].steps)
    rows = []
    for arm in arms:
        losses = by_seed(records, arm)
        stat = summarize(list(losses.values()))
        assert stat is not None
        summaries = [record.summary for record in records if record.arm == arm]
        share = summaries[0]["residual_parameters"] / summaries[0]["parameters"]
        cells = [f"`{arm}`", str(stat.count), str(stat)]
        cells += difference(losses, by_seed(records, "block"), comparisons)
        cells += difference(losses, by_seed(records, "muddformer"), comparisons)[::2]
        early = by_seed(records, arm, half), by_seed(records, "block", half)
        cells += [difference(*early, comparisons)[0], f"{share:.1%}"]
        rows.append((stat.mean, cells))
    head = ["", "seeds", "bits per byte", "less Block's", f"95 % for all {comparisons}", ""]
    head += ["less MUDDFormer's", "", f"less Block's at step {half}", "parameters"]
    lines = [head, ["---"] * len(head), *(cells for _, cells in sorted(rows))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("archives", nargs="+", type=Path)
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    groups: dict[tuple[str, int, float], list[Record]] = defaultdict(list)
    missing: list[str] = []
    for archive in options.archives:
        records, left_out = read_archive(archive)
        missing += left_out
        for record in records:
            groups[record.size, record.steps, record.rate].append(record)
    for (size, steps, rate), records in sorted(groups.items()):
        print(f"{size}, {steps} steps, learning rate {rate:g}\n")
        print(table(records, options.fresh), "\n")
    if missing:
        print(f"Without a result: {', '.join(missing)}")


if __name__ == "__main__":
    main()
