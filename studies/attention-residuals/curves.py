"""Loss against compute and against time: what an arm is worth at each of the plain residual's budgets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from records import (
    BASELINE,
    HERE,
    RULE,
    Runs,
    at_step,
    by_seed,
    finished,
    grid,
    grouped,
    score,
    setting,
    signed,
    taken,
)
from tables import beside_plain, between

from headwater.analyze.scaling import Interval, Scaling, compare_scaling
from headwater.analyze.scaling_points import operations, points_of
from headwater.analyze.scaling_report import shown
from headwater.models.config import SIZES
from headwater.runs.record import RecordedRun
from headwater.runs.stats import Paired, pair, summarize

TEXT = 102_435_696  # tokens of the training text
FULL = "attnres-full"
LEADS = (1000, 2000, 4000, 8000)  # steps at which every size that has as many was evaluated
NO_CURVES = "The curves need a third size.\n"


def scaling(runs: Runs) -> str:
    """The arms at each size."""
    tables = []
    for (width, layers), group in grouped(runs, "model.dim", "model.layers").items():
        own = {run.residual: f"{setting(run, 'optim.lr'):g}" for run in group}
        common = own.get(BASELINE, "")
        apart = [f", {rate} of `{arm}`" for arm, rate in own.items() if rate != common]
        words = f"Width {width}, {layers} layers, learning rate {common}{''.join(apart)}"
        tables.append(f"{words}:\n\n{beside_plain(group)}")
    return "\n".join(tables)


def beside_full(runs: Runs) -> str:
    """What other arms are from Full, seed by seed, where two seeds or more have both."""
    rows = []
    for (width,), group in grouped(runs, "model.dim").items():
        arms = {arm: by_seed(found) for (arm,), found in grouped(group, "model.residual").items()}
        for arm, scores in arms.items():
            differences = pair(scores, arms.get(FULL, {})) if arm not in (BASELINE, FULL) else ()
            if len(differences) > 1:
                found = Paired(differences)
                cells = [
                    str(len(differences)),
                    signed(found.mean),
                    between(found.interval),
                    found.verdict,
                ]
                rows.append([str(width), f"`{arm}`", *cells])
    return grid(["width", "", "seeds", "difference", "95 % interval, not corrected", ""], rows)


def lead(runs: Runs) -> str:
    """What arms are from the plain residual as training goes on: mean and spread over the seeds that have both."""
    rows = []
    for (width,), group in grouped(runs, "model.dim").items():
        arms = {arm: found for (arm,), found in grouped(group, "model.residual").items()}
        plain = arms.pop(BASELINE, [])
        for arm, mine in arms.items():
            apart = [
                pair(*({run.seed: at_step(run, step) for run in some} for some in (mine, plain)))
                for step in LEADS
            ]
            apart.append(pair(by_seed(mine), by_seed(plain)))
            if apart[-1]:
                stats = [Paired(found).stat if found else None for found in apart]
                cells = ["" if stat is None else stat.text(sign="+") for stat in stats]
                rows.append([str(width), f"`{arm}`", str(len(apart[-1])), *cells])
    return grid(["width", "", "seeds", *(f"step {step}" for step in LEADS), "end"], rows)


def sizes(found: dict[str, Runs]) -> str:
    """What the plain residual's runs of the scaling are, by size."""
    plain = [run for run in finished(taken("scaling", found)) if run.residual == BASELINE]
    rows = []
    for (width, layers), group in grouped(plain, "model.dim", "model.layers").items():
        tokens, steps, parameters = (
            group[0].summary[key] for key in ("tokens", "steps", "parameters")
        )  # type: ignore[index]
        # Between embedding and head
        inner = parameters - 2 * width * setting(group[0], "model.vocab_size")
        told = [
            f"{tokens / 1e6:.0f} million",
            f"{tokens / inner:.0f}",
            f"{tokens / TEXT:.1f}",
            f"{RULE[width]:g}",
        ]
        rows.append([million(width), str(width), str(layers), str(steps), *told])
    head = [
        "parameters",
        "width",
        "layers",
        "steps",
        "tokens",
        "a parameter",
        "passes over the text",
        "learning rate",
    ]
    return grid(head, rows)


def million(width: int) -> str:
    """The parameters that a size is named by."""
    named = {shape["dim"]: name for name, shape in SIZES.items() if name.startswith("ladder")}
    return f"{named[width].removeprefix('ladder-').removesuffix('m')} million"


Cost = Callable[[RecordedRun], float | None]
# By their points: a table and a picture show the same curves
COMPARED: dict[str, list[Scaling]] = {}


def curves(runs: Runs, cost: Cost = operations, base: str = BASELINE) -> list[Scaling]:
    """Of the arms that have run at three sizes or more; none, unless the base has."""
    points = {arm: at for arm, at in points_of(runs, cost=cost).items() if len(at) > 2}
    if base not in points:
        return []
    key = repr((base, points))
    if key not in COMPARED:
        COMPARED[key] = compare_scaling(points, base)
    return COMPARED[key]


def fits(runs: Runs, cost: Cost = operations, base: str = BASELINE) -> str:
    """What each arm is worth at the base's budgets, and beside the plain residual its curve."""
    found = curves(runs, cost, base)
    if not found:
        return ""
    budgets = sorted({c for curve in found for c in curve.multipliers})
    rows, width = [], len(budgets) + (2 if base == BASELINE else 1)
    for curve in found:
        assert curve.fit is not None  # points at two budgets are left out before
        law = f"{curve.fit.floor:.3f} + {curve.fit.scale:.3f} (C / {curve.fit.unit:.2g})^−{curve.fit.alpha:.3f}"
        saved = [
            _multiplier(curve.multipliers.get(c)) if curve.residual != base else "1"
            for c in budgets
        ]
        rows.append([f"`{curve.residual}`", *saved, law][:width])
    return grid(["", *(f"at {shown(c)}" for c in budgets), "bits per byte"][:width], rows)


def missed(runs: Runs) -> str:
    """How far means lie from their curves, where a curve has more points than numbers."""
    above = {curve.residual: curve.above for curve in curves(runs)}
    budgets = [*above.get(BASELINE, ())]
    if len(budgets) < 4:
        return ""
    rows = [
        [f"`{arm}`", *map(signed, off.values())]
        for arm, off in above.items()
        if len(off) == len(budgets)
    ]
    return grid(["", *(f"at {shown(c)}" for c in budgets)], rows)


def without_a_size(runs: Runs, cost: Cost = operations) -> str:
    """How far the curves hang on the largest and on the smallest size."""
    widths = sorted({setting(run, "model.dim") for run in runs})
    tables = []
    for left_out in (widths[-1], widths[0]):
        if fitted := fits([run for run in runs if setting(run, "model.dim") != left_out], cost):
            tables.append(f"Without width {left_out}:\n\n{fitted}")
    return "\n".join(tables) if len(widths) > 3 else ""


def _multiplier(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    reach = "one seed" if interval.low is None else f"{interval.low:.2f} to {interval.high:.2f}"
    return f"{interval.value:.2f} ({reach})"


def alone(speeds: dict[str, Any]) -> dict[tuple[int, str], dict[str, float]]:
    """What `benchmarks.speed` measured of each arm, by width: runs side by side do not know how fast they are."""
    return {
        (SIZES[size]["dim"], arm): found
        for size, arms in speeds.items()
        for arm, found in arms.items()
    }


def seconds(measured: dict[tuple[int, str], dict[str, float]]) -> Cost:
    """How long a run takes by itself, where its speed was measured."""

    def of(run: RecordedRun) -> float | None:
        speed = measured.get((setting(run, "model.dim"), run.residual))
        return (
            None
            if speed is None or not run.summary
            else run.summary["tokens"] / speed["tokens_per_second"]
        )

    return of


def clock(runs: Runs, speeds: dict[str, Any]) -> str:
    """Speed and memory of each arm at each size."""
    measured = alone(speeds)
    cost, rows = seconds(measured), []
    trained = grouped(runs, "model.dim", "model.residual")
    for (width, arm), speed in sorted(
        measured.items(), key=lambda item: (item[0][0], item[0][1] != BASELINE, item[0][1])
    ):
        plain, mine = measured.get((width, BASELINE)), speed["tokens_per_second"]
        share = "-" if plain is None else f"{100 * mine / plain['tokens_per_second']:.0f} %"
        cells = [f"{mine / 1e3:.0f}", share, f"{speed['peak_gib']:.1f}"]
        group = trained.get((width, arm), [])
        ends = (
            [f"{cost(group[0]):.0f}", str(summarize([*map(score, group)]))] if group else ["-", "-"]
        )
        rows.append([str(width), f"`{arm}`", *cells, *ends])
    head = [
        "width",
        "",
        "thousand tokens per second",
        "of plain",
        "GiB",
        "seconds of a run",
        "bits per byte",
    ]
    return grid(head, rows)


def clocked(runs: Runs, speeds: dict[str, Any]) -> str:
    """What arms are worth at equal time, from three sizes on."""
    cost = seconds(alone(speeds))
    timed = [run for run in runs if cost(run) is not None]
    return "\n".join(filter(None, (fits(timed, cost), without_a_size(timed, cost)))) or NO_CURVES


def worth(runs: Runs, speeds: dict[str, Any]) -> str:
    """What arms with a curve are worth in compute and in time at the sizes between the ends, where curves are surest;
    bold where an interval tells it from one."""
    clocked = seconds(alone(speeds))
    timed = [run for run in runs if clocked(run) is not None]
    found = [("compute", operations, curves(runs)), ("time", clocked, curves(timed, clocked))]
    if not found[0][2]:
        return NO_CURVES
    seeds = {
        (width, arm): len(some)
        for (width, arm), some in grouped(runs, "model.dim", "model.residual").items()
    }
    widths = sorted({width for width, _ in seeds})
    head, columns = ["95 % intervals, not corrected", "seeds"], []
    for width in widths[1:-1]:
        plain = next(
            run for run in runs if run.residual == BASELINE and setting(run, "model.dim") == width
        )
        for words, cost, fitted in found:
            head.append(f"{words}, {million(width)}")
            columns.append(
                {
                    curve.residual: _told(curve.multipliers.get(cost(plain) or 0.0))
                    for curve in fitted
                }
            )
    arms = [curve.residual for curve in found[0][2] if curve.residual != BASELINE]
    counts = {arm: ", ".join(str(seeds.get((width, arm), 0)) for width in widths) for arm in arms}
    return grid(
        head,
        [[f"`{arm}`", counts[arm], *(column.get(arm, "-") for column in columns)] for arm in arms],
    )


def _told(interval: Interval | None) -> str:
    if (
        interval is None
        or interval.low is None
        or interval.high is None
        or interval.low <= 1 <= interval.high
    ):
        return _multiplier(interval)
    value, reach = _multiplier(interval).split(" ", 1)
    return f"**{value}** {reach}"


def speeds(folder: Path = HERE / "runs" / "speed") -> dict[str, Any]:
    """Of each size the arms that ran. One that a later process adds is as fast beside the plain residual as it was
    there: clocks of GPUs differ."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.json")):
        for size, arms in json.loads(file.read_text()).items():
            if size in SIZES:
                ran = {arm: each for arm, each in arms.items() if "tokens_per_second" in each}
                before = found.get(size, ran)
                scale = before[BASELINE]["tokens_per_second"] / ran[BASELINE]["tokens_per_second"]
                more = {
                    arm: {**each, "tokens_per_second": scale * each["tokens_per_second"]}
                    for arm, each in ran.items()
                }
                found[size] = more | before
    return found
