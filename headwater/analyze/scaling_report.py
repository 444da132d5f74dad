"""What is told of a scaling fit: lines for a terminal, and a picture."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headwater.analyze.plot import Line, Panel, colours_of, picture
from headwater.analyze.power_law import ALPHAS, BUDGETS
from headwater.analyze.report import write_page
from headwater.analyze.scaling import Interval, Scaling, without_ends

SAYS = 4.0  # times the compute: an interval that reaches further is drawn to the picture's edge


def table(found: Sequence[Scaling], baseline: str) -> str:
    """Lines for a terminal."""
    lines = ["L in bits per byte of held-out text, C in operations"]
    for scaling in found:
        curve, budgets = scaling.fit, len(scaling.points)
        if curve is None:
            at = f"{budgets} budget{'s' * (budgets != 1)}"
            lines.append(
                f"{scaling.residual}: left out, for it has runs at {at} and a fit needs three"
            )
            continue
        fewest = min(len(losses) for losses in scaling.points.values())
        seeds = "1 seed" if fewest == 1 else f"{fewest} seeds"
        lines.append(
            f"{scaling.residual}: L = {curve.floor:.4f} + {curve.scale:.4f} (C / {curve.unit:.3g})^-{curve.alpha:.3f}"
            f"  ({_edge(curve.alpha)}{_reach(scaling.alpha)}{budgets} budgets, {seeds} at least)"
        )
        lines.append(f"  {_missed(scaling)}")
        if scaling.residual != baseline:
            for budget, interval in scaling.multipliers.items():
                text = (
                    "the curves do not meet"
                    if interval is None
                    else f"as {baseline} with {_words(interval)}"
                )
                lines.append(f"  at {budget:.3g} operations: {text}")
    for end, others in without_ends(found, baseline).items():
        lines.append(f"Without {end:.3g} operations:")
        for other in (other for other in others if other.residual != baseline):
            worth = {
                budget: interval
                for budget, interval in other.multipliers.items()
                if interval is not None
            }
            told = (
                f"{interval.value:.2f}{_limits(interval)} at {budget:.3g}"
                for budget, interval in worth.items()
            )
            lines.append(f"  {other.residual}: {', '.join(told) or 'the curves do not meet'}")
    return "\n".join(lines)


def _limits(interval: Interval) -> str:
    return (
        ""
        if interval.low is None or interval.high is None
        else f" ({interval.low:.2f} to {interval.high:.2f})"
    )


def write_plot(found: Sequence[Scaling], baseline: str, path: Path) -> Path:
    """Write what `plot` draws, over a picture of before but nothing else; returns the path."""
    return write_page(path, plot(found, baseline), begins=b"<svg", kind="picture of this kind")


def plot(found: Sequence[Scaling], baseline: str) -> str:
    return picture(
        panels_of(found, baseline), "Loss against compute, and what compute each residual is worth"
    )


def panels_of(found: Sequence[Scaling], baseline: str, across: str = "operations") -> list[Panel]:
    """The runs and the curves through them; and beside it what compute each residual is worth, with its interval,
    where another than the baseline has curves that meet. `across`: what budgets are counted in."""
    colours = colours_of([scaling.residual for scaling in found])
    curves, worth = [], []
    for scaling in found:
        name, colour = scaling.residual, colours[scaling.residual]
        losses = {c: list(seeds.values()) for c, seeds in sorted(scaling.points.items())}
        if (fitted := scaling.fit) is None:
            curves.append(Line(f"{name}, no fit", colour, losses, ()))
            continue
        places = np.geomspace(min(losses), max(losses), 60).tolist()
        curves.append(Line(name, colour, losses, [(c, fitted.loss(c)) for c in places]))
        met = {c: interval for c, interval in scaling.multipliers.items() if interval is not None}
        if name != baseline and met:
            spans = {
                c: _shown(i.low, i.high)
                for c, i in met.items()
                if i.low is not None and i.high is not None
            }
            worth.append(Line(name, colour, {c: [i.value] for c, i in met.items()}, spans=spans))
    panels = [Panel("bits per byte", across, curves, log=True, label=shown)]
    if worth:
        panels.append(
            Panel(
                f"worth so many times the {across} of {baseline}", across, worth, True, label=shown
            )
        )
    return panels


def _shown(low: float, high: float) -> tuple[float, float]:
    """One that says almost nothing leaves the picture, rather than make all others flat."""
    return low, math.inf if high > SAYS else high


def shown(budget: float) -> str:
    """Operations as a power of ten, seconds as they are."""
    return f"{budget:.0f}" if 10 <= budget < 1e5 else f"{budget:.1e}".replace("e+", "e")


def _words(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.value:.3f} times the compute (one seed: no interval)"
    told = "" if interval.low > 1 or interval.high < 1 else ", not told apart from 1"
    return (
        f"{interval.value:.3f} times the compute ({interval.low:.3f} to {interval.high:.3f}{told})"
    )


def _missed(scaling: Scaling) -> str:
    told = f"at most {scaling.miss:.4f} from the mean of a budget"
    few = "; to be near three says nothing, as a curve has three numbers"
    return told if len(scaling.points) > BUDGETS else told + few


def _edge(alpha: float) -> str:
    return (
        ""
        if ALPHAS[0] < alpha < ALPHAS[-1]
        else "alpha is the edge of what is tried, so not known; "
    )


def _reach(alpha: Interval | None) -> str:
    if alpha is None or alpha.low is None or alpha.high is None:
        return ""
    if alpha.low < ALPHAS[1] and alpha.high > ALPHAS[-2]:
        return "alpha may be anything that is tried, so these runs do not tell the curve; "
    low = f"{alpha.low:.3f}" if alpha.low > ALPHAS[0] else f"{ALPHAS[0]:g} or less"
    high = f"{alpha.high:.3f}" if alpha.high < ALPHAS[-1] else f"{ALPHAS[-1]:g} or more"
    return f"alpha {low} to {high}; "
