"""The page of odd inputs: phones, dark screens, hostile names, runs that broke off, diverged or recorded little."""

import math
import re
from pathlib import Path

import pytest
from runfolder import RESIDUALS, change_rows, make_comparison, make_run, rewrite

from headwater.analyze.report import write_report

pytestmark = pytest.mark.browser

HOSTILE = "<script>alert(1)</script>"
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
PIXEL = "[...document.querySelector('#maps canvas').getContext('2d').getImageData(3, 3, 1, 1).data]"


@pytest.mark.parametrize("layers", [6, 48])
def test_phone_does_not_scroll_sideways(visit, tmp_path, layers):
    folder = make_comparison(tmp_path / "c", RESIDUALS, [0], layers=layers, steps=20, records=1)
    page = visit(write_report([folder]), **PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("Math.round(visualViewport.width)") == 390
    ends = "all => Math.max(...all.map((svg) => svg.getBoundingClientRect().right))"
    assert page.eval_on_selector_all(".chart svg", ends) <= 390


def test_dark_mode_changes_page_and_maps(visit, written):
    backgrounds, cells = [], []
    for scheme in ("light", "dark"):
        page = visit(written, color_scheme=scheme)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        backgrounds.append(max(int(value) for value in re.findall(r"\d+", colour)))
        cells.append(sum(page.evaluate(PIXEL)[:3]))
    assert backgrounds[0] == 255
    assert backgrounds[1] < 64
    assert cells[0] < 300 < cells[1]  # a weight of one stands out from either page


def test_names_are_text(visit, tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(2)>"
    make_run(folder, HOSTILE, layers=2, steps=20)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"mlp"', '"</script><b id=planted>"'))
    other = make_run(tmp_path / "plain", "standard", layers=2, steps=20)
    page = visit(write_report([folder, other], tmp_path / "r.html"))
    assert page.locator("h1").inner_text() == f"{HOSTILE} against standard"
    assert page.locator(".loss .legend").inner_text().splitlines()[-1] == HOSTILE
    assert page.title() == f"{HOSTILE} against standard · headwater"
    assert page.locator("#planted").count() == 0
    for summary in page.locator("summary").all():
        summary.click()
    assert "<img src=x onerror=alert(2)>" in page.locator("footer").inner_text()
    assert "</script><b id=planted>" in page.locator("#reads").inner_text()


def without_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()


def with_nulls(folder: Path) -> None:
    """Write the records of a run that diverged: nulls in curves, and in one depth record."""

    def null(row: dict) -> dict:
        if row["kind"] == "depth":
            row["gradient_norm"] = [None] * len(row["gradient_norm"])
            row["mixing"][2][1] = math.nan  # json writes NaN, and reads it back
        elif row["step"] > 10:
            row["loss"] = None
        return row

    change_rows(folder, null)
    rewrite(folder / "summary.json", loss=None, bits_per_byte=None, peak_memory_bytes=None)


def cut_summary(folder: Path) -> None:
    (folder / "summary.json").write_text('{"residual": "stand')


@pytest.mark.parametrize(
    ("settings", "damage", "words"),
    [
        ({"depth": False}, None, "No depth records"),
        ({"evals": False}, None, "No evaluation was recorded"),
        ({"finished": False}, None, "unfinished"),
        ({}, without_metrics, "no metrics were recorded"),
        ({}, with_nulls, "Not recorded"),
        ({}, cut_summary, "summary.json cannot be read"),
        ({"steps": 1}, None, "There is nothing to subtract"),
    ],
)
def test_missing_pieces_are_noted(visit, tmp_path, settings, damage, words):
    shape = {"layers": 2, "steps": 20, "records": 1}
    folder = make_run(tmp_path / "run", "standard", **shape | settings)
    if damage:
        damage(folder)
    page = visit(write_report([folder]))
    assert words in page.locator("main").inner_text()
    assert "NaN" not in page.locator("main").inner_html()
    if damage is with_nulls:  # a missing loss is a gap
        path = page.locator("#train path.mean").get_attribute("d")
        assert len(re.findall("[ML]", path)) == 10


def test_residuals_with_and_without_depth_records_share_a_page(visit, tmp_path):
    full = make_run(tmp_path / "a", "attnres-full", layers=2, steps=20)
    bare = make_run(tmp_path / "b", "standard", layers=2, steps=20, depth=False, finished=False)
    page = visit(write_report([full, bare], tmp_path / "r.html"))
    assert page.locator("#maps canvas").count() == 1
    assert page.locator("#maps .empty").inner_text() == "No depth records."
    assert "no finished seed in common" in page.locator("#table").inner_text()


def test_large_weights_do_not_fade_the_map_and_negative_ones_have_a_colour(visit, tmp_path):
    large = make_run(tmp_path / "large", "attnres-full", layers=16, steps=4, records=1)
    scale = visit(write_report([large])).locator("#scale").text_content()
    # The first read's only weight is one, and lies beyond the scale.
    assert 0.1 < float(scale.rsplit("≥ ", 1)[1]) < 0.95

    def negative(row: dict) -> dict:
        if row["kind"] == "depth":
            row["mixing"][0][0] = -1.0
        return row

    folder = make_run(tmp_path / "run", "hyper", layers=2, steps=20, records=1)
    change_rows(folder, negative)
    page = visit(write_report([folder]))
    red, _, blue, _ = page.evaluate(PIXEL)
    assert red > blue
    assert "−1" in page.locator("#scale").text_content()
