"""The table of a report: one row a residual, with the differences to the baseline drawn seed by seed."""

from headwater.analyze.markup import breakable, cell, count, duration, memory, text
from headwater.analyze.words import interval, mean
from headwater.runs.groups import Group, told_lowest
from headwater.runs.stats import Paired, Stat, minus

COLUMNS = (
    "Residual", "Validation loss", "Difference", "Seed by seed", "Bits per byte", "Parameters", "FLOPs per token",
    "Wall\u2011clock", "Peak memory",
)  # fmt: skip
WIDTH, HEIGHT, EDGE = 172, 30, 8  # of the drawing in a row, in pixels
COLOURS = 7  # besides colour 0, the baseline's


def first_colour(groups: list[Group]) -> int:
    """Colour 0, the neutral one, is kept for the baseline, which comes first where there is one."""
    return 0 if groups[0].baseline is groups[0] else 1


def look(colour: int) -> str:
    """Classes of the n-th colour: seven hues, then the same hues with another dash and another mark."""
    return (
        "c0" if colour == 0 else f"c{(colour - 1) % COLOURS + 1} look{(colour - 1) // COLOURS % 3}"
    )


def row_name(group: Group, colour: int) -> str:
    return f'<i class="key {look(colour)}"></i><code>{breakable(group.label)}</code>'


def table(groups: list[Group]) -> str:
    best, scale = told_lowest(groups), difference_scale(groups)
    columns = [name for name in COLUMNS if scale or name != "Seed by seed"]
    head = "".join(
        f'<th scope="col"{" data-fixed" * (name == "Seed by seed")}>{text(name)}'
        f"{axis(scale) if scale and name == 'Seed by seed' else ''}</th>"
        for name in columns
    )
    body = "".join(
        table_row(group, number, group is best, scale)
        for number, group in enumerate(groups, first_colour(groups))
    )
    return f'<table id="table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def table_row(group: Group, colour: int, best: bool, scale: tuple[float, float] | None) -> str:
    base = group.baseline if group.baseline is not group else None
    extra, parameters = group.final("residual_parameters"), mean(group, "parameters")
    loss, bits, seconds = group.final("loss"), group.final("bits_per_byte"), mean(group, "seconds")
    cells = [
        cell(
            plain(loss), "lowest" if best else "", "best" if best else "", order=mean(group, "loss")
        ),
        difference_cell(group),
        *([f"<td>{drawing(group, colour, scale)}</td>"] if scale else []),
        cell(plain(bits), order=mean(group, "bits_per_byte")),
        cell(count(parameters), added(extra), order=parameters),
        cell(
            count(flops := mean(group, "flops_per_token")),
            ratio(group, base, "flops_per_token"),
            order=flops,
        ),
        cell(
            duration(seconds), ratio(group, base, "seconds") if group.timed else "", order=seconds
        ),
        cell(
            memory(peak := mean(group, "peak_memory_bytes")),
            ratio(group, base, "peak_memory_bytes"),
            order=peak,
        ),
    ]
    name = row_name(group, colour)
    return (
        f'<tr><th scope="row">{name}<small>{text(seeds(group))}</small></th>{"".join(cells)}</tr>'
    )


def seeds(group: Group) -> str:
    """How many runs a row speaks of, and what became of the others."""
    counted, stopped = len(group.results), sum(bool(run.stopped) for run in group.runs)
    waiting = sum(run.summary is None for run in group.runs) - stopped
    words = f"{counted} seed{'s' * (counted != 1)}"
    rest = [
        f"{number} {what}"
        for number, what in ((stopped, "stopped"), (waiting, "unfinished"))
        if number
    ]
    return ", ".join([words, *rest])


def plain(found: Stat | None) -> str:
    return "—" if found is None else found.text()


def difference_cell(group: Group) -> str:
    if group.baseline is group:
        return cell("baseline", order=0.0)
    paired = group.difference()
    if paired is None:
        return cell("—", "" if group.baseline is None else "no finished seed in common")
    return cell(Stat(paired.mean, None, 1).text(sign="+"), paired.verdict, order=paired.mean)


def difference_scale(groups: list[Group]) -> tuple[float, float] | None:
    """From, to of the drawings, all on one scale: every seed and zero, and intervals as far as they leave seeds apart.

    The interval of two seeds reaches twenty times further than they do; drawn whole it would show nothing else.
    """
    judged = [paired for group in groups if (paired := group.difference()) is not None]
    if not judged:
        return None
    values = [value for paired in judged for value in paired.values] + [0.0]
    ends = [end for paired in judged for end in paired.interval or ()]
    most = 2.5 * max(map(abs, values))
    low, high = (
        min([*values, *(max(end, -most) for end in ends)]),
        max([*values, *(min(end, most) for end in ends)]),
    )
    return (low, high) if high > low else (-1.0, 1.0)


def place(value: float, scale: tuple[float, float]) -> float:
    low, high = scale
    return round(EDGE + (value - low) / (high - low) * (WIDTH - 2 * EDGE), 1)


def axis(scale: tuple[float, float]) -> str:
    """Zero and both ends, above the column."""
    marks, zero = [], place(0.0, scale)
    for value, x, anchor in (
        (scale[0], 0.0, "start"),
        (0.0, zero, "middle"),
        (scale[1], float(WIDTH), "end"),
    ):
        crowded = value != 0 and abs(place(value, scale) - zero) < 56
        if not crowded:
            words = "0" if value == 0 else minus(f"{value:+.2g}")
            marks.append(f'<text x="{x}" y="11" text-anchor="{anchor}">{words}</text>')
    return (
        f'<svg class="strip" width="{WIDTH}" height="14" aria-hidden="true">{"".join(marks)}</svg>'
    )


def drawing(group: Group, colour: int, scale: tuple[float, float]) -> str:
    """A dot for each seed, a bar for the interval (an arrow where it goes on), a line at the baseline."""
    zero, middle = place(0.0, scale), HEIGHT / 2
    parts = [f'<line class="zero" x1="{zero}" x2="{zero}" y1="0" y2="{HEIGHT}"/>']
    paired = group.difference()
    if paired is not None:
        parts += bar(paired, scale)
        dots = (
            f'<circle class="seed" cx="{place(value, scale)}" cy="{middle}" r="3.2"/>'
            for value in paired.values
        )
        parts += [*dots, f'<path class="mean" d="M{place(paired.mean, scale)},{middle - 8}v16"/>']
    label = "baseline" if group.baseline is group else spoken(paired)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg class="strip {look(colour)}" {size} role="img" aria-label="{text(label)}">{"".join(parts)}</svg>'


def bar(paired: Paired, scale: tuple[float, float]) -> list[str]:
    if paired.interval is None:
        return []
    low, high = (min(max(end, scale[0]), scale[1]) for end in paired.interval)
    y = HEIGHT / 2
    parts = [
        f'<line class="interval" x1="{place(low, scale)}" x2="{place(high, scale)}" y1="{y}" y2="{y}"/>'
    ]
    for end, shown, way in ((paired.interval[0], low, -1), (paired.interval[1], high, 1)):
        x = place(shown, scale)
        shape = (
            f"M{x},{y - 5}v10"
            if end == shown
            else f"M{x - 1 * way},{y - 4}l{5 * way},4l{-5 * way},4"
        )
        parts.append(f'<path class="interval" d="{shape}"/>')
    return parts


def spoken(paired: Paired | None) -> str:
    if paired is None:
        return "no difference known"
    values = ", ".join(minus(f"{value:+.4f}") for value in paired.values)
    around = f"; 95 % interval {interval(paired)}" if paired.interval else ""
    return f"Differences by seed {values}{around}: {paired.verdict}"


def added(extra: Stat | None) -> str:
    return "" if extra is None or not extra.mean else f"+ {extra.mean:,.0f}"


def ratio(group: Group, base: Group | None, key: str) -> str:
    mine, theirs = mean(group, key), mean(base, key) if base else None
    return f"× {mine / theirs:.2f}" if mine and theirs else ""
