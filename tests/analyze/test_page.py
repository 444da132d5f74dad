"""The report in headless Chromium: what is drawn, hovered, touched, sorted and downloaded."""

import csv
import json
import re
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
from runfolder import RESIDUALS, change_rows, make_comparison, make_run, read_rows
from tinymodels import model_of

import headwater
from headwater.analyze.prompted import prompted_run
from headwater.analyze.report import write_report
from headwater.residuals import names

pytestmark = pytest.mark.browser

SEEDS = [0, 1, 2]
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def last(folder: Path, kind: str, residual: int, key: str) -> list:
    """The last record of each seed of a residual."""
    values = []
    for seed in SEEDS:
        rows = read_rows(folder / f"runs/{residual}-seed{seed}")
        records = [row for row in rows if row["kind"] == kind]
        values.append(records[-1][key])
    return values


def average(folder: Path, kind: str, residual: int, key: str, *place: int) -> float:
    """The mean over seeds of the last record's number, at a place in its lists."""
    values = last(folder, kind, residual, key)
    for index in place:
        values = [value[index] for value in values]
    return fmean(values)


def count(page, *selectors: str) -> list[int]:
    return [page.locator(selector).count() for selector in selectors]


def tip(page) -> str:
    return page.locator("#tip").inner_text() if page.locator("#tip").is_visible() else ""


def hover(page, selector: str, x: float, y: float) -> str:
    """Move the pointer to (x, y) inside the element and return what the page says there."""
    page.locator(selector).scroll_into_view_if_needed()
    box = page.locator(selector).bounding_box()
    page.mouse.move(box["x"] + x, box["y"] + y)
    return tip(page)


def press(page, selector: str, *keys: str) -> str:
    page.mouse.move(0, 0)  # the focus scrolls, and a chart may come to lie below the pointer
    page.locator(selector).focus()
    for key in keys:
        page.keyboard.press(key)
    return tip(page)


def boxes(page, selector: str) -> list[dict]:
    return [element.bounding_box() for element in page.locator(selector).all()]


def texts(page, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def test_values_are_drawn_and_told_by_pointer_and_keyboard(visit, comparison, written):
    page = visit(written)
    curves = ("#eval path.mean", "#eval path.thin", "#train path.mean", "#difference path.mean")
    assert count(page, *curves) == [3, 9, 3, 2]  # the baseline is the zero line
    cells = page.eval_on_selector_all("#maps canvas", "all => all.map((c) => c.dataset.cells)")
    assert cells == ["91"] * 3  # 12 sublayers: 13 reads over a triangle
    measures = [f"#measure-{name} svg" for name in ("output", "read", "gradient", "entropy")]
    assert count(page, *measures) == [3] * 4
    dots = [f"#measure-{name} .panel:nth-child(1) .dot" for name in ("read", "output")]
    assert count(page, *dots) == [13, 12]

    # The end of the curves, for the eye and for a screen reader.
    losses = last(comparison, "eval", 2, "loss")
    width = page.locator("#eval svg").bounding_box()["width"]
    words = hover(page, "#eval svg", width - 11, 100)
    assert f"{fmean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})" in words
    label = page.locator("#eval svg").get_attribute("aria-label")
    for number, residual in enumerate(RESIDUALS):
        loss = average(comparison, "eval", number, "loss")
        assert f"{residual} ends at {loss:.4f}" in label

    # A cell of a map; above the diagonal there is nothing.
    weight = average(comparison, "depth", 2, "mixing", 9, 3)
    svg = "#maps .panel:nth-child(3) svg"
    canvas = page.locator("#maps .panel:nth-child(3) canvas").bounding_box()
    edge = page.locator(svg).bounding_box()
    size = canvas["width"] / 13
    x = canvas["x"] - edge["x"] + 3.5 * size
    y = canvas["y"] - edge["y"] + 9.5 * (size - 5 / 13)
    words = hover(page, svg, x, y)
    assert "Read 9, before mlp" in words
    assert "output of sublayer 2, attention" in words
    assert f"{float(f'{weight:.3g}'):g}" in words
    assert hover(page, svg, canvas["width"], y) == ""

    gradient = average(comparison, "depth", 0, "gradient_norm", 0)
    words = hover(page, "#measure-gradient .panel:nth-child(1) svg", 45, 80)
    assert "Sublayer 0, attention" in words
    assert f"{float(f'{gradient:.3g}'):g}" in words

    words = press(page, "#maps .panel:nth-child(1) svg", "ArrowUp", "ArrowRight")
    assert "Read 11, before mlp\noutput of sublayer 0" in re.sub("\n+", "\n", words)
    assert re.search(r"standard\s+0\.0833", words)  # a twelfth
    assert press(page, "#maps .panel:nth-child(1) svg", "Escape") == ""


def test_charts_that_show_the_same_share_their_cursor(visit, written):
    page = visit(written)
    hover(page, "#eval svg", 400, 100)
    cursors = [f"#{kind} line.cursor" for kind in ("eval", "train", "difference")]
    assert count(page, *cursors) == [1] * 3
    marks = page.locator("#eval .marks circle").all()
    dots = [(float(mark.get_attribute("r")), float(mark.get_attribute("cy"))) for mark in marks]
    _, height_of_largest = max(dots)
    assert height_of_largest == min((y for _, y in dots), key=lambda y: abs(y - 100))
    assert re.search(r"\d\.\d{4}", page.locator("#tip .near").inner_text())

    # Maps and measures are linked by read: a cell in each map, a line in each measure.
    page = visit(written)
    press(page, "#maps .panel:nth-child(2) svg", "ArrowUp", "ArrowRight")
    places = []
    for cell, canvas in zip(boxes(page, "#maps .cursor.cell"), boxes(page, "#maps canvas")):
        places.append((cell["x"] - canvas["x"], cell["y"] - canvas["y"], cell["width"]))
    assert places == [pytest.approx(places[0], abs=1)] * 3
    assert page.locator("#tip .near").inner_text().startswith("attnres-block")
    assert count(page, "#tip div", "#measure-gradient .cursor") == [4, 3]
    press(page, "#measure-gradient .panel:nth-child(1) svg", "ArrowRight", "ArrowRight")
    widths = [cell["width"] for cell in boxes(page, "#maps .cursor.cell")]
    # Read 1 has two sources.
    assert widths == pytest.approx([2 * places[0][2]] * 3, rel=0.1)
    page.keyboard.press("Escape")
    assert count(page, ".cursor") == [0]


def test_every_control_changes_what_is_drawn(visit, comparison, written):
    page = visit(written)

    def path(selector: str) -> str:
        return page.locator(selector).first.get_attribute("d")

    page.locator(".loss .legend button").nth(1).click()
    assert page.locator(".loss .legend button").nth(1).get_attribute("aria-pressed") == "false"
    panels = ("#eval path.mean", "#maps .panel", "#measure-entropy .panel")
    assert count(page, *panels) == [2, 2, 2]
    whole = path("#eval path.mean")
    page.get_by_label("last half").check()
    assert path("#eval path.mean") != whole
    page.get_by_label("before attention").check()
    cells = page.locator("#maps canvas").first.get_attribute("data-cells")
    assert cells == str(sum(range(1, 13, 2)) + 13)
    # A row's shares by default: thirteen equal sources.
    assert "0.0769" in press(page, "#maps .panel:nth-child(1) svg", "ArrowDown")
    page.get_by_label("as applied").check()
    assert re.search(r"standard\s+1\s", press(page, "#maps .panel:nth-child(1) svg", "ArrowDown"))
    latest = path("#measure-output path.c0")
    page.locator("#slider input").fill("0")
    assert page.locator("#slider output").inner_text().startswith("step 40 ")
    assert path("#measure-output path.c0") != latest
    linear = path("#measure-gradient path.c0")
    page.locator("#measure-gradient").get_by_label("log").check()
    assert path("#measure-gradient path.c0") != linear

    # A row's share minus the baseline's; minus itself the baseline is nothing.
    page = visit(written)
    page.get_by_label("minus standard").check()
    assert count(page, "#maps canvas", "#maps .panel") == [2, 2]
    share = average(comparison, "depth", 2, "mixing", 12, 0)
    words = press(page, "#maps .panel:nth-child(2) svg", "ArrowDown")  # the final read's embedding
    displayed = re.search(r"attnres-full\s+(\S+)", words).group(1).replace("−", "-")
    assert float(displayed) == pytest.approx(share - 1 / 13, rel=0.02, abs=3e-4)
    assert "share minus the baseline's" in page.locator("#scale").text_content()


def test_the_even_spread_is_in_the_units_of_its_axis(visit, written):
    """The plain residual spreads its weights evenly: its dots lie on the dotted line."""
    panel = visit(written).locator("#measure-entropy .panel:nth-child(1)")
    path = panel.locator("path.reference").get_attribute("d")
    line = [tuple(map(float, point)) for point in re.findall(r"([\d.]+),([\d.]+)", path)]
    dots = []
    for dot in panel.locator("circle.dot").all():
        place = dot.get_attribute("cx"), dot.get_attribute("cy")
        dots.append(tuple(map(float, place)))
    assert dots == [pytest.approx(point, abs=0.7) for point in line[:12]]
    heights = [y for _, y in line]
    assert max(heights) - min(heights) > 80


def test_tables_are_sorted_by_any_column(visit, written):
    page = visit(written)

    def click(name: str) -> list[str]:
        page.locator("#table").get_by_role("button", name=name, exact=True).click()
        return texts(page, "#table tbody th code")

    assert click("Validation loss") == ["attnres-full", "attnres-block:block=4", "standard"]
    assert texts(page, "#table th[aria-sort=ascending]")[0].startswith("Validation loss")
    assert click("Validation loss") == ["standard", "attnres-block:block=4", "attnres-full"]
    assert click("Residual") == sorted(RESIDUALS)
    assert count(page, "#table th[aria-sort]") == [1]
    click("Residual")
    assert click("Residual") == RESIDUALS  # its own order again
    assert count(page, "#table th[aria-sort]") == [0]

    page.locator("#mixing").get_by_role("button", name="Row sum").click()
    sums = [float(cell) for cell in texts(page, "#mixing tbody td:nth-child(3)")]
    assert sums == sorted(sums)
    assert texts(page, "#mixing tbody th")[-1] == "standard"


def download(page, figure: str, words: str) -> bytes:
    with page.expect_download() as caught:
        page.locator(f'.save[data-save="{figure}"]').get_by_text(words, exact=True).click()
    return caught.value.path().read_bytes()


def table_of(page, figure: str) -> list[dict]:
    lines = download(page, figure, "CSV").decode().splitlines()
    return list(csv.DictReader(lines))


def test_numbers_and_pictures_are_downloaded_as_they_are_drawn(visit, comparison, written):
    page = visit(written)
    runs = {(run["residual"], run["seed"]): run for run in table_of(page, "table")}
    assert len(runs) == 9
    summary = json.loads((comparison / "runs/2-seed1/summary.json").read_text())
    for key in ("loss", "seconds"):
        assert float(runs["attnres-full", "1"][key]) == summary[key]
    curve = table_of(page, "eval")
    assert len(curve) == 9 * 40
    loss = last(comparison, "eval", 0, "loss")[0]
    assert float(curve[39]["loss"]) == pytest.approx(loss, rel=1e-4)
    cells = table_of(page, "maps")
    assert len(cells) == 3 * 91
    shares = []
    for cell in cells:
        if (cell["residual"], cell["read"]) == ("attnres-full", "12"):
            shares.append(float(cell["share of the row"]))
    assert len(shares) == 13
    assert sum(shares) == pytest.approx(1, abs=0.01)
    measured = table_of(page, "mixing")
    assert [one["Residual"] for one in measured] == RESIDUALS
    assert float(measured[0]["Row sum"]) == 7  # of 1 to 13
    assert len(table_of(page, "measure-read")) == 3 * 13
    everything = json.loads(download(page, "page", "JSON"))
    assert [group["label"] for group in everything["groups"]] == RESIDUALS

    colours = page.eval_on_selector_all(
        ".loss .legend .key", "all => all.map((key) => getComputedStyle(key).color)"
    )
    for figure, charts in (("eval", 1), ("maps", 3)):
        picture = download(page, figure, "SVG").decode()
        assert picture.startswith("<svg")
        # Maps are images, and their colour scale goes with them.
        assert picture.count("<svg") == 1 + charts + (figure == "maps")
        assert picture.count("<image") == (charts if figure == "maps" else 0)
        assert "class=" not in picture  # no style sheet goes with it, but every look that it gave
        assert all(f">{residual}<" in picture for residual in RESIDUALS)
        assert all(f'="{colour}"' in picture for colour in colours)
        image = download(page, figure, "PNG")
        assert image.startswith(b"\x89PNG")
        (box,) = boxes(page, f"#{figure}")
        assert int.from_bytes(image[16:20]) >= 2 * box["width"]
        assert len(image) > 10_000  # a blank sheet takes less


def test_a_name_that_looks_like_a_formula_stays_text_in_a_spreadsheet(visit, tmp_path):
    make_run(tmp_path / "run", '=HYPERLINK("x"),"y', layers=1, steps=5)
    page = visit(write_report([tmp_path / "run"]))
    assert table_of(page, "table")[0]["residual"] == '\'=HYPERLINK("x"),"y'


def test_one_evaluation_is_drawn_as_dots_and_a_point_between_gaps_too(visit, tmp_path):
    """README's own example: twenty steps, evaluated once."""
    residuals = ["standard", "attnres-full"]
    folder = make_comparison(tmp_path / "c", residuals, SEEDS, layers=2, steps=20, records=1)

    def only_the_last(row: dict) -> dict | None:
        return row if row["kind"] != "eval" or row["step"] == 20 else None

    for run in (folder / "runs").iterdir():
        change_rows(run, only_the_last)
    page = visit(write_report([folder]))
    picture = ("#eval circle.seed", "#difference circle.seed", "#eval path.mean")
    assert count(page, *picture) == [6, 3, 2]
    finals = last(folder, "eval", 1, "loss")
    label = page.locator("#eval svg").get_attribute("aria-label")
    assert f"attnres-full ends at {fmean(finals):.4f}" in label
    words = hover(page, "#eval svg", 300, 24 + 40 + 20)
    assert "attnres-full" in words
    assert all(f"seed {seed}\n{value:.4f}" in words for seed, value in zip(SEEDS, finals))
    assert "the only record" in page.locator("#eval").text_content()
    phone = visit(folder / "report.html", **PHONE)
    for text in phone.locator("#eval text, #difference text").all():
        box = text.bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 390

    run = make_run(tmp_path / "run", layers=1, steps=20, depth=False)
    gaps = [{"kind": "eval", "step": step} for step in (4, 6)]

    def without(row: dict) -> dict:
        missing = {"kind": row["kind"], "step": row["step"]} in gaps
        return row | {"loss": None} if missing else row

    change_rows(run, without)
    path = visit(write_report([run])).locator("#eval path.mean").get_attribute("d")
    assert len(re.findall(r"M[\d.]+,[\d.]+h0", path)) == 1  # step 5, alone
    assert len(re.findall("[ML]", path)) == 18


def test_models_that_read_a_prompt_have_no_results_and_no_section_about_loss(
    visit, comparison, tmp_path
):
    options = {"name": "mine", "removals": "none"}
    inspection = headwater.inspect(model_of("attnres-full"), [1, 2, 3], **options)
    model = prompted_run(inspection, dim=32, layers=4)
    archive = make_run(tmp_path / "archive")
    (archive / "metrics.jsonl").unlink()  # its result is left

    def visible(page) -> list[bool]:
        parts = (".loss", "#results", "#table", "#mixing")
        return [page.locator(part).is_visible() for part in parts]

    page = visit(write_report([], tmp_path / "alone.html", models=[model]))
    assert visible(page) == [False, False, False, True]
    assert page.get_by_text("No losses are shown: there are no records of training").is_visible()
    assert count(page, "#maps canvas") == [1]
    assert visible(visit(write_report([archive]))) == [False, True, True, False]
    page = visit(write_report([comparison], tmp_path / "beside.html", models=[model]))
    assert visible(page) == [True] * 4
    assert count(page, "#eval path.mean") == [3]


def test_a_finger_leaves_the_words_standing(visit, written):
    page = visit(written, **PHONE)

    def tap(selector: str, x: float, y: float) -> float:
        page.locator(selector).scroll_into_view_if_needed()
        box = page.locator(selector).bounding_box()
        page.touchscreen.tap(box["x"] + x, box["y"] + y)
        page.wait_for_timeout(100)
        return box["y"] + y

    height = tap("#eval svg", 200, 100)
    assert "tokens" in tip(page)
    before = page.locator("#tip").bounding_box()
    assert abs(before["y"] + before["height"] / 2 - height) < 120  # beside the finger
    assert 0 <= before["x"] <= before["x"] + before["width"] <= 390
    page.evaluate("scrollBy(0, 60)")
    after = page.locator("#tip").bounding_box()
    assert after["y"] == pytest.approx(before["y"] - 60, abs=1)  # it goes with its chart
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    tap("#train svg", 100, 100)  # from one chart to the next
    assert tip(page)
    tap("figure:has(#train) h3", 10, 5)
    assert not tip(page)


def test_nineteen_residuals_have_looks_names_and_light_of_their_own(visit, tmp_path):
    arms = sorted(names(), key=lambda name: name != "standard")
    assert len(arms) >= 19
    size = {"layers": 4, "steps": 80, "records": 2}
    page = visit(write_report([make_comparison(tmp_path / "c", arms, [0, 1], **size)]))
    looks = {
        "#eval path.mean": "getComputedStyle(p).stroke + getComputedStyle(p).strokeDasharray",
        ".loss .legend .key": "getComputedStyle(p).color + getComputedStyle(p).backgroundImage",
    }
    for selector, look in looks.items():
        displayed = page.eval_on_selector_all(selector, f"all => all.map((p) => {look})")
        assert len(displayed) == len(set(displayed)) == len(arms)
    for span in ("whole run", "last tenth"):
        page.get_by_label(span).check()
        endings = sorted(boxes(page, "#eval text.ending"), key=lambda box: box["y"])
        assert len(endings) == len(arms)
        assert all(below["y"] - above["y"] >= 13.5 for above, below in pairwise(endings))
        assert all(box["x"] + box["width"] <= 1280 for box in endings)
        (chart,) = boxes(page, "#eval svg")
        top, bottom = endings[0], endings[-1]
        assert top["y"] >= chart["y"] + 10
        assert bottom["y"] + bottom["height"] <= chart["y"] + chart["height"] - 20

    # Thin lines are a tangle until one residual is asked for.
    assert count(page, "#eval path.thin", "#eval path.thin:visible") == [2 * len(arms), 0]
    page.locator(".loss .legend button").nth(3).hover()
    assert count(page, "#eval path.thin:visible") == [2]
    dim = "all => all.filter((p) => getComputedStyle(p).opacity < 0.5).length"
    assert page.eval_on_selector_all("#eval path.mean", dim) == len(arms) - 1
    hover(page, "#eval svg", 300, 200)
    assert count(page, "#eval path.mean.on", "#tip .near") == [1, 1]
    page.mouse.move(5, 5)
    assert count(page, "body.lit") == [0]


def test_the_first_map_stands_beside_the_headline(visit, written, tmp_path):
    page = visit(written)
    thumbnail = page.locator("#thumbnail")
    assert thumbnail.locator("canvas").get_attribute("data-cells") == "91"
    assert "attnres-block:block=4" in thumbnail.inner_text()
    headline, picture = page.locator("h1").bounding_box(), thumbnail.bounding_box()
    assert picture["x"] >= headline["x"] + headline["width"]
    assert picture["y"] < headline["y"] + headline["height"]
    thumbnail.click()
    assert page.url.endswith("#depth")
    bare = make_run(tmp_path / "bare", layers=1, steps=5, depth=False)
    assert not visit(write_report([bare])).locator("#thumbnail").is_visible()
