"""The table of a comparison: its rows from the runs, and how it is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich import box
from rich.table import Table

from headwater.stats import BASELINE, Paired, Stat, limits, pair, summarize
from headwater.train.config import Config
from headwater.train.results import CompareRow, Spread, TrainResult


def tabulate(
    finished: Mapping[tuple[str, int], TrainResult],
    residuals: list[str],
    side_by_side: Mapping[str, int | None],
) -> tuple[CompareRow, ...]:
    """One row for each residual, from its finished runs by (residual, seed); the first is the baseline.
    `side_by_side`: the most runs made at a time with those of a residual."""
    results: dict[str, dict[int, TrainResult]] = {residual: {} for residual in residuals}
    for (residual, seed), result in finished.items():
        results[residual][seed] = result
    bits = {
        name: {seed: run.bits_per_byte for seed, run in mine.items()}
        for name, mine in results.items()
    }
    pairs = {name: pair(values, bits[residuals[0]]) for name, values in bits.items()}
    comparisons = sum(len(values) > 1 for name, values in pairs.items() if name != residuals[0])
    rows = []
    for name, mine in results.items():
        paired = Paired(pairs[name], comparisons) if pairs[name] and name != residuals[0] else None
        if mine:
            rows.append(
                replace(
                    row_of(name, mine),
                    difference=spread(pairs[name]),
                    pairs=len(pairs[name]),
                    interval=paired.interval if paired else None,
                    verdict=paired.verdict
                    if paired
                    else BASELINE
                    if name == residuals[0]
                    else None,
                    side_by_side=side_by_side.get(name),
                )
            )
    return tuple(rows)


def row_of(residual: str, results: Mapping[int, TrainResult]) -> CompareRow:
    """A residual by itself, compared with nothing yet."""
    first, runs = next(iter(results.values())), results.values()
    return CompareRow(
        residual=residual,
        seeds=tuple(sorted(results)),
        parameters=first.parameters,
        residual_parameters=first.residual_parameters,
        flops_per_token=first.flops_per_token,
        tokens=first.tokens,
        loss=spread([run.loss for run in runs]),
        bits_per_byte=spread([run.bits_per_byte for run in runs]),
        seconds=spread([run.seconds for run in runs]),
        peak_memory_bytes=spread([run.peak_memory_bytes for run in runs]),
    )


def spread(values: Sequence[float]) -> Spread:
    found = summarize(values)
    return Spread(found.mean, found.spread) if found else Spread(None, None)


def draw(rows: Sequence[CompareRow], config: Config) -> Table:
    seeds = max((len(row.seeds) for row in rows), default=0)
    tokens = max((row.tokens for row in rows), default=0)
    over = "one seed" if seeds == 1 else f"mean ± standard deviation of {seeds} seeds"
    title = f"{config.train.steps} steps, {tokens:,} tokens, {over}"
    # Narrow gaps: the table fits 80 columns, and only a residual's name may be folded.
    table = Table(
        title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.caption, table.caption_justify = _caption(rows), "left"
    table.add_column("residual", overflow="fold", min_width=13)
    for name in ("bits/byte", "difference", "params", "FLOPs", "seconds", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.residual,
            _plus_minus(row.bits_per_byte, ".4f"),
            _difference(row),
            _short(row.parameters),
            _short(row.flops_per_token),
            _plus_minus(row.seconds, ".0f"),
            f"{(row.peak_memory_bytes.mean or 0) / 2**20:.0f}",
        )
    return table


def _caption(rows: Sequence[CompareRow]) -> str:
    judged = [row for row in rows if row.interval]
    words = "bits/byte on held-out text; FLOPs per token; difference to the first row, seed by seed"
    if judged:
        corrected = f" ({len(judged)} residuals at once, Bonferroni)" if len(judged) > 1 else ""
        words += f", ± its 95 % interval{corrected}"
    counts = [row.side_by_side for row in rows]
    if None in counts:
        words += "; seconds are not comparable: how many runs were made side by side is unknown"
    elif (most := max(filter(None, counts), default=1)) > 1:
        words += f"; seconds are not comparable: up to {most} runs were made at a time"
    fewest = min((row.pairs for row in rows if row.verdict not in (None, BASELINE)), default=0)
    return f"{words}.\n{limits(fewest, len(judged))}" if fewest else words


def _difference(row: CompareRow) -> str:
    if row.difference.mean is None or row.verdict == BASELINE:
        return row.verdict or "-"
    shown = Stat(row.difference.mean, None, 1).text(sign="+")
    if row.interval is None:
        return f"{shown} {row.verdict}"
    low, high = row.interval
    return f"{shown} ± {(high - low) / 2:.4f}\n{row.verdict}"


def _plus_minus(value: Spread, form: str) -> str:
    return "-" if value.mean is None else Stat(value.mean, value.spread, 0).text(form)


def _short(count: float) -> str:
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.4g}{unit}"
        count /= 1000
    return f"{count:.4g}T"
