"""The tables of docs/results/study.md, from the raw runs in runs/: `python studies/attention-residuals/page.py`.

Needs no GPU. Each archive is a study's folder without weights, one for each recipe; a table whose archive is not there
says so. Differences are taken seed by seed between runs that share every setting but the residual's.
"""

import json
import math
import re
import statistics
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwater.analyze.plot import ARMS, Line, Map, Panel, lines_of, picture
from headwater.analyze.runs import RecordedRun, find_runs, read_run
from headwater.analyze.scaling import Interval, Scaling, compare_scaling, operations, panels_of, points_of, shown
from headwater.models.config import SIZES
from headwater.stats import Paired, Stat, minus, pair, reach, spearman, summarize

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "results" / "study.md"
MARKS = re.compile(r"(<!-- ([a-z]+):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)
ASSETS = HERE.parent.parent / "docs" / "assets"
BASELINE = "standard"
FACTOR = "optim.query_lr"
SEEDS = (2, 3, 4, 6, 8)  # of the table that says what so many can tell
BY_DEPTH = (("outputs", "output_norm"), ("what is read", "read_norm"), ("gradients", "gradient_norm"))
# Losses of the paper's table of ablations and of its sweep of block sizes, at 436 million active parameters.
PAPER = {
    "standard": 1.766, "denseformer": 1.767, "mhc": 1.747, "attnres-full": 1.737, "attnres-block": 1.746,
    "attnres-full:query=projected": 1.731, "attnres-full:weights=static": 1.749, "attnres-full:weights=sigmoid": 1.741,
    "attnres-full:key_norm=false": 1.743, "attnres-full:window=8": 1.764, "attnres-block:block=2": 1.746,
    "attnres-block:block=4": 1.746, "attnres-block:block=8": 1.748, "attnres-block:block=16": 1.753,
    "attnres-block:block=24": 1.757,
}  # fmt: skip
MAPPED = 8e-3  # the learning rate whose depth weights are drawn, and of whose runs the table of magnitudes takes more
RULE = {128: 1.1e-2, 192: 8e-3, 256: 6e-3, 384: 4e-3}  # README.md's learning rates of the scaling, by width
OWN = {"completep": {128: 2.4e-2, 192: 1.6e-2, 256: 1.2e-2, 384: 8e-3}}  # of arms whose best is another
NEAR_BEST = (8e-3, 1.1e-2, 1.6e-2)  # learning rates of the smallest size
EARLY, LATER, STEPS = 500, 1000, 1472  # of its evaluations, and all
FALL = 0.13  # between the first two of them: more than most
TEXT = 102_435_696  # tokens of the training text
Runs = list[RecordedRun]


@contextmanager
def unpacked(archives: Path) -> Iterator[dict[str, Runs]]:
    """The runs of every archive, by recipe, with those that have no result."""
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for archive in sorted(archives.glob("*.tar.xz")):
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            recipe = archive.name.removesuffix(".tar.xz")
            found[recipe] = [read_run(run) for run in find_runs([Path(folder) / recipe])]
        yield found


def finished(runs: Sequence[RecordedRun]) -> Runs:
    return [run for run in runs if run.summary]


def left_out(runs: Sequence[RecordedRun]) -> str:
    """A line on runs without a result: a mean over seeds that did not diverge speaks of those alone."""
    names = [f"`{run.name}`" + (f" ({run.stopped})" if run.stopped else "") for run in runs if not run.summary]
    return f"\nWithout a result, so not in the table: {'; '.join(names)}.\n" if names else ""


def setting(run: RecordedRun, name: str) -> Any:
    """Of its configuration, such as optim.lr; a residual without the module that it comes from."""
    if name == "model.residual":
        return run.residual
    section, key = name.split(".")
    return run.config[section][key]


def score(run: RecordedRun) -> float:
    assert run.summary is not None
    return float(run.summary["bits_per_byte"])


def grouped(runs: Sequence[RecordedRun], *names: str) -> dict[tuple[Any, ...], Runs]:
    """Runs by the values of these settings, in order."""
    groups: dict[tuple[Any, ...], Runs] = defaultdict(list)
    for run in runs:
        groups[tuple(setting(run, name) for name in names)].append(run)
    return dict(sorted(groups.items(), key=lambda item: [(value != BASELINE, value or 0) for value in item[0]]))


def by_seed(runs: Sequence[RecordedRun]) -> dict[int | None, float]:
    return {run.seed: score(run) for run in runs}


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def noise(runs: Runs) -> str:
    """The arms beside the plain residual, and what so many seeds could tell."""
    arms = {arm: by_seed(group) for (arm,), group in grouped(runs, "model.residual").items()}
    return beside_plain(runs) + "".join(_needed(arm, scores, arms[BASELINE]) for arm, scores in arms.items())


def beside_plain(runs: Runs) -> str:
    """Mean and spread of each arm, and the paired difference."""
    return grid(COLUMNS, [row for _, row in _beside_plain(runs)])


COLUMNS = ["", "seeds", "bits per byte", "standard deviation", "difference", "95 % interval", ""]


def _beside_plain(runs: Runs) -> list[tuple[float, list[str]]]:
    """For each arm the mean of its differences, and its row."""
    arms = {arm: by_seed(group) for arm, group in _by_name(runs).items()}
    rows = []
    for arm, scores in arms.items():
        stat, cells, apart = summarize(list(scores.values())), ["", "", ""], 0.0
        assert stat is not None
        if arm != BASELINE and (differences := pair(scores, arms.get(BASELINE, {}))):
            paired = Paired(differences)
            apart, cells = paired.mean, [signed(paired.mean), _range(paired.interval), paired.verdict]
        spread = "-" if stat.spread is None else f"{stat.spread:.4f}"
        rows.append((apart, [f"`{arm}`", str(stat.count), f"{stat.mean:.4f}", spread, *cells]))
    return rows


def ablations(runs: Runs) -> str:
    """First every residual as it is, then the options of Attention Residuals: the lowest first, beside the paper's."""
    plain = next(float(row[2]) for _, row in _beside_plain(runs) if row[0] == f"`{BASELINE}`")
    parameters = {_arm(run): int(run.summary["parameters"]) for run in runs if run.summary}
    at_first = {arm: {run.seed: at_step(run, EARLY) for run in group} for arm, group in _by_name(runs).items()}
    apart_early = {arm: pair(scores, at_first[BASELINE]) for arm, scores in at_first.items()}
    early = {arm: signed(statistics.fmean(found)) for arm, found in apart_early.items() if found}
    rows = []
    for apart, row in sorted(_beside_plain(runs)):
        arm = row[0].strip("`")
        cells = ["", "", "", ""]
        if arm != BASELINE:
            theirs = percent(PAPER[arm] / PAPER[BASELINE] - 1) if arm in PAPER else ""
            more = percent(parameters[arm] / parameters[BASELINE] - 1)
            cells = [early.get(arm, "-"), percent(apart / plain), theirs, more]
        rows.append([*row[:5], *cells, *row[5:]])
    head = [*COLUMNS[:5], f"at step {EARLY}", "of plain", "paper's", "parameters", *COLUMNS[5:]]
    options = [row for row in rows if re.match("`attnres-(full|block)", row[0])]
    others = [row for row in rows if row not in options or ":" not in row[0]]
    return grid(head, others) + "\nOptions of Attention Residuals:\n\n" + grid(head, options)


def at_step(run: RecordedRun, step: int) -> float | None:
    return next((row["bits_per_byte"] for row in run.evals if row["step"] == step), None)


def percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


def _by_name(runs: Runs) -> dict[str, Runs]:
    arms: dict[str, Runs] = defaultdict(list)
    for run in (run for group in grouped(runs, "model.residual").values() for run in group):
        arms[_arm(run)].append(run)
    return arms


def _arm(run: RecordedRun) -> str:
    """Its residual, and what is changed around it; completep has its start by definition."""
    model = run.config["model"]
    wide = model.get("depth_start") is False and run.residual != "completep"
    around = [f"shortswa={model['shortswa']}"] * bool(model["shortswa"]) + ["depth_start=false"] * wide
    return "+".join([run.residual, *around])


def _range(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else f"{signed(interval[0])} to {signed(interval[1])}"


def _needed(arm: str, scores: dict[int | None, float], baseline: dict[int | None, float]) -> str:
    differences = pair(scores, baseline)
    if arm == BASELINE or len(differences) < 2:
        return ""
    spread = Paired(differences).stat.spread
    assert spread is not None
    rows = [[str(n), f"{reach(n) * spread:.4f}"] for n in SEEDS]
    words = (
        f"\nA paired difference of `{arm}` has a standard deviation of {spread:.4f}. What is told from chance then:\n\n"
    )
    return words + grid(["seeds", "differences above"], rows)


def sweep(runs: Runs, down: str, *across: str) -> str:
    """Bits per byte; the best of each column in bold, and a word where that is the edge of what was tried. Runs without
    a result are there if they failed."""
    values, columns = swept(runs, score, down, *across)
    groups = grouped([run for run in runs if not run.summary], "model.residual", *across)
    failed = {(key, setting(run, down)) for key, some in groups.items() for run in some}
    cells, edges = {}, []
    for key, stats in columns.items():
        best = min(((stat.mean, n) for n, stat in enumerate(stats) if stat), default=(0, None))[1]
        tried = [n for n, stat in enumerate(stats) if stat or (key, values[n]) in failed]
        if len(tried) > 1 and best in (tried[0], tried[-1]):
            edges.append(" ".join(map(str, key)))
        shown = [str(stat or ("fails" if (key, value) in failed else "-")) for stat, value in zip(stats, values)]
        cells[key] = [f"**{text}**" if n == best else text for n, text in enumerate(shown)]
    return crossed(down, values, cells) + (
        f"\nThe best value is the edge of what was tried, so not yet known, for: {', '.join(edges)}.\n" if edges else ""
    )


Columns = dict[tuple[Any, ...], list[Stat | None]]


def swept(runs: Runs, measure: Callable[[RecordedRun], float], down: str, *across: str) -> tuple[list[float], Columns]:
    """The values of a setting; and mean and spread over seeds at each, a column for an arm and whatever else is
    varied."""
    values = sorted({setting(run, down) for run in runs})
    columns: Columns = {}
    for key, group in grouped(runs, "model.residual", *across).items():
        columns[key] = [
            summarize([measure(run) for run in finished(group) if setting(run, down) == value]) for value in values
        ]
    return values, columns


def crossed(down: str, values: Sequence[float], cells: dict[tuple[Any, ...], list[str]]) -> str:
    head = [f"`{down}`", *(" ".join((f"`{key[0]}`", *map(str, key[1:]))) for key in cells)]
    return grid(head, [[f"{value:g}", *(column[n] for column in cells.values())] for n, value in enumerate(values)])


def evenness(runs: Runs, down: str, *across: str) -> str:
    """How many sources a read has in effect, whenever that was recorded, where depth weights are a softmax."""
    chosen = [run for run in runs if run.residual.startswith("attnres") and run.depth]
    if not chosen:
        return ""
    values = sorted({setting(run, down) for run in chosen})
    cells = {
        key: [sources_in_effect([run for run in group if setting(run, down) == value]) for value in values]
        for key, group in grouped(chosen, "model.residual", *across).items()
    }
    steps = ", ".join(str(record["step"]) for record in chosen[0].depth)
    even = statistics.fmean(range(1, len(chosen[0].depth[-1]["entropy"]) + 1))
    words = (
        "\nSources a read has in effect (e to the entropy of its weights, mean over reads and seeds; "
        f"all even: {even:g}), at steps {steps}:\n\n"
    )
    return words + crossed(down, values, cells)


def sources_in_effect(runs: Runs) -> str:
    at = zip(*([statistics.fmean(map(math.exp, record["entropy"])) for record in run.depth] for run in runs))
    return ", ".join(f"{statistics.fmean(found):.2f}" for found in at) or "-"


def by_size(runs: Runs, down: str, *across: str) -> str:
    """A sweep for each size, which is told by its width, and what it does to the depth weights. The plain residual has
    no queries: of a sweep of their factor it is a line above."""
    tables = []
    for (width, layers), group in grouped(runs, "model.dim", "model.layers").items():
        plain = [run for run in group if down == FACTOR and run.residual == BASELINE]
        others = [run for run in group if run not in plain]
        beside = [
            f"{summarize([*map(score, some)])} ({' '.join(map(str, key))})"
            for key, some in grouped(plain, *across).items()
        ]
        words = f"; the plain residual has {', '.join(beside)}" if beside else ""
        tables.append(f"\nWidth {width}, {layers} layers{words}:\n\n" + sweep(others, down, *across))
        tables.append(evenness(finished(others), down, *across))
    return "".join(tables).lstrip()


def rates(runs: Runs) -> str:
    return by_size(runs, "optim.lr") + at_own_best(finished(runs))


def hybrid(runs: Runs) -> str:
    """The sweep; at the rate that most seeds have run the arms side by side, and their differences through training."""
    most = max(grouped(finished(runs), "optim.lr").values(), key=len)
    steps = [row["step"] for row in most[0].evals]
    at = {
        arm: [{run.seed: at_step(run, step) for run in some} for step in steps] for arm, some in _by_name(most).items()
    }
    rows = []
    for arm, scores in at.items():
        if arm != BASELINE:
            paired = [Paired(pair(mine, plain)) for mine, plain in zip(scores, at[BASELINE], strict=True)]
            rows.append([f"`{arm}`", *(f"{signed(one.mean)} ({_range(one.interval)})" for one in paired)])
    words = f"\nAt {setting(most[0], 'optim.lr'):g}, and the differences after these steps:\n\n"
    through = grid(["", *(f"step {step}" for step in steps)], rows)
    return f"{by_size(runs, 'optim.lr')}{words}{beside_plain(most)}\n{through}"


def at_own_best(runs: Runs) -> str:
    """Each arm at the rate that is best for it beside the plain residual at its own, for each width."""
    rows = []
    for (width, arm), best in _best_of(runs).items():
        plain = _best_of(runs).get((width, BASELINE))
        if arm == BASELINE or plain is None or not (differences := pair(by_seed(best), by_seed(plain))):
            continue
        paired, own = Paired(differences), [f"{setting(group[0], 'optim.lr'):g}" for group in (best, plain)]
        cells = [signed(paired.mean), _range(paired.interval), paired.verdict]
        rows.append([str(width), f"`{arm}`", *own, str(len(differences)), *cells])
    head = ["width", "", "its rate", "plain's rate", "seeds", "difference", "95 % interval", ""]
    return f"\nEach at its own best rate, which is chosen on the same runs:\n\n{grid(head, rows)}" if rows else ""


def _best_of(runs: Runs) -> dict[tuple[int, str], Runs]:
    best: dict[tuple[int, str], Runs] = {}
    for (width, arm, _), group in grouped(runs, "model.dim", "model.residual", "optim.lr").items():
        means = [statistics.fmean(map(score, some)) for some in (group, best.get((width, arm), []) or group)]
        if (width, arm) not in best or means[0] < means[1]:
            best[width, arm] = group
    return best


def dynamics(runs: Runs) -> str:
    """How much larger numbers are at the end of the depth than at its start: after the last step, and through the
    training of the smallest width's arms at one rate."""
    recorded = [run for run in runs if run.depth]
    head = ["width", "layers", "rate", "", "seeds", "bits per byte"]
    head += [f"{words}, {measure}" for words, _ in BY_DEPTH for measure in ("ratio", "slope")]
    rows = []
    for key, group in grouped(recorded, "model.dim", "model.layers", "optim.lr", "model.residual").items():
        cells = [
            _hundredths([measure(run.depth[-1][name]) for run in group])
            for _, name in BY_DEPTH
            for measure in (growth, slope)
        ]
        mean = statistics.fmean(map(score, group))
        rows.append([*(f"{number:g}" for number in key[:3]), f"`{key[3]}`", str(len(group)), f"{mean:.4f}", *cells])
    return grid(head, rows) + through_training(recorded)


def through_training(runs: Runs) -> str:
    smallest = min(setting(run, "model.dim") for run in runs)
    chosen = [
        run
        for run in runs
        if run.residual in ARMS and setting(run, "model.dim") == smallest and setting(run, "optim.lr") == MAPPED
    ]
    steps = sorted({record["step"] for run in chosen for record in run.depth})
    rows = []
    for (layers, arm), group in grouped(chosen, "model.layers", "model.residual").items():
        for words, name in BY_DEPTH:
            at = {step: [growth(r[name]) for run in group for r in run.depth if r["step"] == step] for step in steps}
            rows.append([str(layers), f"`{arm}`", words, *map(_hundredths, at.values())])
    words = f"\nThe same ratio through training, at width {smallest} and learning rate {MAPPED:g}:\n\n"
    return words + grid(["layers", "", "", *(f"step {step}" for step in steps)], rows) if rows else ""


def _hundredths(values: Sequence[float | None]) -> str:
    stat = summarize(values)
    return "-" if stat is None else stat.text(".2f")


def growth(by_depth: Sequence[float]) -> float:
    """The mean of the last quarter over that of the first: attention and MLPs are in both."""
    quarter = len(by_depth) // 4
    return statistics.fmean(by_depth[-quarter:]) / statistics.fmean(by_depth[:quarter])


def slope(by_depth: Sequence[float]) -> float:
    """Of the logarithm over the whole depth, by least squares: 1 is a growth by e."""
    places = [i / (len(by_depth) - 1) for i in range(len(by_depth))]
    return statistics.linear_regression(places, [*map(math.log, by_depth)]).slope


def query(runs: Runs) -> str:
    return by_size(runs, FACTOR, "optim.lr")


def transfer(runs: Runs) -> str:
    return by_size(runs, FACTOR, "optim.optimizer", "optim.lr")


def scaling(runs: Runs) -> str:
    """The arms at each size, and from three on the fits, and what compute each saves at each of the baseline's
    budgets."""
    tables = []
    for (width, layers), group in grouped(runs, "model.dim", "model.layers").items():
        own = {run.residual: f"{setting(run, 'optim.lr'):g}" for run in group}
        common = own.get(BASELINE, "")
        apart = [f", {rate} of `{arm}`" for arm, rate in own.items() if rate != common]
        words = f"Width {width}, {layers} layers, learning rate {common}{''.join(apart)}"
        tables.append(f"{words}:\n\n{beside_plain(group)}\n")
    return "".join(tables) + (fits(runs) + without_a_size(runs) or "The curves need a third size.\n")


def sizes(found: dict[str, Runs]) -> str:
    """What the plain residual's runs of the scaling are, by size."""
    plain = [run for run in finished(taken("scaling", found)) if run.residual == BASELINE]
    names = {
        (shape["dim"], shape["layers"]): name.removeprefix("ladder-")
        for name, shape in SIZES.items()
        if "ladder" in name
    }
    rows = []
    for (width, layers), group in grouped(plain, "model.dim", "model.layers").items():
        tokens, steps = (group[0].summary[key] for key in ("tokens", "steps"))  # type: ignore[index]
        told = [f"{tokens / 1e6:.0f} million", f"{tokens / TEXT:.1f}", f"{RULE[width]:g}"]
        millions = names[width, layers].removesuffix("m")
        rows.append([f"{millions} million", str(width), str(layers), str(steps), *told])
    return grid(["parameters", "width", "layers", "steps", "tokens", "passes over the text", "learning rate"], rows)


Cost = Callable[[RecordedRun], float | None]
COMPARED: dict[str, list[Scaling]] = {}  # by their points: a table and a picture show the same curves


def curves(runs: Runs, cost: Cost = operations) -> list[Scaling]:
    """Of the arms that have run at three sizes or more; none, unless the plain residual has."""
    points = {arm: at for arm, at in points_of(runs, cost=cost).items() if len(at) > 2}
    if BASELINE not in points:
        return []
    key = repr(points)
    if key not in COMPARED:
        COMPARED[key] = compare_scaling(points, BASELINE)
    return COMPARED[key]


def fits(runs: Runs, cost: Cost = operations) -> str:
    found = curves(runs, cost)
    if not found:
        return ""
    budgets = sorted({c for curve in found for c in curve.multipliers})
    rows = []
    for curve in found:
        assert curve.fit is not None  # points at two budgets are left out before
        law = f"{curve.fit.floor:.3f} + {curve.fit.scale:.3f} (C / {curve.fit.unit:.2g})^−{curve.fit.alpha:.3f}"
        saved = [_multiplier(curve.multipliers.get(c)) if curve.residual != BASELINE else "1" for c in budgets]
        rows.append([f"`{curve.residual}`", *saved, law])
    return grid(["", *(f"at {shown(c)}" for c in budgets), "bits per byte"], rows)


def without_a_size(runs: Runs, cost: Cost = operations) -> str:
    """How far the curves hang on the largest and on the smallest size."""
    widths = sorted({setting(run, "model.dim") for run in runs})
    tables = []
    for left_out in (widths[-1], widths[0]):
        if fitted := fits([run for run in runs if setting(run, "model.dim") != left_out], cost):
            tables.append(f"\nWithout width {left_out}:\n\n{fitted}")
    return "".join(tables) if len(widths) > 3 else ""


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
        if size in SIZES
        for arm, found in arms.items()
        if "tokens_per_second" in found
    }


def seconds(measured: dict[tuple[int, str], dict[str, float]]) -> Cost:
    """How long a run takes by itself, where its speed was measured."""

    def of(run: RecordedRun) -> float | None:
        speed = measured.get((setting(run, "model.dim"), run.residual))
        return None if speed is None or not run.summary else run.summary["tokens"] / speed["tokens_per_second"]

    return of


def clock(runs: Runs, speeds: dict[str, Any]) -> str:
    """Speed and memory of each arm at each size, and from three sizes on what it is worth at equal time."""
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
        ends = [f"{cost(group[0]):.0f}", str(summarize([*map(score, group)]))] if group else ["-", "-"]
        rows.append([str(width), f"`{arm}`", *cells, *ends])
    head = ["width", "", "thousand tokens a second", "of plain", "GiB", "seconds of a run", "bits per byte"]
    timed = [run for run in runs if cost(run) is not None]
    words = "\nFits to seconds, and what an arm is worth in the plain residual's:\n\n"
    fitted = fits(timed, cost) + without_a_size(timed, cost)
    return grid(head, rows) + (words + fitted if fitted else "")


def importance(measured: list[dict[str, Any]]) -> str:
    """Rank correlation of weight and effect by arm, over the whole depth and over thirds of it; of weight times size,
    and of the effect in one half of the text with that in the other, where these were measured."""
    parts = ("all", "first", "middle", "last")
    rows = []
    for arm, some in _by_arm(measured).items():
        columns = [[one["spearman"][part] for one in some] for part in parts]
        columns += [[one.get(name) for one in some] for name in ("sizes", "halves")]
        rows.append([f"`{arm}`", str(len(some)), *map(_hundredths, columns)])
    head = ["", "seeds", "all reads", "first third", "middle", "last third", "weight times size", "half with half"]
    return grid(head, rows)


def hops(measured: list[dict[str, Any]]) -> str:
    """The share of right answers by arm and by the links that an answer takes."""
    rows = []
    for arm, some in _by_arm(measured).items():
        stats = [summarize(shares) for shares in zip(*(one["accuracy"] for one in some), strict=True)]
        rows.append([f"`{arm}`", str(len(some)), *(stat.text(".2f") for stat in stats if stat)])
    return grid(["", "seeds", *map(str, range(1, len(rows[0]) - 1))], rows)


def copying(measured: list[dict[str, Any]]) -> str:
    """How much less surprising what is told is when it is told again, in nats per token: the most first."""
    gains = [one["first"] - one["second"] for one in measured]
    ends = [one["bits_per_byte"] for one in measured]
    rows = [
        [f"`{one['run']}`", f"{one['first']:.2f}", minus(f"{gain:.2f}"), f"{end:.4f}"]
        for gain, end, one in sorted(zip(gains, ends, measured), key=lambda row: -row[0])
    ]
    text = grid(["", "first telling", "gained by the second", "bits per byte"], rows)
    if len(measured) < 3:
        return text
    found = f"{statistics.correlation(gains, ends):.2f}, of their ranks {spearman(gains, ends):.2f}"
    words = f"{len(measured)} runs: {minus(found)}.\n"
    return f"{text}\nCorrelation of what is gained with bits per byte over the {words}"


def _by_arm(measured: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    arms = sorted({one["residual"] for one in measured}, key=lambda arm: (arm != BASELINE, arm))
    return {arm: [one for one in measured if one["residual"] == arm] for arm in arms}


def measured_in(folder: Path, name: str) -> list[dict[str, Any]]:
    """What a script measured, in one file of all, or in a folder with a file for each; nothing if there is neither."""
    one, several = folder / f"{name}.json", sorted((folder / name).glob("*.json"))
    return json.loads(one.read_text()) if one.exists() else [json.loads(file.read_text()) for file in several]


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
    for arm, group in _by_name(chosen).items():
        cases = [
            (first, first - later, score(run))
            for run in group
            if (first := at_step(run, EARLY)) and (later := at_step(run, LATER))
        ]
        if len(cases) > 2:
            ends = [summarize([end for _, fall, end in cases if (fall > FALL) == early]) for early in (True, False)]
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
    for key, group in grouped(runs, "model.dim", "model.layers", "optim.lr", "model.residual").items():
        repeated = [[*map(score, some)] for some in made_again(group)]
        if repeated:
            freedom = sum(len(scores) - 1 for scores in repeated)
            squares = sum((len(scores) - 1) * statistics.variance(scores) for scores in repeated)
            most = max(max(scores) - min(scores) for scores in repeated)
            means = [statistics.fmean(scores) for scores in repeated]
            seeds = f"{statistics.stdev(means):.4f}" if len(means) > 1 else "-"
            counts = [str(len(repeated)), str(freedom + len(repeated))]
            cells = [f"{math.sqrt(squares / freedom):.4f}", f"{most:.4f}", seeds, f"{statistics.fmean(means):.4f}"]
            rows.append([str(key[0]), f"{key[2]:g}", f"`{key[3]}`", *counts, *cells])
    head = ["width", "rate", "", "seeds", "runs", "deviation of repeats", "at most", "of the seeds' means", "mean"]
    return grid(head, rows)


def made_again(runs: Runs) -> list[Runs]:
    """Of runs with one size, learning rate and residual, those that share all other settings and the seed."""
    alike: dict[tuple[Any, ...], Runs] = defaultdict(list)
    for run in runs:
        factor = setting(run, FACTOR) if run.residual.startswith("attnres") else None
        around = (_arm(run), setting(run, "optim.optimizer"), setting(run, "train.steps"), factor)
        alike[*around, run.seed].append(run)
    return [some for some in alike.values() if len(some) > 1]


def repeats(found: dict[str, Runs]) -> str:
    """Each run of the first three arms that was made again, by version of the code, which the GPU's memory tells: each
    version needs less than the one before."""
    runs = [run for some in found.values() for run in _coloured(some)]
    rows = []
    for key, group in grouped(runs, "model.dim", "model.layers", "optim.lr", "model.residual").items():
        for some in made_again(group):
            for memory, run in sorted(((_memory(run), run) for run in some), key=lambda pair: -pair[0]):
                scores = (at_step(run, EARLY), at_step(run, LATER), score(run))
                cells = [f"{memory:.0f}", *("-" if value is None else f"{value:.4f}" for value in scores)]
                rows.append([f"{key[2]:g}", f"`{key[3]}`", str(run.seed), *cells])
    return grid(["rate", "", "seed", "million bytes", f"step {EARLY}", f"step {LATER}", "end"], rows)


def _memory(run: RecordedRun) -> float:
    assert run.summary is not None
    return float(run.summary["peak_memory_bytes"]) / 1e6


def cost(found: dict[str, Runs]) -> str:
    """Runs, tokens, and the GPU's minutes, which runs side by side cannot know themselves: minutes.json has them."""
    minutes = json.loads((HERE / "runs" / "minutes.json").read_text())
    rows, total = [], [0, 0, 0.0]
    for recipe, runs in ((recipe, finished(runs)) for recipe, runs in found.items()):
        tokens = sum(int(run.summary["tokens"]) for run in runs if run.summary)
        total = [total[0] + len(runs), total[1] + tokens, total[2] + minutes[recipe]]
        rows.append([f"`{recipe}.toml`", str(len(runs)), f"{tokens / 1e6:.0f} million", f"{minutes[recipe]:.0f}"])
    if count := len(measured_in(HERE / "runs", "hops")):
        total = [total[0] + count, total[1], total[2] + minutes["hops"]]
        rows.append(["`studies/hops`", str(count), "of its own", f"{minutes['hops']:.0f}"])
    rows.append(["all", str(total[0]), f"{total[1] / 1e6:.0f} million", f"{total[2]:.0f}"])
    return grid(["recipe", "runs", "tokens", "H200 minutes"], rows)


TABLES: dict[str, Callable[[Runs], str]] = {
    "noise": noise, "rates": rates, "query": query, "transfer": transfer, "scaling": scaling,
    "ablations": ablations, "longer": ablations, "dynamics": dynamics, "hybrid": hybrid,
}  # fmt: skip
SWEEPS = ("rates", "hybrid", "query", "transfer")  # tables that show where a run fails
OF_ALL: dict[str, Callable[[dict[str, Runs]], str]] = {
    "again": again, "repeats": repeats, "onset": onset, "sizes": sizes, "cost": cost,
}  # fmt: skip
# Not by `headwater study`, but by scripts of their own.
MEASURED = {"importance": importance, "hops": hops, "copying": copying}
# Which runs of which recipes a table takes, if not all of those of its name alone.
TAKES: dict[str, dict[str, Callable[[RecordedRun], bool]]] = {
    "dynamics": {"noise": bool, "rates": lambda run: setting(run, "optim.lr") == MAPPED, "dynamics": bool},
    "scaling": {
        "rates": lambda run: setting(run, "optim.lr") == OWN.get(run.residual, RULE)[setting(run, "model.dim")],
        "scaling": bool,
    },
}


def pictures(found: dict[str, Runs]) -> dict[Path, str]:
    """By the file that each is drawn to: the sweep of rates by width, and numbers by depth, of arms that have a
    colour."""
    drawn, panels = {}, []
    for (width,), runs in grouped(_coloured(found.get("rates", [])), "model.dim").items():
        for words, points in (("bits per byte", _points), ("less the plain residual", _less_plain)):
            lines = lines_of(points(runs, "optim.lr"))
            panels.append(Panel(f"{words}, width {width}", "learning rate", lines, log=True))
    if panels:
        drawn[ASSETS / "study-rates.svg"] = picture(panels, "Bits per byte by learning rate")
    drawn |= scaling_pictures(finished(taken("scaling", found)), speeds())
    if panels := drops(found):
        drawn[ASSETS / "study-drop.svg"] = picture(panels, "Training loss of six seeds, less that of a lower rate")
    recorded = [run for run in _coloured(found.get("dynamics", [])) if run.depth]
    panels = [
        Panel(f"{words}, {layers} layers", "layer", lines_of(_depths(runs, key)))
        for words, key in BY_DEPTH
        for (layers,), runs in grouped(recorded, "model.layers").items()
    ]
    if panels:
        drawn[ASSETS / "study-depth.svg"] = picture(panels, "Magnitudes and gradients by depth")
    recorded = [run for run in finished(found.get("rates", [])) if setting(run, "optim.lr") == MAPPED]
    if maps := [panel for arm in ARMS if arm != BASELINE for panel in maps_of(arm, recorded)]:
        drawn[ASSETS / "study-maps.svg"] = picture(maps, "Depth weights through training")
    return drawn


def drops(found: dict[str, Runs]) -> list[Panel]:
    """Training losses of the smallest size at the rate of the scaling, less those of the plain residual at a lower one,
    which saw the same text in the same step: a line for each seed, over three records at a time."""
    plain = [run for run in finished(found.get("noise", [])) if run.residual == BASELINE]
    beside = {run.seed: {row["step"]: row["loss"] for row in run.train} for run in plain}
    chosen = [run for run in _coloured(found.get("rates", [])) if setting(run, "optim.lr") == RULE[128]]
    panels = []
    for (arm,), runs in grouped([run for run in chosen if run.seed in beside], "model.residual").items():
        colour, name = ARMS[arm]
        lines = []
        for run in runs:
            less = [(row["step"], row["loss"] - beside[run.seed][row["step"]]) for row in run.train]
            late = [(step, value) for step, value in less if step >= EARLY - 200]
            means = {late[n][0]: [statistics.fmean(v for _, v in late[n - 1 : n + 2])] for n in range(1, len(late) - 1)}
            lines.append(Line(f"seed {run.seed}", colour, means))
        panels.append(Panel(f"{name}: nats, less plain at 0.003", "step", lines))
    return panels


def scaling_pictures(runs: Runs, speeds: dict[str, Any]) -> dict[Path, str]:
    """Loss against operations; against seconds, and against memory."""
    drawn, measured = {}, alone(speeds)
    if found := curves(runs):
        panels = panels_of(found, BASELINE)
        drawn[ASSETS / "study-scaling.svg"] = picture(panels, "Loss against operations")
    timed = [run for run in runs if seconds(measured)(run) is not None]
    if found := curves(timed, seconds(measured)):
        held: dict[str, dict[float, list[float]]] = {}
        for (width, arm), group in grouped(timed, "model.dim", "model.residual").items():
            held.setdefault(arm, {})[measured[width, arm]["peak_gib"]] = [*map(score, group)]
        memory = Panel("bits per byte", "GiB", lines_of(held), log=True, label="{:.1f}".format)
        panels = [*panels_of(found, BASELINE, "seconds"), memory]
        drawn[ASSETS / "study-clock.svg"] = picture(panels, "Loss against time and memory")
    return drawn


def speeds() -> dict[str, Any]:
    """Of all sizes that were measured, each in one process of its own or with others."""
    files = sorted((HERE / "runs" / "speed").glob("*.json"))
    return {key: found for file in files for key, found in json.loads(file.read_text()).items()}


def maps_of(arm: str, runs: Runs) -> list[Map]:
    """The depth weights of an arm whenever they were recorded, the mean over seeds, in even shares."""
    smallest = min((setting(run, "model.dim") for run in runs), default=0)
    chosen = [run.depth for run in runs if run.residual == arm and setting(run, "model.dim") == smallest]
    panels, (colour, name) = [], ARMS[arm]
    for records in zip(*chosen, strict=True):
        maps = [record["mixing"] for record in records]
        means = [[*map(statistics.fmean, zip(*rows, strict=True))] for rows in zip(*maps, strict=True)]
        shares = [[sources * weight / sum(row) for weight in row] for sources, row in enumerate(means, 1)]
        panels.append(Map(f"{name}, step {records[0]['step']}", colour, shares))
    return panels


def _coloured(runs: Runs) -> Runs:
    return [run for run in finished(runs) if run.residual in ARMS]


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
        found[arm] = {i // 2: [statistics.fmean(means[i : i + 2])] for i in range(0, len(means) // 2 * 2, 2)}
    return found


def taken(name: str, found: dict[str, Runs]) -> Runs:
    """The runs that a table takes, with those that have no result."""
    takes = TAKES.get(name, {name: bool})
    return [run for recipe, wanted in takes.items() for run in found.get(recipe, []) if wanted(run)]


def filled(text: str, found: dict[str, Runs]) -> str:
    """The page with every table as the runs have it now."""

    def table(match: re.Match[str]) -> str:
        name = match[2]
        if name in OF_ALL:
            made = OF_ALL[name](found)
        elif name == "clock":
            made = clock(finished(taken("scaling", found)), speeds()) if speeds() else "Not measured yet.\n"
        elif name in TABLES:
            runs = taken(name, found)
            ended = [run for run in runs if run.summary or (run.stopped and name in SWEEPS)]
            made = (TABLES[name](ended) if finished(runs) else "Not run yet.\n") + left_out(runs)
        elif name in MEASURED:
            measured = measured_in(HERE / "runs", name)
            made = MEASURED[name](measured) if measured else "Not run yet.\n"
        else:
            return match[0]
        return f"{match[1]}{made}{match[3]}"

    return MARKS.sub(table, text)


def main() -> int:
    with unpacked(HERE / "runs") as found:
        text = filled(PAGE.read_text(), found)
        for file, drawn in pictures(found).items():
            file.write_text(drawn, encoding="utf-8")
    changed = text != PAGE.read_text()
    PAGE.write_text(text)
    print(f"{PAGE.name}: {'written' if changed else 'as it was'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
