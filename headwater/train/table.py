"""The table of a comparison: its rows from the runs, and the table that is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from headwater.runs.results import CompareRow, Spread, TrainResult
from headwater.runs.stats import BASELINE, Stat, judge, limits, pair, summarize
from headwater.runs.tables import Table


def tabulate(
    finished: Mapping[tuple[str, int], TrainResult],
    residuals: Sequence[str],
    side_by_side: Mapping[str, int | None],
) -> tuple[CompareRow, ...]:
    """One row for each residual, from its finished runs by (residual, seed); the first is the baseline.

    `side_by_side`: the most runs made at a time with the runs of a residual.
    """
    # Runs by residual and seed; runs of one seed are compared in pairs.
    results: dict[str, dict[int, TrainResult]] = {residual: {} for residual in residuals}
    for (residual, seed), result in finished.items():
        results[residual][seed] = result

    # Verdicts are by pairs of seeds, for all residuals at once.
    bits: dict[str, dict[int, float]] = {}
    for residual, by_seed in results.items():
        bits[residual] = {seed: run.bits_per_byte for seed, run in by_seed.items()}
    baseline = residuals[0]
    verdicts = judge(bits, dict.fromkeys(residuals, baseline))

    rows = []
    for residual, by_seed in results.items():
        if not by_seed:
            continue
        row = replace(row_of(residual, by_seed), side_by_side=side_by_side.get(residual))
        if residual == baseline:
            # Its difference to itself is zero, for each seed that it has.
            zeros = pair(bits[residual], bits[residual])
            row = replace(row, difference=spread(zeros), pairs=len(zeros), verdict=BASELINE)
        elif residual in verdicts:
            paired = verdicts[residual]
            row = replace(
                row,
                difference=spread(paired.values),
                pairs=len(paired.values),
                interval=paired.interval,
                verdict=paired.verdict,
            )
        rows.append(row)
    return tuple(rows)


def row_of(residual: str, results: Mapping[int, TrainResult]) -> CompareRow:
    """A residual by itself, not compared with any other."""
    runs = list(results.values())
    return CompareRow(
        residual=residual,
        seeds=tuple(sorted(results)),
        parameters=runs[0].parameters,
        residual_parameters=runs[0].residual_parameters,
        flops_per_token=runs[0].flops_per_token,
        tokens=runs[0].tokens,
        loss=spread([run.loss for run in runs]),
        bits_per_byte=spread([run.bits_per_byte for run in runs]),
        seconds=spread([run.seconds for run in runs]),
        peak_memory_bytes=spread([run.peak_memory_bytes for run in runs]),
    )


def spread(values: Sequence[float]) -> Spread:
    stat = summarize(values)
    return Spread(stat.mean, stat.spread) if stat else Spread(None, None)


def table_of(rows: Sequence[CompareRow], steps: int) -> Table:
    """The table that `headwater compare` prints."""
    # Residuals may have different numbers of finished runs.
    seeds = max((len(row.seeds) for row in rows), default=0)
    tokens = max((row.tokens for row in rows), default=0)
    over = "one seed" if seeds == 1 else f"mean ± standard deviation of {seeds} seeds"
    lines = []
    for row in rows:
        memory = row.peak_memory_bytes.mean or 0
        lines.append(
            [
                row.residual,
                _plus_minus(row.bits_per_byte, ".4f"),
                _difference(row),
                _short(row.parameters),
                _short(row.flops_per_token),
                _plus_minus(row.seconds, ".0f"),
                f"{memory / 2**20:.0f}",
            ]
        )
    # Several intervals are made wider, so that all of them hold together.
    judged = sum(row.interval is not None for row in rows)
    difference = "difference" if judged < 2 else f"difference\n95 % for all {judged}"
    columns = ("residual", "bits/byte", difference, "params", "FLOPs", "seconds", "MiB")
    title = f"{steps} steps, {tokens:,} tokens, {over}"
    return Table(columns, lines, title=title, caption=_caption(rows))


def _caption(rows: Sequence[CompareRow]) -> str:
    judged = sum(row.interval is not None for row in rows)
    words = "bits/byte on held-out text; FLOPs per token; difference to the first row, seed by seed"
    if judged:
        words += ", ± its 95 % interval"
    if judged > 1:
        words += f" (corrected for {judged} residuals at once, Bonferroni)"

    # Seconds of runs that shared the machine say how busy it was.
    counts = [row.side_by_side for row in rows]
    largest = max((count for count in counts if count is not None), default=1)
    if None in counts:
        words += "; seconds are not comparable: how many runs were made side by side is unknown"
    elif largest > 1:
        words += f"; seconds are not comparable: up to {largest} runs were made at a time"

    # With few seeds only a large difference can be told from chance.
    rivals = [row for row in rows if row.verdict not in (None, BASELINE)]
    if rivals:
        fewest = min(row.pairs for row in rivals)
        words += f".\n{limits(fewest, judged)}"
    return words


def _difference(row: CompareRow) -> str:
    if row.difference.mean is None or row.verdict == BASELINE:
        return row.verdict or "-"
    mean = Stat(row.difference.mean, None, 1).text(sign="+")
    if row.interval is None:
        return f"{mean} {row.verdict}"
    # The interval is symmetric about its mean.
    low, high = row.interval
    # The longer verdict takes two lines, so that the table fits into 80 columns.
    verdict = (row.verdict or "").replace(" difference", "\ndifference")
    return f"{mean} ± {(high - low) / 2:.4f}\n{verdict}"


def _plus_minus(value: Spread, form: str) -> str:
    return "-" if value.mean is None else Stat(value.mean, value.spread, 0).text(form)


def _short(count: float) -> str:
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.4g}{unit}"
        count /= 1000
    return f"{count:.4g}T"
