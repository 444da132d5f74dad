"""A scaling fit for a reader: lines for a terminal, and a picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from headwater.analyze.plot import Line, Panel, colours_of, picture
from headwater.analyze.power_law import ALPHAS, BUDGETS
from headwater.analyze.report import write_page
from headwater.analyze.scaling import Interval, Scaling, without_ends
from headwater.runs.stats import NOT_SIGNIFICANT, SIGNIFICANT

WIDE = 4.0  # times the compute: an interval that reaches further is drawn to the picture's edge


def table(scalings: Sequence[Scaling], baseline: str) -> str:
    """Lines for a terminal."""
    # The curve of each residual, then its ratios at the baseline's budgets.
    lines = [
        "L in bits per byte of held-out text, C in operations; in brackets 95 % intervals, each by itself"
    ]
    for scaling in scalings:
        lines += _curve_lines(scaling)
        if scaling.fit is None or scaling.residual == baseline:
            continue
        for budget, interval in scaling.multipliers.items():
            text = "the curves do not meet"
            if interval is not None:
                text = f"{baseline} needs {_words(interval)}"
            lines.append(f"  at {budget:.3g} operations: {text}")

    # A result that hangs on one size changes without it.
    for end, fits in without_ends(scalings, baseline).items():
        lines.append(f"Without {end:.3g} operations:")
        for scaling in fits:
            if scaling.residual != baseline:
                lines.append(f"  {scaling.residual}: {_multipliers(scaling)}")
    return "\n".join(lines)


def _curve_lines(scaling: Scaling) -> list[str]:
    """The formula of a residual's curve, and how far the curve is from its runs."""
    curve, budgets = scaling.fit, len(scaling.points)
    if curve is None:
        plural = "s" if budgets != 1 else ""
        return [
            f"{scaling.residual}: left out, for it has runs at {budgets} budget{plural} and a fit "
            "needs three"
        ]
    # What a reader must know of the fit stands in brackets behind it.
    fewest = min(len(losses) for losses in scaling.points.values())
    seeds = "1 seed" if fewest == 1 else f"{fewest} seeds"
    remarks = f"{_edge(curve.alpha)}{_reach(scaling.alpha)}{budgets} budgets, {seeds} at least"
    return [
        f"{scaling.residual}: L = {curve.floor:.4f} + {curve.scale:.4f} "
        f"(C / {curve.unit:.3g})^-{curve.alpha:.3f}  ({remarks})",
        f"  {_missed(scaling)}",
    ]


def _multipliers(scaling: Scaling) -> str:
    """Every multiplier with its interval, in one line."""
    texts = []
    for budget, interval in scaling.multipliers.items():
        if interval is not None:
            texts.append(f"{interval.value:.2f}{_limits(interval)} at {budget:.3g}")
    return ", ".join(texts) or "the curves do not meet"


def _limits(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return ""
    return f" ({interval.low:.2f} to {interval.high:.2f})"


def write_plot(scalings: Sequence[Scaling], baseline: str, path: Path) -> Path:
    """Write what `plot` draws, over a picture of before but nothing else; returns the path."""
    return write_page(path, plot(scalings, baseline), begins=b"<svg", kind="picture of this kind")


def plot(scalings: Sequence[Scaling], baseline: str) -> str:
    title = "Loss against compute, and the compute that each residual saves"
    return picture(panels_of(scalings, baseline), title)


def panels_of(
    scalings: Sequence[Scaling], baseline: str, across: str = "operations"
) -> list[Panel]:
    """The runs with their curves, and beside them the multipliers with their intervals.

    The second panel is there where a residual other than the baseline has a curve that meets the
    baseline's. `across`: the unit of budgets.
    """
    # A residual has one colour in both panels.
    colours = colours_of([scaling.residual for scaling in scalings])
    curves, multipliers = [], []
    for scaling in scalings:
        name, colour = scaling.residual, colours[scaling.residual]
        curves.append(_curve(scaling, colour))
        ratios = {c: ratio for c, ratio in scaling.multipliers.items() if ratio is not None}
        if name != baseline and ratios:
            values = {c: [ratio.value] for c, ratio in ratios.items()}
            multipliers.append(Line(name, colour, values, spans=_spans(ratios)))
    panels = [Panel("bits per byte", across, curves, log=True, label=shown)]
    if multipliers:
        title = f"{across} that {baseline} needs, as a ratio"
        panels.append(Panel(title, across, multipliers, True, label=shown))
    return panels


def _curve(scaling: Scaling, colour: str) -> Line:
    """The losses of runs, and the curve through them if there is one."""
    losses = {c: list(seeds.values()) for c, seeds in sorted(scaling.points.items())}
    if scaling.fit is None:
        return Line(f"{scaling.residual}, no fit", colour, losses, ())
    # Sixty points make the line smooth.
    places = np.geomspace(min(losses), max(losses), 60).tolist()
    curve = [(compute, scaling.fit.loss(compute)) for compute in places]
    return Line(scaling.residual, colour, losses, curve)


def _spans(ratios: Mapping[float, Interval]) -> dict[float, tuple[float, float]]:
    """The ends of intervals. A wide one leaves the picture, rather than make all others flat."""
    spans = {}
    for compute, interval in ratios.items():
        if interval.low is not None and interval.high is not None:
            high = math.inf if interval.high > WIDE else interval.high
            spans[compute] = (interval.low, high)
    return spans


def shown(budget: float) -> str:
    """Operations as a power of ten, seconds as they are."""
    return f"{budget:.0f}" if 10 <= budget < 1e5 else f"{budget:.1e}".replace("e+", "e")


def _words(interval: Interval) -> str:
    """The compute that the baseline needs for the same loss, with the interval and the verdict."""
    amount = f"{interval.value:.3f} times the compute"
    if interval.low is None or interval.high is None:
        return f"{amount} (one seed: no interval)"
    verdict = NOT_SIGNIFICANT if interval.low <= 1 <= interval.high else SIGNIFICANT
    return f"{amount} ({interval.low:.3f} to {interval.high:.3f}): {verdict}"


def _missed(scaling: Scaling) -> str:
    distance = f"at most {scaling.miss:.4f} from the mean of a budget"
    if len(scaling.points) > BUDGETS:
        return distance
    return f"{distance}; to be near three says nothing, as a curve has three numbers"


def _edge(alpha: float) -> str:
    if ALPHAS[0] < alpha < ALPHAS[-1]:
        return ""
    return "alpha is the edge of what is tried, so not known; "


def _reach(alpha: Interval | None) -> str:
    """The interval of alpha. Where it ends with the search, nobody knows further."""
    if alpha is None or alpha.low is None or alpha.high is None:
        return ""
    # From the first exponent that is tried to the last one: nothing is known.
    if alpha.low < ALPHAS[1] and alpha.high > ALPHAS[-2]:
        return "alpha may be anything that is tried, so these runs do not tell the curve; "
    low = f"{alpha.low:.3f}" if alpha.low > ALPHAS[0] else f"{ALPHAS[0]:g} or less"
    high = f"{alpha.high:.3f}" if alpha.high < ALPHAS[-1] else f"{ALPHAS[-1]:g} or more"
    return f"alpha {low} to {high}; "
