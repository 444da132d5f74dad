"""The page of odd inputs: phones, dark screens, hostile names, runs that broke off, diverged or recorded little."""

import json
import math
import re
from pathlib import Path

import pytest
from runfolder import make_comparison, make_run

from headwater.analyze.report import write_report

pytestmark = pytest.mark.browser

RESIDUALS = ["standard", "attnres-block:block=4", "attnres-full"]
HOSTILE = "<script>alert(1)</script>"
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("layers", [6, 48])
def test_phone_does_not_scroll_sideways(visit, comparison, tmp_path, layers):
    folder = (
        comparison
        if layers == 6
        else make_comparison(tmp_path / "deep", RESIDUALS, [0], layers=layers, steps=20, records=1)
    )
    page = visit(write_report([folder], tmp_path / "r.html"), **PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("Math.round(visualViewport.width)") == 390
    assert page.evaluate(
        "[...document.querySelectorAll('.chart svg')].every(svg => svg.getBoundingClientRect().right <= 390)"
    )


def test_dark_mode_changes_page_and_maps(visit, written):
    looks = []
    for scheme in ("light", "dark"):
        page = visit(written, color_scheme=scheme)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        pixel = page.evaluate(
            "[...document.querySelector('#maps canvas').getContext('2d').getImageData(3, 3, 1, 1).data]"
        )
        looks.append((background, sum(pixel[:3])))
    (light, dark_cell), (dark, light_cell) = looks
    assert light == "rgb(255, 255, 255)"
    assert max(int(value) for value in re.findall(r"\d+", dark)) < 64
    assert dark_cell < 300 < light_cell  # a weight of one stands out from either page


def test_names_are_text(visit, tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(2)>"
    make_run(folder, HOSTILE, layers=2, steps=20)
    lines = (folder / "metrics.jsonl").read_text().replace('"mlp"', '"</script><b id=planted>"')
    (folder / "metrics.jsonl").write_text(lines)
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


def emptied(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("")


def with_nulls(folder: Path) -> None:
    """As a run that diverged leaves it: nulls in curves, and in one depth record."""
    kept = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in kept:
        if row["step"] > 10 and row["kind"] != "depth":
            row["loss"] = None
        elif row["kind"] == "depth":
            row["gradient_norm"] = [None] * len(row["gradient_norm"])
            row["mixing"][2][1] = math.nan  # json writes NaN, and reads it back
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    rewrite(folder / "summary.json", loss=None, bits_per_byte=None, peak_memory_bytes=None)


def cut_summary(folder: Path) -> None:
    (folder / "summary.json").write_text('{"residual": "stand')


@pytest.mark.parametrize(
    ("settings", "damage", "said"),
    [
        ({"depth": False}, None, "No depth records"),
        ({"evals": False}, None, "No evaluation was recorded"),
        ({"finished": False}, None, "unfinished"),
        ({}, without_metrics, "no metrics were recorded"),
        ({}, emptied, "no metrics were recorded"),
        ({}, with_nulls, "Not recorded"),
        ({}, cut_summary, "summary.json cannot be read"),
        ({"steps": 1}, None, "There is nothing to subtract"),
    ],
)
def test_missing_pieces_are_noted(visit, tmp_path, settings, damage, said):
    folder = make_run(
        tmp_path / "run", "standard", **({"layers": 2, "steps": 20, "records": 1} | settings)
    )
    if damage:
        damage(folder)
    page = visit(write_report([folder]))
    assert said in page.locator("main").inner_text()
    assert "NaN" not in page.locator("main").inner_text()
    assert page.locator("main").inner_html().count("NaN") == 0


def test_a_missing_value_is_a_gap(visit, tmp_path):
    folder = make_run(tmp_path / "run", "standard", layers=2, steps=20)
    with_nulls(folder)  # no loss after step 10
    page = visit(write_report([folder]))
    assert len(re.findall("[ML]", page.locator("#train path.mean").get_attribute("d"))) == 10


def test_residuals_with_and_without_depth_records_share_a_page(visit, tmp_path):
    full = make_run(tmp_path / "a", "attnres-full", layers=2, steps=20)
    bare = make_run(tmp_path / "b", "standard", layers=2, steps=20, depth=False, finished=False)
    page = visit(write_report([full, bare], tmp_path / "r.html"))
    assert page.locator("#maps canvas").count() == 1
    assert page.locator("#maps .empty").inner_text() == "No depth records."
    assert "no finished seed in common" in page.locator("table").first.inner_text()


def test_few_large_weights_do_not_fade_the_map(visit, tmp_path):
    page = visit(
        write_report([make_run(tmp_path / "run", "attnres-full", layers=16, steps=4, records=1)])
    )
    words = page.locator("#scale").text_content()
    assert (
        0.1 < float(words.rsplit("≥ ", 1)[1]) < 0.95
    )  # the first read's only weight is one, and lies beyond the scale


def test_negative_weights_get_their_own_colour(visit, tmp_path):
    folder = make_run(tmp_path / "run", "hyper", layers=2, steps=20, records=1)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in lines:
        if row["kind"] == "depth":
            row["mixing"][0][0] = -1.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    page = visit(write_report([folder]))
    red, _, blue = page.evaluate(
        "[...document.querySelector('#maps canvas').getContext('2d').getImageData(3, 3, 1, 1).data]"
    )[:3]
    assert red > blue
    assert "−1" in page.locator("#scale").text_content()
