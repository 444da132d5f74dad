"""The page of depth-mixing maps: the measures it prints are those of the recorded matrices."""

import json
import re

import pytest
from processes import python
from runfolder import make_comparison, make_run
from tinymodels import model_of

import headwater
from headwater.analyze.matrix import square, write_matrix
from headwater.analyze.prompted import prompted_run
from headwater.cli import main
from headwater.errors import UserError


def words_of(page):
    return " ".join(
        re.sub(
            r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
        ).split()
    )


def test_a_triangle_becomes_its_matrix():
    assert square([1.0, 2.0, 3.0, 4.0, None, 6.0]).tolist() == [[1, 0, 0], [2, 3, 0], [4, 0, 6]]


def test_measures_are_those_of_the_recorded_maps(tmp_path):
    folder = make_comparison(
        tmp_path / "compare", ["standard", "attnres-block"], [0], layers=2, steps=20
    )
    page = write_matrix([folder])
    assert page == folder / "matrix.html"
    words = words_of(page.read_text())
    # Five rows of ones: sums 1 to 5, entropies log 1 to log 5, distances 0 to 2, and one stream carries everything.
    assert "standard scalar 3.00 0.96 3.00 1.00 1 " in words
    lines = (folder / "runs/1-seed0/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if '"depth"' in line][-1]["mixing"]
    total = sum(sum(row[: r + 1]) for r, row in enumerate(rows)) / len(rows)
    assert f"attnres-block scalar {total:.2f} " in words


@pytest.mark.browser
def test_measures_are_sorted_and_downloaded(visit, tmp_path):
    folder = make_comparison(
        tmp_path / "compare", ["standard", "muddformer", "attnres-full"], [0], layers=2, steps=20
    )
    page = visit(write_matrix([folder]))
    page.get_by_role("button", name="Mixes", exact=True).click()
    names = page.eval_on_selector_all("#table tbody th", "all => all.map(head => head.textContent)")
    mixes = page.eval_on_selector_all(
        "#table tbody td:nth-child(2)", "all => all.map(cell => cell.textContent)"
    )
    assert mixes == sorted(mixes)
    assert len(set(names)) == 3
    page.get_by_role("button", name="Row sum", exact=True).click()
    sums = [float(cell) for cell in page.locator("#table tbody td:nth-child(3)").all_inner_texts()]
    assert sums == sorted(sums)
    assert page.locator("#table tbody th").first.inner_text() == "attnres-full"  # sums of one
    with page.expect_download() as caught:
        page.locator('.save[data-save="table"]').get_by_text("CSV").click()
    lines = caught.value.path().read_text().splitlines()
    assert (
        lines[0]
        == "Residual,Mixes,Row sum,Entropy,Effective sources,Effective depth,Rank across depth"
    )
    assert any(line.startswith("standard,scalar,3,") for line in lines)
    assert not page.locator("#thumbnail").is_visible()
    assert (
        page.locator("#kinds")
        .inner_text()
        .startswith("Marks beside the rows and under the columns:")
    ), "no charts"
    assert page.locator("#kinds rect").count() == 2, "a bar for each kind, as beside the rows"
    assert not page.locator("#kinds circle").count()


def test_a_run_without_depth_records_has_a_row_all_the_same(tmp_path):
    make_run(tmp_path / "bare", depth=False)
    assert "standard — — — — — —" in words_of(
        write_matrix([tmp_path / "bare"], tmp_path / "m.html").read_text()
    )


def test_a_model_that_read_a_prompt_has_what_it_has_and_its_notes_end_once(tmp_path):
    found = headwater.inspect(model_of("attnres-full"), [1, 2, 3], removals="none")
    page = write_matrix([], tmp_path / "m.html", models=[prompted_run(found, dim=32, layers=4)])
    words = words_of(page.read_text())
    assert "so they mean nothing yet." in words
    assert "yet.." not in words
    assert "Model 4 layers, width 32 Tokens 3 per run" in words  # no corpus, no optimizer


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError):
        write_matrix([tmp_path])
    assert main(["matrix", str(tmp_path)]) == 1


def test_the_residuals_command_prints_each_asked_for(capsys):
    assert main(["residuals", "highway", "attnres-block:block=2", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "| `highway` |" in out
    assert "| `attnres-block:block=2` |" in out
    assert main(["residuals", "highvay"]) == 1
    assert "Did you mean 'highway'?" in capsys.readouterr().err


def test_the_residuals_table_fits_eighty_columns():
    names = ["standard", "mhc", "hyper-connections"]
    out = python("-m", "headwater", "residuals", *names, env={"COLUMNS": "80"})
    table = out.partition("traffic: passes")[0].splitlines()
    assert max(map(len, table)) <= 80
    head, _, *rows = [line.split() for line in table[1:] if line]
    assert head == ["residual", "parameters", "stored", "fused", "eager", "paper", "at", "start"]
    assert [row[0] for row in rows] == names
    assert all(len(row) == 7 for row in rows), "beside each other, none cut"
