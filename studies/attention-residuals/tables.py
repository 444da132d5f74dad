"""Tables of losses, of what is measured by depth, and of what other scripts measured."""

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from records import (
    BASELINE,
    EARLY,
    MAPPED,
    Runs,
    at_step,
    by_seed,
    finished,
    grid,
    grouped,
    percent,
    score,
    setting,
    signed,
)

from headwater.analyze.plot import ARMS
from headwater.runs.record import RecordedRun
from headwater.runs.stats import (
    NOT_SIGNIFICANT,
    Paired,
    Stat,
    minus,
    pair,
    reach,
    spearman,
    summarize,
)

FACTOR = "optim.query_lr"
SEEDS = (2, 3, 4, 6, 8)  # of the table that says what so many can tell
LEAST = (
    0.0342  # what two seeds of the smallest size can tell, as noise() found before the other runs
)
BY_DEPTH = (
    ("outputs", "output_norm"),
    ("what is read", "read_norm"),
    ("gradients", "gradient_norm"),
)
# Losses of the paper's table of ablations and of its sweep of block sizes, at 436 million active parameters.
PAPER = {
    "standard": 1.766, "denseformer": 1.767, "mhc": 1.747, "attnres-full": 1.737, "attnres-block": 1.746,
    "attnres-full:query=projected": 1.731, "attnres-full:weights=static": 1.749, "attnres-full:weights=sigmoid": 1.741,
    "attnres-full:key_norm=false": 1.743, "attnres-full:window=8": 1.764, "attnres-block:block=2": 1.746,
    "attnres-block:block=4": 1.746, "attnres-block:block=8": 1.748, "attnres-block:block=16": 1.753,
    "attnres-block:block=24": 1.757,
}  # fmt: skip


def noise(runs: Runs) -> str:
    """The arms beside the plain residual, and what so many seeds could tell."""
    arms = {arm: by_seed(group) for (arm,), group in grouped(runs, "model.residual").items()}
    return beside_plain(runs) + "".join(
        _needed(arm, scores, arms[BASELINE]) for arm, scores in arms.items()
    )


def beside_plain(runs: Runs) -> str:
    """Mean and spread of each arm, and the paired difference."""
    return grid(COLUMNS, [row for _, row in _beside_plain(runs)])


INTERVAL = "95 % interval, not corrected"
COLUMNS = ["", "seeds", "bits per byte", "standard deviation", "difference", INTERVAL, ""]


def _beside_plain(runs: Runs) -> list[tuple[float, list[str]]]:
    """For each arm the mean of its differences, and its row."""
    arms = {arm: by_seed(group) for arm, group in by_name(runs).items()}
    rows = []
    for arm, scores in arms.items():
        stat, cells, apart = summarize(list(scores.values())), ["", "", ""], 0.0
        assert stat is not None
        if arm != BASELINE and (differences := pair(scores, arms.get(BASELINE, {}))):
            paired = Paired(differences)
            apart, cells = (
                paired.mean,
                [signed(paired.mean), between(paired.interval), paired.verdict],
            )
        spread = "-" if stat.spread is None else f"{stat.spread:.4f}"
        rows.append((apart, [f"`{arm}`", str(stat.count), f"{stat.mean:.4f}", spread, *cells]))
    return rows


def ablations(runs: Runs) -> str:
    """First every residual as it is, then the options of Attention Residuals: the lowest first, beside the paper's. Two
    seeds whose differences happen to agree have a narrow interval, so theirs must be above LEAST as well."""
    plain = next(float(row[2]) for _, row in _beside_plain(runs) if row[0] == f"`{BASELINE}`")
    parameters = {arm_of(run): int(run.summary["parameters"]) for run in runs if run.summary}
    at_first = {
        arm: {run.seed: at_step(run, EARLY) for run in group}
        for arm, group in by_name(runs).items()
    }
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
        verdict = row[-1]
        if row[1] == "2" and abs(apart) <= LEAST and arm != BASELINE:
            verdict = NOT_SIGNIFICANT
        rows.append([*row[:5], *cells, *row[5:-1], verdict])
    head = [*COLUMNS[:5], f"at step {EARLY}", "of plain", "paper's", "parameters", *COLUMNS[5:]]
    options = [row for row in rows if re.match("`attnres-(full|block)", row[0])]
    others = [row for row in rows if row not in options or ":" not in row[0]]
    return grid(head, others) + "\nOptions of Attention Residuals:\n\n" + grid(head, options)


def by_name(runs: Runs) -> dict[str, Runs]:
    arms: dict[str, Runs] = defaultdict(list)
    for run in (run for group in grouped(runs, "model.residual").values() for run in group):
        arms[arm_of(run)].append(run)
    return arms


def arm_of(run: RecordedRun) -> str:
    """Its residual, and what is changed around it; completep has its start by definition."""
    model = run.config["model"]
    wide = model.get("depth_start") is False and run.residual != "completep"
    around = [f"shortswa={model['shortswa']}"] * bool(model["shortswa"]) + [
        "depth_start=false"
    ] * wide
    return "+".join([run.residual, *around])


def between(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else f"{signed(interval[0])} to {signed(interval[1])}"


def _needed(arm: str, scores: dict[int | None, float], baseline: dict[int | None, float]) -> str:
    differences = pair(scores, baseline)
    if arm == BASELINE or len(differences) < 2:
        return ""
    spread = Paired(differences).stat.spread
    assert spread is not None
    rows = [[str(n), f"{reach(n) * spread:.4f}"] for n in SEEDS]
    words = (
        f"\nA paired difference of `{arm}` has a standard deviation of {spread:.4f}. "
        "Differences that are significant then:\n\n"
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
        shown = [
            str(stat or ("fails" if (key, value) in failed else "-"))
            for stat, value in zip(stats, values)
        ]
        cells[key] = [f"**{text}**" if n == best else text for n, text in enumerate(shown)]
    return crossed(down, values, cells) + (
        f"\nThe best value is the edge of what was tried, so not yet known, for: {', '.join(edges)}.\n"
        if edges
        else ""
    )


Columns = dict[tuple[Any, ...], list[Stat | None]]


def swept(
    runs: Runs, measure: Callable[[RecordedRun], float], down: str, *across: str
) -> tuple[list[float], Columns]:
    """The values of a setting; and mean and spread over seeds at each, a column for an arm and whatever else is
    varied."""
    values = sorted({setting(run, down) for run in runs})
    columns: Columns = {}
    for key, group in grouped(runs, "model.residual", *across).items():
        columns[key] = [
            summarize([measure(run) for run in finished(group) if setting(run, down) == value])
            for value in values
        ]
    return values, columns


def crossed(down: str, values: Sequence[float], cells: dict[tuple[Any, ...], list[str]]) -> str:
    head = [f"`{down}`", *(" ".join((f"`{key[0]}`", *map(str, key[1:]))) for key in cells)]
    return grid(
        head,
        [
            [f"{value:g}", *(column[n] for column in cells.values())]
            for n, value in enumerate(values)
        ],
    )


def evenness(runs: Runs, down: str, *across: str) -> str:
    """Tabulate the effective number of sources of a read, where depth weights are a softmax."""
    chosen = [run for run in runs if run.residual.startswith("attnres") and run.depth]
    if not chosen:
        return ""
    values = sorted({setting(run, down) for run in chosen})
    found = {
        key: [
            outputs_in_effect([run for run in group if setting(run, down) == value])
            for value in values
        ]
        for key, group in grouped(chosen, "model.residual", *across).items()
    }
    cells = {
        key: [", ".join(f"{stat.mean:.2f}" for stat in at) or "-" for at in column]
        for key, column in found.items()
    }
    spreads = [
        stat.spread
        for column in found.values()
        for at in column
        for stat in at
        if stat.spread is not None
    ]
    steps = ", ".join(str(record["step"]) for record in chosen[0].depth)
    even = statistics.fmean(range(1, len(chosen[0].depth[-1]["entropy"]) + 1))
    seeds = (
        f"means over reads and seeds, whose standard deviation is at most {max(spreads):.2f}"
        if spreads
        else "one seed"
    )
    words = f"\nEffective number of sources of a read (all even: {even:g}), at steps {steps}; {seeds}:\n\n"
    return words + crossed(down, values, cells)


def outputs_in_effect(runs: Runs) -> list[Stat]:
    """At each record e to the entropy of a read's weights, the mean over reads; and over seeds."""
    at = zip(
        *(
            [statistics.fmean(map(math.exp, record["entropy"])) for record in run.depth]
            for run in runs
        )
    )
    return [stat for stat in map(summarize, at) if stat]


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
        tables.append(
            f"\nWidth {width}, {layers} layers{words}:\n\n" + sweep(others, down, *across)
        )
        tables.append(evenness(finished(others), down, *across))
    return "".join(tables).lstrip()


def rates(runs: Runs) -> str:
    return by_size(runs, "optim.lr") + at_own_best(finished(runs))


def hybrid(runs: Runs) -> str:
    """The sweep; at each rate that several seeds have run the arms side by side, and their differences through
    training."""
    rates = grouped(finished(runs), "optim.lr").values()
    several = [some for some in rates if len({run.seed for run in some}) > 1]
    return by_size(runs, "optim.lr") + "".join(map(side_by_side, several))


def side_by_side(runs: Runs) -> str:
    """Of one learning rate: the arms at the end, and their differences after each evaluation."""
    steps = [row["step"] for row in runs[0].evals]
    at = {
        arm: [{run.seed: at_step(run, step) for run in some} for step in steps]
        for arm, some in by_name(runs).items()
    }
    rows = []
    for arm, scores in at.items():
        if arm != BASELINE:
            paired = [
                Paired(pair(mine, plain)) for mine, plain in zip(scores, at[BASELINE], strict=True)
            ]
            rows.append(
                [f"`{arm}`", *(f"{signed(one.mean)} ({between(one.interval)})" for one in paired)]
            )
    words = f"\nAt {setting(runs[0], 'optim.lr'):g}, and the differences after these steps:\n\n"
    return f"{words}{beside_plain(runs)}\n{grid(['', *(f'step {step}' for step in steps)], rows)}"


def at_own_best(runs: Runs) -> str:
    """Each arm at the rate that is best for it beside the plain residual at its own, for each width."""
    rows = []
    for (width, arm), best in _best_of(runs).items():
        plain = _best_of(runs).get((width, BASELINE))
        if (
            arm == BASELINE
            or plain is None
            or not (differences := pair(by_seed(best), by_seed(plain)))
        ):
            continue
        paired, own = (
            Paired(differences),
            [f"{setting(group[0], 'optim.lr'):g}" for group in (best, plain)],
        )
        cells = [signed(paired.mean), between(paired.interval), paired.verdict]
        rows.append([str(width), f"`{arm}`", *own, str(len(differences)), *cells])
    head = ["width", "", "its rate", "plain's rate", "seeds", "difference", INTERVAL, ""]
    return (
        f"\nEach at its own best rate, which is chosen on the same runs:\n\n{grid(head, rows)}"
        if rows
        else ""
    )


def _best_of(runs: Runs) -> dict[tuple[int, str], Runs]:
    best: dict[tuple[int, str], Runs] = {}
    for (width, arm, _), group in grouped(runs, "model.dim", "model.residual", "optim.lr").items():
        means = [
            statistics.fmean(map(score, some))
            for some in (group, best.get((width, arm), []) or group)
        ]
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
    for key, group in grouped(
        recorded, "model.dim", "model.layers", "optim.lr", "model.residual"
    ).items():
        cells = [
            _hundredths([measure(run.depth[-1][name]) for run in group])
            for _, name in BY_DEPTH
            for measure in (growth, slope)
        ]
        loss = str(summarize([*map(score, group)]))
        rows.append(
            [*(f"{number:g}" for number in key[:3]), f"`{key[3]}`", str(len(group)), loss, *cells]
        )
    return grid(head, rows) + through_training(recorded)


def through_training(runs: Runs) -> str:
    smallest = min(setting(run, "model.dim") for run in runs)
    chosen = [
        run
        for run in runs
        if run.residual in ARMS
        and setting(run, "model.dim") == smallest
        and setting(run, "optim.lr") == MAPPED
    ]
    steps = sorted({record["step"] for run in chosen for record in run.depth})
    rows = []
    for (layers, arm), group in grouped(chosen, "model.layers", "model.residual").items():
        for words, name in BY_DEPTH:
            at = {
                step: [growth(r[name]) for run in group for r in run.depth if r["step"] == step]
                for step in steps
            }
            rows.append([str(layers), f"`{arm}`", words, *map(_hundredths, at.values())])
    words = (
        f"\nThe same ratio through training, at width {smallest} and learning rate {MAPPED:g}:\n\n"
    )
    return (
        words + grid(["layers", "", "", *(f"step {step}" for step in steps)], rows) if rows else ""
    )


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


def importance(measured: list[dict[str, Any]]) -> str:
    """Rank correlation of weight and effect by arm and by how much text was looked at, over the whole depth and over
    thirds of it; what a rule has that knows no weights; of weight times size, and of the effect in one half of the text
    with that in the other, if these were measured."""
    parts = {"all": "all reads", "first": "first third", "middle": "middle", "last": "last third"}
    more = {"sizes": "weight times size", "halves": "split-half correlation"}
    more = {
        name: words
        for name, words in more.items()
        if any(one.get(name) is not None for one in measured)
    }
    rows = []
    for tokens in sorted({tokens_of(one) for one in measured}):
        for arm, some in _by_arm([one for one in measured if tokens_of(one) == tokens]).items():
            columns = [[one["spearman"][part] for one in some] for part in parts]
            columns += zip(*map(by_place, some))
            columns += [[one.get(name) for one in some] for name in more]
            rows.append([f"`{arm}`", str(tokens), str(len(some)), *map(_hundredths, columns)])
    head = [
        "",
        "tokens",
        "seeds",
        *parts.values(),
        "by place only",
        "weight, beside place",
        *more.values(),
    ]
    return grid(head, rows)


def sizes(measured: list[dict[str, Any]], runs: Runs) -> str:
    """On the longest text that was looked at: the effect's rank correlation with the weight, with the size of what is
    weighed, and with both multiplied."""
    last = {(run.residual, run.seed): run.depth[-1] for run in runs if run.depth}
    longest = [one for one in measured if tokens_of(one) == max(map(tokens_of, measured))]
    rows = []
    for arm, some in _by_arm(longest).items():
        alone = [by_size_alone(one, last[arm, one["seed"]]) for one in some]
        columns = [[one["spearman"]["all"] for one in some], alone, [one["sizes"] for one in some]]
        rows.append([f"`{arm}`", str(len(some)), *map(_hundredths, columns)])
    return grid(["", "seeds", "weight", "size", "weight times size"], rows)


def by_size_alone(measured: dict[str, Any], record: dict[str, Any]) -> float:
    """The mean over reads of three sources or more. Sizes are those of a depth record, on other text; the first read
    is the embedding times its weight."""
    sources = [record["read_norm"][0] / abs(record["mixing"][0][0]), *record["output_norm"]]
    rows = enumerate(measured["changes"])
    return statistics.fmean(
        spearman(sources[: i + 1], row[: i + 1]) or 0.0 for i, row in rows if i > 1
    )


def tokens_of(measured: dict[str, Any]) -> int:
    return int(measured["windows"] * measured["tokens"])


def by_place(measured: dict[str, Any]) -> tuple[float, float]:
    """Means over reads of three sources or more: the effect's rank correlation with where a source stands (the
    embedding first, then the newest), and that with its weight, given where it stands (the partial one)."""
    alone, beside = [], []
    for i, (weights, changes) in enumerate(
        zip(measured["weights"], measured["changes"], strict=True)
    ):
        if i < 2:
            continue
        place = [i + 1, *range(1, i + 1)]
        seen, known, told = (
            spearman(a, b) or 0.0
            for a, b in (
                (weights[: i + 1], changes[: i + 1]),
                (place, changes[: i + 1]),
                (weights[: i + 1], place),
            )
        )
        alone.append(known)
        if max(abs(known), abs(told)) < 1:
            beside.append((seen - told * known) / math.sqrt((1 - told**2) * (1 - known**2)))
    return statistics.fmean(alone), statistics.fmean(beside)


def hops(measured: list[dict[str, Any]]) -> str:
    """The share of right answers by arm and by the links that an answer takes."""
    rows = []
    for arm, some in _by_arm(measured).items():
        stats = [
            summarize(shares) for shares in zip(*(one["accuracy"] for one in some), strict=True)
        ]
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
    return (
        json.loads(one.read_text())
        if one.exists()
        else [json.loads(file.read_text()) for file in several]
    )
