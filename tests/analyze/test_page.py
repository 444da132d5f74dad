"""How the report behaves in headless Chromium: what is drawn, hovered, touched, sorted, downloaded, and kept inert."""

import base64
import csv
import io
import json
import re
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from runfolder import make_comparison, make_run
from tinymodels import model_of

import headwater
from headwater.analyze.matrix import write_matrix
from headwater.analyze.prompted import prompted_run
from headwater.analyze.report import write_report

pytestmark = pytest.mark.browser

RESIDUALS = ["standard", "attnres-block:block=4", "attnres-full"]
SEEDS = [0, 1, 2]
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def rows(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for line in lines if (row := json.loads(line))["kind"] == kind]


def hover(page, selector: str, x: float, y: float) -> str:
    """Move the pointer to (x, y) inside the element and return what the page says there."""
    page.locator(selector).scroll_into_view_if_needed()
    box = page.locator(selector).bounding_box()
    page.mouse.move(box["x"] + x, box["y"] + y)
    return page.locator("#tip").inner_text() if page.locator("#tip").is_visible() else ""


def test_draws_every_curve_map_and_panel(visit, written):
    page = visit(written)
    assert page.locator("#eval path.mean").count() == 3
    assert page.locator("#eval path.thin").count() == 9
    assert page.locator("#train path.mean").count() == 3
    assert page.locator("#difference path.mean").count() == 2  # the baseline is the zero line
    assert all("L" in path.get_attribute("d") for path in page.locator(".chart path.mean").all())
    cells = page.eval_on_selector_all(
        "#maps canvas", "all => all.map(canvas => Number(canvas.dataset.cells))"
    )
    assert cells == [13 * 14 // 2] * 3  # 12 sublayers: 13 reads over a triangle
    for measure in ("output", "read", "gradient", "entropy"):
        assert page.locator(f"#measure-{measure} svg").count() == 3
    assert page.locator("#measure-read .panel").first.locator(".dot").count() == 13
    assert page.locator("#measure-output .panel").first.locator(".dot").count() == 12


def test_models_that_read_a_prompt_have_no_results_and_no_section_about_loss(
    visit, comparison, tmp_path
):
    found = headwater.inspect(model_of("attnres-full"), [1, 2, 3], name="mine", removals="none")
    model = prompted_run(found, dim=32, layers=4)
    page = visit(write_report([], tmp_path / "alone.html", models=[model]))
    none = "No losses are shown: there are no records of training here."
    assert [page.locator(part).is_visible() for part in (".loss", "#results", "#table")] == [
        False
    ] * 3
    assert page.get_by_text(none).is_visible()
    assert page.locator("#maps canvas").count() == 1
    page = visit(write_matrix([], tmp_path / "matrix.html", models=[model]))
    assert page.locator("#table").is_visible()
    archived = make_run(tmp_path / "archived", "standard", 0)
    (archived / "metrics.jsonl").unlink()  # its result is left
    page = visit(write_report([archived]))
    assert [page.locator(part).is_visible() for part in (".loss", "#results", "#table")] == [
        False,
        True,
        True,
    ]
    assert not page.get_by_text(none).count()
    page = visit(write_report([comparison], tmp_path / "beside.html", models=[model]))
    assert page.locator(".loss").is_visible()
    assert page.locator("#eval path.mean").count() == 3


def test_hover_shows_the_recorded_values(visit, comparison, written):
    page = visit(written)
    width = page.locator("#eval svg").bounding_box()["width"]
    last = [rows(comparison / "runs" / f"2-seed{seed}", "eval")[-1]["loss"] for seed in SEEDS]
    said = hover(page, "#eval svg", width - 11, 100)
    assert f"{statistics.fmean(last):.4f}" in said
    assert f"{min(last):.4f} to {max(last):.4f}" in said

    mixing = [rows(comparison / "runs" / f"2-seed{seed}", "depth")[-1]["mixing"] for seed in SEEDS]
    expected = statistics.fmean(matrix[9][3] for matrix in mixing)
    canvas = page.locator("#maps .panel").nth(2).locator("canvas").bounding_box()
    svg = page.locator("#maps .panel").nth(2).locator("svg").bounding_box()
    cell = canvas["width"] / 13
    x, y = (
        canvas["x"] - svg["x"] + 3.5 * cell,
        canvas["y"] - svg["y"] + 9.5 * (canvas["height"] - 5) / 13,
    )
    said = hover(page, "#maps .panel:nth-child(3) svg", x, y)
    assert "Read 9, before mlp" in said
    assert "output of sublayer 2, attention" in said
    assert f"{float(f'{expected:.3g}'):g}" in said
    assert (
        hover(page, "#maps .panel:nth-child(3) svg", canvas["width"], y) == ""
    )  # above the diagonal there is nothing

    gradient = statistics.fmean(
        rows(comparison / "runs" / f"0-seed{seed}", "depth")[-1]["gradient_norm"][0]
        for seed in SEEDS
    )
    said = hover(page, "#measure-gradient .panel:nth-child(1) svg", 45, 80)
    assert "Sublayer 0, attention" in said
    assert f"{float(f'{gradient:.3g}'):g}" in said


def test_keyboard_reaches_values(visit, written):
    page = visit(written)
    page.locator("#maps .panel:nth-child(1) svg").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    said = page.locator("#tip").inner_text()
    assert "Read 11, before mlp" in said
    assert "output of sublayer 0, attention" in said
    assert re.search(r"standard\s+0\.0833", said)  # a twelfth
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()


def test_legend_range_reads_rows_scale_and_step_respond(visit, written):
    page = visit(written)
    page.locator(".loss .legend button").nth(1).click()
    assert page.locator("#eval path.mean").count() == 2
    assert (
        page.locator("#maps .panel").count() == page.locator("#measure-entropy .panel").count() == 2
    )
    assert page.locator(".loss .legend button").nth(1).get_attribute("aria-pressed") == "false"
    whole = page.locator("#eval path.mean").first.get_attribute("d")
    page.get_by_label("last half").check()
    assert page.locator("#eval path.mean").first.get_attribute("d") != whole
    page.get_by_label("before attention").check()
    assert page.locator("#maps canvas").first.get_attribute("data-cells") == str(
        sum(range(1, 13, 2)) + 13
    )
    page.locator("#maps .panel:nth-child(1) svg").focus()
    page.keyboard.press("ArrowDown")
    assert (
        "0.0769" in page.locator("#tip").inner_text()
    )  # thirteen equal sources, by default a row's shares
    page.get_by_label("as applied").check()
    page.locator("#maps .panel:nth-child(1) svg").focus()
    page.keyboard.press("ArrowDown")
    assert re.search(r"standard\s+1\s", page.locator("#tip").inner_text())
    before = page.locator("#measure-output path.c0").first.get_attribute("d")
    page.locator("#slider input").fill("0")
    assert page.locator("#slider output").inner_text().startswith("step 40 ")
    assert page.locator("#measure-output path.c0").first.get_attribute("d") != before
    scale = page.locator("#measure-gradient")
    before = scale.locator("path.c0").first.get_attribute("d")
    scale.get_by_label("log").check()
    assert scale.locator("path.c0").first.get_attribute("d") != before


def test_the_difference_map_is_a_rows_share_minus_the_baselines(visit, comparison, written):
    page = visit(written)
    page.get_by_label("minus standard").check()
    assert (
        page.locator("#maps canvas").count() == page.locator("#maps .panel").count() == 2
    )  # minus itself it is nothing
    mixing = [rows(comparison / "runs" / f"2-seed{seed}", "depth")[-1]["mixing"] for seed in SEEDS]
    expected = statistics.fmean(matrix[12][0] for matrix in mixing) - 1 / 13
    page.locator("#maps .panel:nth-child(2) svg").focus()
    page.keyboard.press("ArrowDown")  # the final read's embedding
    said = re.search(r"attnres-full\s+(\S+)", page.locator("#tip").inner_text()).group(1)
    assert float(said.replace("−", "-")) == pytest.approx(expected, rel=0.02, abs=3e-4)
    scale = page.locator("#scale").text_content()
    assert "share minus the baseline's" in scale
    assert "−" in scale


def test_maps_and_measures_are_linked_by_read(visit, written):
    page = visit(written)
    page.locator("#maps .panel:nth-child(2) svg").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    cells = [mark.bounding_box() for mark in page.locator("#maps .cursor.cell").all()]
    canvases = [canvas.bounding_box() for canvas in page.locator("#maps canvas").all()]
    assert len(cells) == 3
    places = [(c["x"] - m["x"], c["y"] - m["y"], c["width"]) for c, m in zip(cells, canvases)]
    assert all(place == pytest.approx(places[0], abs=1) for place in places)
    assert page.locator("#tip div").count() == 4  # the source, then every residual
    assert page.locator("#tip .near").inner_text().startswith("attnres-block")
    assert page.locator("#measure-gradient .cursor").count() == 3
    page.locator("#measure-gradient .panel:nth-child(1) svg").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    widths = [mark.bounding_box()["width"] for mark in page.locator("#maps .cursor.cell").all()]
    assert widths == pytest.approx(
        [2 * places[0][2]] * 3, rel=0.1
    )  # the whole row of read 1: two sources
    page.keyboard.press("Escape")
    assert page.locator(".cursor").count() == 0


def test_loss_charts_share_their_cursor(visit, written):
    page = visit(written)
    hover(page, "#eval svg", 400, 100)
    assert [
        page.locator(f"#{kind} line.cursor").count() for kind in ("eval", "train", "difference")
    ] == [1, 1, 1]
    near = page.locator("#tip .near").inner_text()
    boxes = page.locator("#eval .marks circle").all()
    largest = max(boxes, key=lambda dot: float(dot.get_attribute("r")))
    heights = {float(dot.get_attribute("cy")): dot for dot in boxes}
    assert largest.get_attribute("cy") == heights[
        min(heights, key=lambda y: abs(y - 100))
    ].get_attribute("cy")
    assert re.search(r"\d\.\d{4}", near)


def test_charts_tell_screen_readers_the_means(visit, comparison, written):
    page = visit(written)
    last = {
        n: [rows(comparison / "runs" / f"{n}-seed{seed}", "eval")[-1]["loss"] for seed in SEEDS]
        for n in (0, 1, 2)
    }
    label = page.locator("#eval svg").get_attribute("aria-label")
    for number, residual in enumerate(RESIDUALS):
        assert f"{residual} ends at {statistics.fmean(last[number]):.4f}" in label
    assert f"{last[2][0]:.4f}" not in label  # seed 0 is not the mean


def test_the_even_spread_is_in_the_units_of_its_axis(visit, written):
    """The plain residual spreads its weights evenly: its dots lie on the dotted line."""
    page = visit(written)
    panel = page.locator("#measure-entropy .panel:nth-child(1)")
    path = panel.locator("path.reference").get_attribute("d")
    line = [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", path)]
    dots = [
        (float(dot.get_attribute("cx")), float(dot.get_attribute("cy")))
        for dot in panel.locator("circle.dot").all()
    ]
    assert len(dots) == 12
    for dot, point in zip(dots, line):
        assert dot == pytest.approx(point, abs=0.7)
    assert (
        max(y for _, y in line) - min(y for _, y in line) > 80
    )  # and they are not all at one place


def test_one_evaluation_is_drawn_as_dots(visit, tmp_path):
    """As README's own example leaves it: twenty steps, evaluated once."""
    folder = make_comparison(
        tmp_path / "c", ["standard", "attnres-full"], SEEDS, layers=2, steps=20, records=1
    )
    for run in (folder / "runs").iterdir():
        kept = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
        last = [row for row in kept if row["kind"] != "eval" or row["step"] == 20]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in last))
    page = visit(write_report([folder]))
    assert page.locator("#eval circle.seed").count() == 6
    assert page.locator("#difference circle.seed").count() == 3
    assert page.locator("#eval path.mean").count() == 2
    finals = [rows(folder / "runs" / f"1-seed{seed}", "eval")[-1]["loss"] for seed in SEEDS]
    assert f"attnres-full ends at {statistics.fmean(finals):.4f}" in page.locator(
        "#eval svg"
    ).get_attribute("aria-label")
    said = hover(page, "#eval svg", 300, 24 + 40 + 20)
    assert "attnres-full" in said
    assert all(f"seed {seed}\n{value:.4f}" in said for seed, value in zip(SEEDS, finals))
    assert "the only record" in page.locator("#eval").text_content()
    phone = visit(folder / "report.html", **PHONE)
    words = [text.bounding_box() for text in phone.locator("#eval text, #difference text").all()]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in words)


def test_a_point_between_gaps_is_drawn(visit, tmp_path):
    folder = make_run(tmp_path / "run", layers=1, steps=20, depth=False)
    kept = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in kept:
        if row["kind"] == "eval" and row["step"] in (4, 6):
            row["loss"] = None
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    path = visit(write_report([folder])).locator("#eval path.mean").get_attribute("d")
    assert len(re.findall(r"M[\d.]+,[\d.]+h0", path)) == 1  # step 5, alone
    assert len(re.findall("[ML]", path)) == 18


def test_the_table_is_sorted_by_any_column(visit, written):
    page = visit(written)

    def order():
        return page.eval_on_selector_all(
            "#table tbody th code", "all => all.map(code => code.textContent)"
        )

    page.get_by_role("button", name="Validation loss", exact=True).click()
    assert order() == ["attnres-full", "attnres-block:block=4", "standard"]
    assert page.locator("#table th[aria-sort=ascending]").inner_text().startswith("Validation loss")
    page.get_by_role("button", name="Validation loss", exact=True).click()
    assert order() == ["standard", "attnres-block:block=4", "attnres-full"]
    page.get_by_role("button", name="Residual", exact=True).click()
    assert order() == sorted(RESIDUALS)
    assert page.locator("#table th[aria-sort]").count() == 1
    page.get_by_role("button", name="Residual", exact=True).click()
    page.get_by_role("button", name="Residual", exact=True).click()
    assert order() == RESIDUALS  # its own order again
    assert page.locator("#table th[aria-sort]").count() == 0


def download(page, figure: str, words: str) -> Path:
    with page.expect_download() as caught:
        page.locator(f'.save[data-save="{figure}"]').get_by_text(words, exact=True).click()
    return caught.value.path()


def table_of(path: Path) -> list[dict]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def test_numbers_are_downloaded_as_they_are_drawn(visit, comparison, written):
    page = visit(written)
    runs = table_of(download(page, "table", "CSV"))
    assert len(runs) == 9
    summary = json.loads((comparison / "runs" / "2-seed1" / "summary.json").read_text())
    mine = next(run for run in runs if (run["residual"], run["seed"]) == ("attnres-full", "1"))
    assert float(mine["loss"]) == summary["loss"]
    assert float(mine["seconds"]) == summary["seconds"]
    curve = table_of(download(page, "eval", "CSV"))
    assert len(curve) == 9 * 40
    assert float(curve[39]["loss"]) == pytest.approx(
        rows(comparison / "runs" / "0-seed0", "eval")[-1]["loss"], rel=1e-4
    )
    cells = table_of(download(page, "maps", "CSV"))
    assert len(cells) == 3 * 13 * 14 // 2
    assert sum(
        float(c["share of the row"])
        for c in cells
        if (c["residual"], c["read"]) == ("attnres-full", "12")
    ) == (pytest.approx(1, abs=0.01))
    assert len(table_of(download(page, "measure-read", "CSV"))) == 3 * 13
    everything = json.loads(download(page, "page", "JSON").read_text())
    assert [group["label"] for group in everything["groups"]] == RESIDUALS


@pytest.mark.parametrize(
    ("figure", "charts"), [("eval", 1), ("train", 1), ("maps", 3), ("measure-gradient", 3)]
)
def test_pictures_are_downloaded(visit, written, figure, charts):
    page = visit(written)
    drawn = download(page, figure, "SVG").read_text(encoding="utf-8")
    assert drawn.startswith("<svg")
    assert drawn.count("<svg") == 1 + charts + (
        figure == "maps"
    )  # with the maps goes their colour scale
    assert drawn.count("<image") == (charts if figure == "maps" else 0)
    assert all(
        f">{residual}<" in drawn for residual in RESIDUALS
    )  # each is named in the picture itself
    assert "class=" not in drawn  # no style sheet goes with it
    colours = page.eval_on_selector_all(
        ".loss .legend .key", "all => all.map(key => getComputedStyle(key).color)"
    )
    assert all(f'="{colour}"' in drawn for colour in colours)  # but every look it gave
    assert 'font-size="12px"' in drawn
    image = download(page, figure, "PNG").read_bytes()
    assert image.startswith(b"\x89PNG")
    width, height = (int.from_bytes(image[at : at + 4]) for at in (16, 20))
    shown = page.locator(f"#{figure}").bounding_box()
    assert width >= 2 * shown["width"]
    assert height > 300
    colours = page.evaluate(
        """async (text) => {
          const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
          const bitmap = await createImageBitmap(new Blob([bytes]));
          const canvas = new OffscreenCanvas(bitmap.width, bitmap.height), pen = canvas.getContext("2d");
          pen.drawImage(bitmap, 0, 0);
          return new Set(new Uint32Array(pen.getImageData(0, 0, bitmap.width, bitmap.height).data.buffer)).size;
        }""",
        base64.b64encode(image).decode(),
    )
    assert colours > 10  # not a blank sheet


def test_a_name_that_looks_like_a_formula_stays_text_in_a_spreadsheet(visit, tmp_path):
    make_run(tmp_path / "run", '=HYPERLINK("x"),"y', layers=1, steps=5)
    page = visit(write_report([tmp_path / "run"]))
    assert table_of(download(page, "table", "CSV"))[0]["residual"] == '\'=HYPERLINK("x"),"y'


def test_a_finger_leaves_the_words_standing(visit, written):
    page = visit(written, **PHONE)
    chart = page.locator("#eval svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.touchscreen.tap(box["x"] + 200, box["y"] + 100)
    assert "tokens" in page.locator("#tip").inner_text()
    page.wait_for_timeout(100)
    assert page.locator("#tip").is_visible()
    before = page.locator("#tip").bounding_box()
    assert (
        abs(before["y"] + before["height"] / 2 - (box["y"] + 100)) < 120
    )  # beside the finger, not pages away
    assert before["x"] >= 0
    assert before["x"] + before["width"] <= 390
    page.evaluate("scrollBy(0, 60)")
    assert page.locator("#tip").bounding_box()["y"] == pytest.approx(
        before["y"] - 60, abs=1
    )  # it goes with its chart
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.locator("#train svg").scroll_into_view_if_needed()
    box = page.locator("#train svg").bounding_box()
    page.touchscreen.tap(box["x"] + 100, box["y"] + 100)  # from one chart to the next
    page.wait_for_timeout(100)
    assert page.locator("#tip").is_visible()
    heading = page.locator("#train").locator("xpath=..").locator("h3").bounding_box()
    page.touchscreen.tap(heading["x"] + 10, heading["y"] + 5)
    assert not page.locator("#tip").is_visible()


@pytest.fixture(scope="module")
def nineteen(tmp_path_factory):
    from headwater.residuals import names

    arms = sorted(names(), key=lambda name: name != "standard")
    assert len(arms) >= 19
    folder = make_comparison(
        tmp_path_factory.mktemp("many") / "c", arms, [0, 1], layers=4, steps=80, records=2
    )
    return write_report([folder]), arms


def test_nineteen_residuals_are_told_apart(visit, nineteen):
    page, arms = visit(nineteen[0]), nineteen[1]
    looks = page.eval_on_selector_all(
        "#eval path.mean",
        "all => all.map(p => getComputedStyle(p).stroke + getComputedStyle(p).strokeDasharray)",
    )
    assert len(looks) == len(set(looks)) == len(arms)
    keys = page.eval_on_selector_all(
        ".loss .legend .key",
        "all => all.map(k => [getComputedStyle(k).color, getComputedStyle(k).backgroundImage].join())",
    )
    assert len(set(keys)) == len(arms)
    for span in ("whole run", "last half", "last tenth"):
        page.get_by_label(span).check()
        names = sorted(
            (t.bounding_box() for t in page.locator("#eval text.ending").all()),
            key=lambda box: box["y"],
        )
        assert len(names) == len(arms)
        assert all(
            below["y"] - above["y"] >= 13.5 for above, below in pairwise(names)
        )  # no name over another
        assert all(box["x"] + box["width"] <= 1280 for box in names)
        chart = page.locator("#eval svg").bounding_box()
        assert names[0]["y"] >= chart["y"] + 10
        assert names[-1]["y"] + names[-1]["height"] <= chart["y"] + chart["height"] - 20


def test_one_of_many_is_lit_under_the_pointer(visit, nineteen):
    page = visit(nineteen[0])
    assert page.locator("#eval path.thin").count() == 2 * len(nineteen[1])
    assert page.locator("#eval path.thin:visible").count() == 0  # a tangle, until one is asked for
    page.locator(".loss .legend button").nth(3).hover()
    assert page.locator("#eval path.thin:visible").count() == 2
    dim = page.eval_on_selector_all(
        "#eval path.mean", "all => all.filter(p => getComputedStyle(p).opacity < 0.5).length"
    )
    assert dim == len(nineteen[1]) - 1
    hover(page, "#eval svg", 300, 200)
    assert page.locator("#eval path.mean.on").count() == 1
    assert page.locator("#tip .near").count() == 1
    page.mouse.move(5, 5)
    assert page.locator("body.lit").count() == 0


def test_the_first_map_stands_beside_the_headline(visit, written, tmp_path):
    page = visit(written)
    thumbnail = page.locator("#thumbnail")
    assert thumbnail.locator("canvas").get_attribute("data-cells") == str(13 * 14 // 2)
    assert "attnres-block:block=4" in thumbnail.inner_text()
    headline, picture = page.locator("h1").bounding_box(), thumbnail.bounding_box()
    assert picture["x"] >= headline["x"] + headline["width"]
    assert picture["y"] < headline["y"] + headline["height"]
    thumbnail.click()
    assert page.url.endswith("#depth")
    bare = make_run(tmp_path / "bare", layers=1, steps=5, depth=False)
    assert not visit(write_report([bare])).locator("#thumbnail").is_visible()
