"""The table of residuals is measured: known entries come out as known."""

import pytest

from headwater.analyze.markup import count, duration, memory
from headwater.analyze.table import markdown, paper_traffic, residual_table
from headwater.cli import main
from headwater.residuals import build, names

DIM, LAYERS = 32, 4


@pytest.fixture(scope="module")
def rows():
    specs = [*names(), "hyper-connections:streams=2,form=static", "attnres-full:window=2"]
    return {row.name: row for row in residual_table(specs, dim=DIM, layers=LAYERS)}


def test_the_plain_residual_moves_three_passes_and_stores_one(rows):
    row = rows["standard"]
    assert (row.parameters, row.stored, row.least, row.eager, row.at_start) == (0, 1, 3, 3, "exact")
    assert row.formula.startswith("h_{i+1} = h_i + f_i(h_i)")


def test_attention_residuals_read_every_source(rows):
    sources = [i + 1 for i in range(2 * LAYERS)]
    # A read of one source is that source; a write stores its input
    moved = sum(n + 1 for n in sources if n > 1)
    assert rows["attnres-full"].least == pytest.approx(moved / (2 * LAYERS))
    assert rows["attnres-full"].stored == 2 * LAYERS + 1
    assert rows["attnres-full:window=2"].stored == 3


def test_streams_are_counted_once(rows):
    """Read n streams, write one input; read n streams and an output, write n: (3 n + 2) D, and small coefficients."""
    assert rows["hyper-connections:streams=2,form=static"].stored == pytest.approx(2, abs=0.5)
    n = 4
    assert rows["mhc"].least == pytest.approx(3 * n + 2, rel=0.15)


def test_the_paper_s_column_is_its_table_of_traffic():
    """Table 1: L = 128, N = 8, S = 16, m = 4. Blocks of 16 are what 128 sublayers have by default; Full is read in
    spans of 8 here and of 16 there, which comes to the same."""
    wide = {
        "standard": 3,
        "attnres-block": 5.5,
        "attnres-full": 24,
        "mhc": 34,
        "hyper-connections": 34,
    }
    for spec, passes in wide.items():
        small = (2 * 16 + 4 * 4) / 4096 if passes == 34 else 0
        assert paper_traffic(build(spec, 4096, 128)) == pytest.approx(passes + small), spec
    assert paper_traffic(build("mhc:streams=2", 16, 4)) == 18 + 16 / 16
    assert paper_traffic(build("attnres-block:block=3", 16, 12)) == 4 / 3 + 5
    for spec in (
        "attnres-full:window=2",
        "attnres-full:query=projected",
        "attnres-full:heads=2",
        "ddl",
        "rezero",
    ):
        assert paper_traffic(build(spec, 16, 8)) is None, spec


def test_each_row_has_a_formula_of_its_own(rows):
    formulas = [rows[name].formula for name in names()]
    assert all(formulas)
    assert len(set(formulas)) == len(formulas)
    assert "finished block sums" in rows["attnres-block"].formula
    assert "every output" in rows["attnres-full"].formula


def test_every_column_of_traffic_says_what_it_counts(capsys):
    assert main(["residuals", "mhc"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    for words in (
        "fused: the least for one kernel a read and one a write",
        "eager: operator by operator",
        "paper: by table 1 of arXiv 2603.15031",
        "at start: exact is the plain residual; scaled is it up to a factor",
    ):
        assert words in output


def test_parameters_are_in_units_of_the_width(rows):
    assert rows["layerscale"].parameters == 1
    assert rows["rezero"].parameters == 1 / DIM


def test_numbers_are_written_in_their_units():
    assert [count(n) for n in (None, 7, 999, 1000, 12_345, 999_900, 2_500_000, 3e9, 4e12)] == [
        "—", "7", "999", "1 k", "12.3 k", "1000 k", "2.5 M", "3 B", "4 T",
    ]  # fmt: skip
    assert [duration(s) for s in (None, 5, 59.96, 61, 3599, 3600, 5430, 90_000)] == [
        "—", "5.0 s", "60.0 s", "1 min 01 s", "59 min 59 s", "1 h 00 min", "1 h 30 min", "25 h 00 min",
    ]  # fmt: skip
    assert [memory(b) for b in (None, 5 * 2**20, 2**30, 3 * 2**29)] == [
        "—",
        "5 MiB",
        "1.00 GiB",
        "1.50 GiB",
    ]


def test_markdown_has_a_line_for_every_residual(rows):
    lines = markdown(list(rows.values())).splitlines()
    assert len(lines) == len(rows) + 2
    assert all(line.count(" | ") == 7 for line in lines[2:])
