"""The page's figures."""

import statistics
from pathlib import Path
from typing import Any

from curves import alone, curves, seconds, speeds
from records import (
    BASELINE,
    EARLY,
    HERE,
    MAPPED,
    RULE,
    Runs,
    by_seed,
    coloured,
    finished,
    grouped,
    score,
    setting,
    taken,
)
from tables import BY_DEPTH

from headwater.analyze.plot import ARMS, Line, Map, Panel, colours_of, lines_of, picture
from headwater.analyze.scaling_report import panels_of
from headwater.runs.stats import pair

ASSETS = HERE.parent.parent / "docs" / "assets"


def pictures(found: dict[str, Runs]) -> dict[Path, str]:
    """By the file that each is drawn to: the sweep of rates by width, and numbers by depth, of arms that have a
    colour."""
    drawn, panels = {}, []
    for (width,), runs in grouped(coloured(found.get("rates", [])), "model.dim").items():
        for words, points in (("bits per byte", _points), ("less the plain residual", _less_plain)):
            lines = lines_of(points(runs, "optim.lr"))
            panels.append(Panel(f"{words}, width {width}", "learning rate", lines, log=True))
    if panels:
        drawn[ASSETS / "study-rates.svg"] = picture(panels, "Bits per byte by learning rate")
    drawn |= scaling_pictures(finished(taken("scaling", found)), speeds())
    if panels := drops(found):
        drawn[ASSETS / "study-drop.svg"] = picture(
            panels, "Training loss of six seeds, less that of a lower rate"
        )
    recorded = [run for run in coloured(found.get("dynamics", [])) if run.depth]
    panels = [
        Panel(f"{words}, {layers} layers", "layer", lines_of(_depths(runs, key)))
        for words, key in BY_DEPTH
        for (layers,), runs in grouped(recorded, "model.layers").items()
    ]
    if panels:
        drawn[ASSETS / "study-depth.svg"] = picture(panels, "Magnitudes and gradients by depth")
    mapped = [run for run in finished(found.get("rates", [])) if setting(run, "optim.lr") == MAPPED]
    for name, runs in (("study-maps", mapped), ("study-maps-deep", recorded)):
        if maps := maps_of(runs):
            drawn[ASSETS / f"{name}.svg"] = picture(maps, "Depth weights through training")
    return drawn


def drops(found: dict[str, Runs]) -> list[Panel]:
    """Training losses of the smallest size at the rate of the scaling, less those of the plain residual at a lower one,
    which saw the same text in the same step: a line for each seed, over three records at a time."""
    plain = [run for run in finished(found.get("noise", [])) if run.residual == BASELINE]
    beside = {run.seed: {row["step"]: row["loss"] for row in run.train} for run in plain}
    chosen = [
        run for run in coloured(found.get("rates", [])) if setting(run, "optim.lr") == RULE[128]
    ]
    panels = []
    for (arm,), runs in grouped(
        [run for run in chosen if run.seed in beside], "model.residual"
    ).items():
        colour, name = ARMS[arm]
        lines = []
        for run in runs:
            less = [(row["step"], row["loss"] - beside[run.seed][row["step"]]) for row in run.train]
            late = [(step, value) for step, value in less if step >= EARLY - 200]
            means = {
                late[n][0]: [statistics.fmean(v for _, v in late[n - 1 : n + 2])]
                for n in range(1, len(late) - 1)
            }
            lines.append(Line(f"seed {run.seed}", colour, means))
        panels.append(Panel(f"{name}: nats, less plain at 0.003", "step", lines))
    return panels


def scaling_pictures(runs: Runs, speeds: dict[str, Any]) -> dict[Path, str]:
    """Loss against operations; against seconds, and against memory."""
    drawn, measured = {}, alone(speeds)
    if found := curves(runs):
        _, saved = panels_of(found, BASELINE)
        panels = [leads(runs, [curve.residual for curve in found]), saved]
        drawn[ASSETS / "study-scaling.svg"] = picture(panels, "Leads and compute saved, by size")
    timed = [run for run in runs if seconds(measured)(run) is not None]
    if found := curves(timed, seconds(measured)):
        held: dict[str, dict[float, list[float]]] = {}
        for (width, arm), group in grouped(timed, "model.dim", "model.residual").items():
            held.setdefault(arm, {})[measured[width, arm]["peak_gib"]] = [*map(score, group)]
        curved = [curve.residual for curve in found]
        # As in the panels before
        colours = colours_of([*curved, *(arm for arm in held if arm not in curved)])
        lines = [Line(arm, colours[arm], at) for arm, at in held.items()]
        memory = Panel("bits per byte", "GiB", lines, log=True, label="{:.1f}".format)
        panels = [*panels_of(found, BASELINE, "seconds"), memory]
        drawn[ASSETS / "study-clock.svg"] = picture(panels, "Loss against time and memory")
    return drawn


def leads(runs: Runs, arms: list[str]) -> Panel:
    """Draw each arm's difference from the plain residual by width: curves of loss lie on top of each other."""
    points, colours = _less_plain(runs, "model.dim"), colours_of(arms)
    lines = [Line(arm, colours[arm], points[arm]) for arm in arms if points.get(arm)]
    return Panel("bits per byte, less the plain residual", "width", lines, log=True)


def maps_of(runs: Runs) -> list[Map]:
    """The depth weights of the smallest width's arms whenever they were recorded, the mean over seeds, in even
    shares."""
    smallest = min((setting(run, "model.dim") for run in runs), default=0)
    chosen = [run for run in runs if run.residual in ARMS and run.residual != BASELINE]
    chosen = [run for run in chosen if setting(run, "model.dim") == smallest]
    panels = []
    for (layers, arm), group in grouped(chosen, "model.layers", "model.residual").items():
        colour, name = ARMS[arm]
        for records in zip(*(run.depth for run in group), strict=True):
            maps = [record["mixing"] for record in records]
            means = [
                [*map(statistics.fmean, zip(*rows, strict=True))]
                for rows in zip(*maps, strict=True)
            ]
            shares = [
                [sources * weight / sum(row) for weight in row]
                for sources, row in enumerate(means, 1)
            ]
            panels.append(
                Map(f"{name}, {layers} layers, step {records[0]['step']}", colour, shares)
            )
    return panels


def _points(runs: Runs, name: str) -> dict[str, dict[float, list[float]]]:
    points: dict[str, dict[float, list[float]]] = {}
    for (arm, value), group in grouped(runs, "model.residual", name).items():
        points.setdefault(arm, {})[value] = [score(run) for run in group]
    return points


def _less_plain(runs: Runs, name: str) -> dict[str, dict[float, list[float]]]:
    """Seed by seed, at equal settings."""
    points: dict[str, dict[float, list[float]]] = {}
    for (value,), at in grouped(runs, name).items():
        arms = {arm: by_seed(group) for (arm,), group in grouped(at, "model.residual").items()}
        for arm in arms.keys() - {BASELINE}:
            points.setdefault(arm, {})[value] = list(pair(arms[arm], arms.get(BASELINE, {})))
    return points


def _depths(runs: Runs, key: str) -> dict[str, dict[float, list[float]]]:
    """At each layer the mean of its sublayers and of all seeds: attention writes less than an MLP does."""
    found: dict[str, dict[float, list[float]]] = {}
    for (arm,), group in grouped(runs, "model.residual").items():
        means = [*map(statistics.fmean, zip(*(run.depth[-1][key] for run in group), strict=True))]
        found[arm] = {
            i // 2: [statistics.fmean(means[i : i + 2])] for i in range(0, len(means) // 2 * 2, 2)
        }
    return found
