"""How far runs of the same settings differ, and when the sudden drop of the loss comes."""

import math
import statistics
from collections import defaultdict
from typing import Any

from records import (
    EARLY,
    LATER,
    STEPS,
    Runs,
    at_step,
    coloured,
    finished,
    grid,
    grouped,
    score,
    setting,
)
from tables import FACTOR, arm_of, by_name

from headwater.runs.record import RecordedRun
from headwater.runs.stats import summarize

NEAR_BEST = (8e-3, 1.1e-2, 1.6e-2)  # learning rates of the smallest size
FALL = 0.13  # from EARLY to LATER: more than most


def onset(found: dict[str, Runs]) -> str:
    """Who falls early, over all recipes: arms of the smallest size, near the best rates and with the steps of the
    scaling, that have run three times."""
    runs = [run for some in found.values() for run in finished(some)]
    chosen = [
        run
        for run in runs
        if (setting(run, "model.dim"), setting(run, "model.layers")) == (128, 12)
        and setting(run, "optim.lr") in NEAR_BEST
        and setting(run, "train.steps") == STEPS
        and (setting(run, FACTOR) == 0.1 or not run.residual.startswith("attnres"))
    ]
    rows = []
    for arm, group in by_name(chosen).items():
        cases = [
            (first, first - later, score(run))
            for run in group
            if (first := at_step(run, EARLY)) and (later := at_step(run, LATER))
        ]
        if len(cases) > 2:
            ends = [
                summarize([end for _, fall, end in cases if (fall > FALL) == early])
                for early in (True, False)
            ]
            stat = summarize([first for first, _, _ in cases])
            assert stat is not None
            fallen = 0 if ends[0] is None else ends[0].count
            cells = [str(len(cases)), str(stat), str(fallen), *(str(end or "-") for end in ends)]
            rows.append((stat.mean, [f"`{arm}`", *cells]))
    head = ["", "runs", f"step {EARLY}", f"fallen by {LATER}", "their end", "end of the others"]
    return grid(head, [row for _, row in sorted(rows)])


def again(found: dict[str, Runs]) -> str:
    """Settings and seeds that several recipes have run: what one run differs from itself by, where rounding is another.
    Beside it what seeds differ by, in means over the repeats of each."""
    runs = [run for some in found.values() for run in finished(some)]
    rows = []
    for key, group in grouped(
        runs, "model.dim", "model.layers", "optim.lr", "model.residual"
    ).items():
        repeated = [[*map(score, some)] for some in made_again(group)]
        if repeated:
            freedom = sum(len(scores) - 1 for scores in repeated)
            squares = sum((len(scores) - 1) * statistics.variance(scores) for scores in repeated)
            most = max(max(scores) - min(scores) for scores in repeated)
            means = [statistics.fmean(scores) for scores in repeated]
            seeds = f"{statistics.stdev(means):.4f}" if len(means) > 1 else "-"
            counts = [str(len(repeated)), str(freedom + len(repeated))]
            cells = [
                f"{math.sqrt(squares / freedom):.4f}",
                f"{most:.4f}",
                seeds,
                f"{statistics.fmean(means):.4f}",
            ]
            rows.append([str(key[0]), f"{key[2]:g}", f"`{key[3]}`", *counts, *cells])
    head = [
        "width",
        "rate",
        "",
        "seeds",
        "runs",
        "deviation of repeats",
        "at most",
        "of the seeds' means",
        "mean",
    ]
    return grid(head, rows)


def made_again(runs: Runs) -> list[Runs]:
    """Of runs with one size, learning rate and residual, those that share all other settings and the seed."""
    alike: dict[tuple[Any, ...], Runs] = defaultdict(list)
    for run in runs:
        factor = setting(run, FACTOR) if run.residual.startswith("attnres") else None
        around = (arm_of(run), setting(run, "optim.optimizer"), setting(run, "train.steps"), factor)
        alike[*around, run.seed].append(run)
    return [some for some in alike.values() if len(some) > 1]


def repeats(found: dict[str, Runs]) -> str:
    """Each run of the first three arms that was made again, by version of the code, which the GPU's memory tells: each
    version needs less than the one before."""
    runs = [run for some in found.values() for run in coloured(some)]
    rows = []
    for key, group in grouped(
        runs, "model.dim", "model.layers", "optim.lr", "model.residual"
    ).items():
        for some in made_again(group):
            for memory, run in sorted(
                ((_memory(run), run) for run in some), key=lambda pair: -pair[0]
            ):
                scores = (at_step(run, EARLY), at_step(run, LATER), score(run))
                cells = [
                    f"{memory:.0f}",
                    *("-" if value is None else f"{value:.4f}" for value in scores),
                ]
                rows.append([f"{key[2]:g}", f"`{key[3]}`", str(run.seed), *cells])
    return grid(
        ["rate", "", "seed", "million bytes", f"step {EARLY}", f"step {LATER}", "end"], rows
    )


def _memory(run: RecordedRun) -> float:
    assert run.summary is not None
    return float(run.summary["peak_memory_bytes"]) / 1e6
