"""The report: what it says (read from the file) and how it behaves (in headless Chromium, where one is installed)."""

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from runfolder import make_comparison, make_run

from headwater.analyze import report
from headwater.analyze.groups import group_runs, smooth, thin
from headwater.analyze.report import make_page, write_report
from headwater.analyze.runs import read_run
from headwater.errors import UserError

RESIDUALS = ["standard", "attnres-block:block=4", "attnres-full"]
SEEDS = [0, 1, 2]
HOSTILE = "<script>alert(1)</script>"


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rows(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for line in lines if (row := json.loads(line))["kind"] == kind]


def visible(page: str) -> str:
    """The words of a page: without scripts, styles and tags."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> Path:
    return make_comparison(tmp_path_factory.mktemp("report") / "compare", RESIDUALS, SEEDS, layers=6, steps=200)


@pytest.fixture(scope="module")
def written(comparison) -> Path:
    return write_report([comparison])


def test_lands_in_the_folder_or_where_asked(comparison, tmp_path):
    assert write_report([comparison]) == comparison / "report.html"
    assert write_report([comparison], tmp_path / "new" / "page.html").is_file()


def test_the_first_residual_of_a_comparison_is_the_baseline(tmp_path):
    folder = make_comparison(tmp_path / "compare", ["attnres-full", "rezero"], [0, 1], layers=2, steps=20)
    words = visible(write_report([folder]).read_text())
    assert "rezero against attnres-full" in words
    assert re.search(r"rezero ends at .* attnres-full", words)


def test_table_holds_mean_spread_and_paired_difference(comparison, written):
    losses = {}
    for folder in sorted((comparison / "runs").iterdir()):
        summary = json.loads((folder / "summary.json").read_text())
        losses.setdefault(summary["residual"], []).append(summary["loss"])
    words = visible(written.read_text())
    for values in losses.values():
        assert f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}" in words
    paired = [a - b for a, b in zip(losses["attnres-full"], losses["standard"])]
    assert f"−{-statistics.fmean(paired):.4f} ± {statistics.stdev(paired):.4f}" in words
    assert words.count("lowest") == 1
    assert "9 of 9 finished" in words


@pytest.mark.parametrize(
    ("shifts", "said"),
    [
        ((-0.03, -0.031, -0.029), "beyond the spread"),
        ((0.03, -0.04, 0.005), "within the spread"),
        ((-0.03,), "may be chance"),
    ],
)
def test_difference_is_judged_by_its_spread(tmp_path, shifts, said):
    for seed, shift in enumerate(shifts):
        base = make_run(tmp_path / f"s{seed}", "standard", seed, layers=1, steps=5)
        rival = make_run(tmp_path / f"a{seed}", "attnres-full", seed, layers=1, steps=5)
        rewrite(base / "summary.json", loss=2.0 + seed)  # seeds far apart: only a paired spread can tell
        rewrite(rival / "summary.json", loss=2.0 + seed + shift)
    page = visible(write_report(sorted(p for p in tmp_path.iterdir()), tmp_path / "r.html").read_text())
    assert said in page


def test_runs_with_other_settings_are_told_apart(tmp_path):
    folders = [make_run(tmp_path / f"lr{lr}", "attnres-full", 0, layers=1, steps=5, lr=lr) for lr in (0.001, 0.002)]
    groups = group_runs([read_run(folder) for folder in folders])
    assert [group.label for group in groups] == ["attnres-full, lr 0.001", "attnres-full, lr 0.002"]
    assert "Settings differ beyond the residual: train.lr." in visible(
        write_report(folders, tmp_path / "r.html").read_text()
    )


def test_one_seed_twice_is_one_run(tmp_path):
    folder = make_comparison(tmp_path / "c", ["standard"], [0], layers=1, steps=5)
    assert "1 of 1 finished" in visible(write_report([folder, folder / "runs" / "0-seed0"]).read_text())


def test_unequal_tokens_are_said(tmp_path):
    folder = make_comparison(tmp_path / "c", ["standard", "attnres-full"], [0], layers=1, steps=5)
    rewrite(folder / "runs" / "1-seed0" / "summary.json", tokens=999_000)
    assert "not a fair comparison" in visible(write_report([folder]).read_text())


def test_resumed_steps_count_once_and_a_cut_line_is_noted(tmp_path):
    folder = make_run(tmp_path / "run", layers=1, steps=5, depth=False, evals=False)
    again = {"kind": "train", "step": 3, "tokens": 3 * 4096, "loss": 7.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + '\n{"kind": "train", "st')
    run = read_run(folder)
    assert [row["step"] for row in run.train] == [1, 2, 3, 4, 5]
    assert run.train[2]["loss"] == 7.0
    assert run.notes == ["1 unreadable line of metrics.jsonl left out"]


def test_smoothing_keeps_gaps_and_thinning_keeps_ends():
    curve = [(i, float(i), None if i == 50 else float(i)) for i in range(400)]
    smoothed = smooth(curve)
    assert smoothed[50][2] is None
    assert smoothed[0][2] == 0.0
    assert smoothed[200][2] == pytest.approx(200.0)  # the average of a straight line around its middle
    kept = thin(curve, 7)
    assert len(kept) == 7
    assert (kept[0], kept[-1]) == (curve[0], curve[-1])


def test_not_a_run_is_one_clear_error(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"dim": 8}')
    (tmp_path / "empty").mkdir()
    for folder, words in [("absent", "is not a folder"), ("empty", "is not a run"), ("model", "is not a run")]:
        with pytest.raises(UserError, match=words) as caught:
            write_report([tmp_path / folder])
        assert folder in str(caught.value)
        assert "metrics.jsonl" in str(caught.value)
    with pytest.raises(UserError, match="at least one folder"):
        write_report([])


def test_large_comparison_stays_small_and_says_it_is_thinned(tmp_path):
    folder = make_comparison(tmp_path / "large", RESIDUALS, list(range(5)), layers=24, steps=4000, records=25)
    page = write_report([folder])
    assert page.stat().st_size < 2_000_000
    drawn = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text()).group(1))
    longest = max(len(run["y"]) for group in drawn["groups"] for run in group["curves"]["train"]["runs"])
    assert longest == drawn["points"] < 4000
    assert len(drawn["groups"][0]["depth"]["frames"]) < 25


def test_maps_are_left_out_when_nothing_else_helps(comparison, monkeypatch):
    monkeypatch.setattr(report, "LIMIT", 1000)
    page = make_page([read_run(folder) for folder in sorted((comparison / "runs").iterdir())])
    assert "depth-mixing maps are left out" in visible(page)
    assert '"mixing":[' not in page


def test_needs_no_torch(comparison, tmp_path):
    code = (
        "import sys; from pathlib import Path; from headwater.analyze.report import write_report;"
        f"write_report([Path({str(comparison)!r})], Path({str(tmp_path / 'r.html')!r}));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# In a browser

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
in_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; install Debian's chromium to run it"),
]


def browser_test(function):
    for mark in in_browser:
        function = mark(function)
    return function


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_api.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield launched
        launched.close()


@pytest.fixture
def visit(browser):
    """Opens a page and, at the end, insists that it raised nothing, logged nothing and asked for nothing but itself."""
    contexts, troubles, allowed = [], [], set()

    def watch(request):
        if request.url not in allowed and not request.url.startswith("data:"):
            troubles.append(f"request {request.url}")

    def open_page(file: Path, **settings):
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | settings))
        contexts.append(context)
        page = context.new_page()
        allowed.add(file.as_uri())
        page.on("request", watch)
        page.on("pageerror", lambda error: troubles.append(f"error {error}"))
        page.on("console", lambda message: troubles.append(f"console {message.text}"))
        page.on("dialog", lambda dialog: (troubles.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


def hover(page, selector: str, x: float, y: float) -> str:
    """Move the pointer to (x, y) inside the element and return what the page says there."""
    page.locator(selector).scroll_into_view_if_needed()
    box = page.locator(selector).bounding_box()
    page.mouse.move(box["x"] + x, box["y"] + y)
    return page.locator("#tip").inner_text() if page.locator("#tip").is_visible() else ""


@browser_test
def test_draws_every_curve_map_and_panel(visit, written):
    page = visit(written)
    assert page.locator("#eval path.mean").count() == 3
    assert page.locator("#eval path.thin").count() == 9
    assert page.locator("#train path.mean").count() == 3
    assert page.locator("#difference path.mean").count() == 2  # the baseline is the zero line
    assert all("L" in path.get_attribute("d") for path in page.locator("path.mean").all())
    cells = page.eval_on_selector_all("#maps canvas", "all => all.map(canvas => Number(canvas.dataset.cells))")
    assert cells == [13 * 14 // 2] * 3  # 12 sublayers: 13 reads over a triangle
    for measure in ("output", "read", "gradient", "entropy"):
        assert page.locator(f"#measure-{measure} svg").count() == 3
    assert page.locator("#measure-read .panel").first.locator(".dot").count() == 13
    assert page.locator("#measure-output .panel").first.locator(".dot").count() == 12


@browser_test
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
    x, y = canvas["x"] - svg["x"] + 3.5 * cell, canvas["y"] - svg["y"] + 9.5 * (canvas["height"] - 5) / 13
    said = hover(page, "#maps .panel:nth-child(3) svg", x, y)
    assert "Read 9, before mlp" in said
    assert "output of sublayer 2, attention" in said
    assert f"{float(f'{expected:.3g}'):g}" in said
    assert hover(page, "#maps .panel:nth-child(3) svg", canvas["width"], y) == ""  # above the diagonal there is nothing

    gradient = statistics.fmean(
        rows(comparison / "runs" / f"0-seed{seed}", "depth")[-1]["gradient_norm"][0] for seed in SEEDS
    )
    said = hover(page, "#measure-gradient .panel:nth-child(1) svg", 45, 80)
    assert "Sublayer 0, attention" in said
    assert f"{float(f'{gradient:.3g}'):g}" in said


@browser_test
def test_keyboard_reaches_values(visit, written):
    page = visit(written)
    page.locator("#maps .panel:nth-child(1) svg").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert "Read 11, before mlp" in page.locator("#tip").inner_text()
    assert page.locator("#tip").inner_text().endswith("1")
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()


@browser_test
def test_legend_range_reads_rows_scale_and_step_respond(visit, written):
    page = visit(written)
    page.locator("#legend button").nth(1).click()
    assert page.locator("#eval path.mean").count() == 2
    assert page.locator("#legend button").nth(1).get_attribute("aria-pressed") == "false"
    whole = page.locator("#eval path.mean").first.get_attribute("d")
    page.get_by_label("last half").check()
    assert page.locator("#eval path.mean").first.get_attribute("d") != whole
    page.get_by_label("before attention").check()
    assert page.locator("#maps canvas").first.get_attribute("data-cells") == str(sum(range(1, 13, 2)) + 13)
    page.get_by_label("each row sums to one").check()
    page.locator("#maps .panel:nth-child(1) svg").focus()
    page.keyboard.press("ArrowDown")
    assert "0.0769" in page.locator("#tip").inner_text()  # thirteen equal sources
    before = page.locator("#measure-output path.c0").first.get_attribute("d")
    page.locator("#slider input").fill("0")
    assert page.locator("#slider output").inner_text().startswith("step 40 ")
    assert page.locator("#measure-output path.c0").first.get_attribute("d") != before
    scale = page.locator("#measure-gradient")
    before = scale.locator("path.c0").first.get_attribute("d")
    scale.get_by_label("log").check()
    assert scale.locator("path.c0").first.get_attribute("d") != before


@browser_test
@pytest.mark.parametrize("layers", [6, 48])
def test_phone_does_not_scroll_sideways(visit, comparison, tmp_path, layers):
    folder = (
        comparison
        if layers == 6
        else make_comparison(tmp_path / "deep", RESIDUALS, [0], layers=layers, steps=20, records=1)
    )
    page = visit(
        write_report([folder], tmp_path / "r.html"),
        viewport={"width": 390, "height": 844},
        has_touch=True,
        is_mobile=True,
    )
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("Math.round(visualViewport.width)") == 390
    assert page.evaluate(
        "[...document.querySelectorAll('.chart svg')].every(svg => svg.getBoundingClientRect().right <= 390)"
    )


@browser_test
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


@browser_test
def test_names_are_text(visit, tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(2)>"
    make_run(folder, HOSTILE, layers=2, steps=20)
    lines = (folder / "metrics.jsonl").read_text().replace('"mlp"', '"</script><b id=planted>"')
    (folder / "metrics.jsonl").write_text(lines)
    other = make_run(tmp_path / "plain", "standard", layers=2, steps=20)
    page = visit(write_report([folder, other], tmp_path / "r.html"))
    assert page.locator("h1").inner_text() == f"{HOSTILE} against standard"
    assert page.locator("#legend").inner_text().splitlines()[-1] == HOSTILE
    assert page.title() == f"{HOSTILE} against standard · headwater"
    assert page.locator("#planted").count() == 0
    page.locator("summary").click()
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


@browser_test
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
    folder = make_run(tmp_path / "run", "standard", **({"layers": 2, "steps": 20, "records": 1} | settings))
    if damage:
        damage(folder)
    page = visit(write_report([folder]))
    assert said in page.locator("main").inner_text()
    assert "NaN" not in page.locator("main").inner_text()
    assert page.locator("main").inner_html().count("NaN") == 0


@browser_test
def test_a_missing_value_is_a_gap(visit, tmp_path):
    folder = make_run(tmp_path / "run", "standard", layers=2, steps=20)
    with_nulls(folder)  # no loss after step 10
    page = visit(write_report([folder]))
    assert len(re.findall("[ML]", page.locator("#train path.mean").get_attribute("d"))) == 10


@browser_test
def test_residuals_with_and_without_depth_records_share_a_page(visit, tmp_path):
    full = make_run(tmp_path / "a", "attnres-full", layers=2, steps=20)
    bare = make_run(tmp_path / "b", "standard", layers=2, steps=20, depth=False, finished=False)
    page = visit(write_report([full, bare], tmp_path / "r.html"))
    assert page.locator("#maps canvas").count() == 1
    assert page.locator("#maps .empty").inner_text() == "No depth records."
    assert "no finished seed in common" in page.locator("table").first.inner_text()


@browser_test
def test_few_large_weights_do_not_fade_the_map(visit, tmp_path):
    page = visit(write_report([make_run(tmp_path / "run", "attnres-full", layers=16, steps=4, records=1)]))
    words = page.locator("#scale").text_content()
    assert (
        0.1 < float(words.rsplit("≥ ", 1)[1]) < 0.95
    )  # the first read's only weight is one, and lies beyond the scale


@browser_test
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
