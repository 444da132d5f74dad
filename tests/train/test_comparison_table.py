"""The table of a comparison: means with their spread, and differences by pairs of seeds."""

import os
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from headwater.runs.tables import print_table
from headwater.train import CompareResult, Spread, TrainResult
from headwater.train.table import spread, table_of, tabulate

RESULT = {
    "parameters": 1000, "residual_parameters": 10, "flops_per_token": 6000, "tokens": 64, "steps": 4,
    "seconds": 2.0, "peak_memory_bytes": 2**20, "device": "cpu", "torch": "2.10.0", "headwater": "0.1.0",
}  # fmt: skip


def result(residual: str, seed: int, bits: float, **values) -> TrainResult:
    numbers = {**RESULT, "loss": bits, "bits_per_byte": bits, **values}
    return TrainResult(folder=Path(residual), residual=residual, seed=seed, **numbers)


def printed(rows) -> str:
    with open(os.devnull, "w") as nowhere:
        console = Console(width=80, record=True, file=nowhere)
        print_table(table_of(rows, 12), console)
        return " ".join(console.export_text().split())


def test_rows_have_mean_spread_and_paired_difference():
    finished = {}
    for name, bits in {"standard": [3.0, 4.0], "attnres-full": [2.5, 3.7]}.items():
        for seed, value in enumerate(bits):
            finished[name, seed] = result(name, seed, value)
    rows = tabulate(finished, ["standard", "attnres-full", "attnres-block"], {})
    assert [row.residual for row in rows] == ["standard", "attnres-full"]
    assert [row.seeds for row in rows] == [(0, 1)] * 2
    assert asdict(rows[0].bits_per_byte) == pytest.approx({"mean": 3.5, "spread": 0.5**0.5})
    assert asdict(rows[1].difference) == pytest.approx({"mean": -0.4, "spread": 0.02**0.5})
    assert rows[1].interval == pytest.approx((-1.6706205, 0.8706205))
    assert [row.verdict for row in rows] == ["baseline", "no significant difference"]
    text = printed(rows)
    assert "3.5000 ± 0.7071" in text
    assert "1k 6k" in text  # parameters, operations
    assert "−0.4000 ± 1.2706" in text  # Student's t of one degree of freedom, 12.706, times 0.1
    assert "With 2 seeds, a difference is significant if it exceeds 9 times" in text
    assert "how many runs were made side by side is unknown" in text
    unpaired = {("attnres-full", 0): finished["attnres-full", 0]}
    (row,) = tabulate(unpaired, ["standard", "attnres-full"], {})
    assert row.verdict is None
    assert spread([2.0]) == Spread(2.0, None)
    assert table_of((), 12).rows == []


def test_a_row_has_the_mean_of_each_of_its_numbers(tmp_path):
    """Each number differs from the others, so that none can stand for another."""
    numbers = {
        "loss": (2.0, 4.0),
        "bits_per_byte": (1.0, 1.5),
        "seconds": (10.0, 20.0),
        "peak_memory_bytes": (100, 300),
    }
    counts = {"tokens": 64, "parameters": 70, "residual_parameters": 7, "flops_per_token": 700}
    finished = {}
    for seed in (0, 1):
        values = {key: pair[seed] for key, pair in numbers.items()}
        finished["ddl", seed] = result("ddl", seed, 0.0, **counts, **values)
    rows = tabulate(finished, ["ddl"], {"ddl": 3})
    (row,) = rows
    for key, (one, other) in numbers.items():
        expected = {"mean": (one + other) / 2, "spread": (other - one) / 2**0.5}
        assert asdict(getattr(row, key)) == pytest.approx(expected), key
    assert {key: getattr(row, key) for key in counts} == counts
    assert (row.seeds, row.side_by_side, row.pairs) == ((0, 1), 3, 2)
    assert "up to 3 runs were made at a time" in printed([row])
    # table.json has the keys that readers know.
    (values,) = CompareResult(folder=tmp_path, rows=rows, runs=()).table()
    known = (
        "residual seeds parameters residual_parameters flops_per_token tokens loss bits_per_byte"
    )
    known += " seconds peak_memory_bytes difference pairs interval verdict side_by_side"
    assert list(values) == known.split()
