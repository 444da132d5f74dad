"""The report's table under the maps: its measures are those of the recorded matrices."""

import json

import pytest
from runfolder import make_comparison, make_run, words_of
from tinymodels import model_of

import headwater
from headwater.analyze.mixing_table import square
from headwater.analyze.prompted import prompted_run
from headwater.analyze.report import write_report


def test_a_triangle_becomes_its_matrix():
    assert square([1.0, 2.0, 3.0, 4.0, None, 6.0]).tolist() == [[1, 0, 0], [2, 3, 0], [4, 0, 6]]


def test_measures_are_those_of_the_recorded_maps(tmp_path):
    residuals = ["standard", "attnres-block", "not-here"]
    folder = make_comparison(tmp_path / "compare", residuals, [0], layers=2, steps=20)
    words = words_of(write_report([folder]))
    # Five rows of ones: sums 1 to 5, entropies log 1 to log 5, distances 0 to 2, and one stream
    # carries everything. A residual whose module is not here has its measures all the same.
    for name, kind in (("standard", "scalar"), ("not-here", "—")):
        assert f"{name} {kind} 3.00 0.96 3.00 1.00 1 " in words
    lines = (folder / "runs/1-seed0/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if '"depth"' in line][-1]["mixing"]
    total = sum(sum(row) for row in rows) / len(rows)
    assert f"attnres-block scalar {total:.2f} " in words


@pytest.mark.parametrize("beside", [True, False])
def test_a_run_without_depth_records_has_a_row_if_another_run_has_a_map(tmp_path, beside):
    make_run(tmp_path / "bare", depth=False, layers=2, steps=5)
    make_run(tmp_path / "mapped", "attnres-full", depth=beside, layers=2, steps=5)
    page = write_report([tmp_path])
    assert ("standard — — — — — —" in words_of(page)) == beside
    assert ('id="mixing"' in page.read_text()) == beside


def test_a_model_that_read_a_prompt_has_what_it_has_and_its_notes_end_once(tmp_path):
    inspection = headwater.inspect(model_of("attnres-full"), [1, 2, 3], removals="none")
    model = prompted_run(inspection, dim=32, layers=4)
    words = words_of(write_report([], tmp_path / "m.html", models=[model]))
    assert "attnres-full scalar 1.00 " in words
    assert "so they mean nothing yet." in words
    assert "yet.." not in words
    assert "Model 4 layers, width 32 Tokens 3 per run" in words  # no corpus, no optimizer
