"""The inspector's page in headless Chromium: choosing, comparing, sharing, downloading; and that tokens stay text."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest
import torch
from tinymodels import model_of, tokens_of

import headwater
from headwater.analyze.inspector import Inspection, Removal, Top
from headwater.analyze.inspector.page import LEVELS
from headwater.errors import UserError

pytestmark = pytest.mark.browser

LENGTH = 9
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
HOSTILE = {
    3: "</script><script>alert(1)</script>",
    7: "<img src=x onerror=alert(1)>",
    11: "\u202eright to left \u05d0\u05d1",
    13: "x" * 10_000,
    17: "\x00\x1b[31m",
}
CONTRAST = """() => {
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const nodes = [...document.querySelectorAll("#tokens button:not(.every)")].slice(1);
  return nodes.concat(...document.querySelectorAll(".said:not(:empty)")).map((node) => {
    const { color, backgroundColor } = getComputedStyle(node);
    const [low, high] = [light(color), light(backgroundColor)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  });
}"""
FILL = """(words) => {
  for (const node of document.querySelectorAll(".odds .percent")) node.textContent = words;
  return [...document.querySelectorAll(".odds")].map((list) => list.getBoundingClientRect().height);
}"""


class Letters:
    def decode(self, ids):
        return HOSTILE.get(ids[0], f"w{ids[0]} ")


def look(spec="attnres-full", **options):
    """Of a small model whose parameters are off their start."""
    tokens = options.pop("tokens", tokens_of(1, LENGTH))
    model = model_of(spec, scatter=True, layers=2)
    return headwater.inspect(model, tokens, **({"tokenizer": Letters(), "name": spec} | options))


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    return look()


@pytest.fixture(scope="module")
def written(inspection, tmp_path_factory):
    return inspection.save(tmp_path_factory.mktemp("inspect") / "one.html")


def address(file, **chosen):
    return f"{file.as_uri()}#{'&'.join(f'{key}={value}' for key, value in chosen.items())}"


def cell(page, read, source, model=0):
    """Where a cell of the grid stands on the screen."""
    panel = page.locator("#grid .panel").nth(model)
    panel.scroll_into_view_if_needed()
    canvas = panel.locator("canvas").bounding_box()
    size = canvas["width"] / 5
    return canvas["x"] + (source + 0.5) * size, canvas["y"] + (read + 0.5) * size


def number(words: str) -> float:
    return float(words.replace("−", "-"))


@pytest.mark.parametrize("spec", ["attnres-full", "denseformer", "mhc", "ddl"])
def test_the_pages_numbers_are_the_inspections(visit, tmp_path, spec):
    inspection = look(spec)
    page = visit(inspection.save(tmp_path / "page.html"))
    rows, columns = zip(*inspection.pairs)
    expected = {
        "mixing": inspection.mixing[list(rows), list(columns)],
        "loss": inspection.loss,
        "readSize": inspection.read_size,
        "sourceSize": inspection.source_size,
        "reads.p": inspection.reads.probabilities,
        "sources.p": inspection.sources.probabilities,
        "removed.loss": inspection.removed.loss,
        "removed.top.p": inspection.removed.top.probabilities,
        "removedAt.loss": inspection.removed_at.loss,
        "removedAt.top.p": inspection.removed_at.top.probabilities,
    }
    for name, values in expected.items():
        shown = torch.tensor(page.evaluate(f"[...models[0].{name}]"), dtype=torch.float64)
        torch.testing.assert_close(shown, values.double().flatten(), atol=1e-5, rtol=0)
    texts = page.evaluate("[...models[0].removedAt.top.ids].map((place) => data.texts[place])")
    assert texts == [inspection.texts[i] for i in inspection.removed_at.top.ids.flatten().tolist()]
    meaning = page.locator("#grid .caption")
    assert meaning.count() == (spec == "ddl")
    if spec == "ddl":
        assert "matrices" in meaning.inner_text()


def test_a_token_a_read_and_a_source_are_chosen_and_taken_away(visit, inspection, written):
    page = visit(written)
    page.locator('#tokens button[data-token="5"]').click()
    assert page.locator('#tokens [aria-checked="true"]').get_attribute("data-token") == "5"
    assert f"loss {inspection.loss[5]:.4f} nats" in page.locator("#summary").inner_text()
    page.mouse.move(*cell(page, 3, 1))
    weight = re.search(r"weight\s+(\S+)", page.locator("#tip").inner_text()).group(1)
    assert number(weight) == pytest.approx(inspection.mixing[3, 1, 5].item(), abs=1e-5)
    page.mouse.click(*cell(page, 3, 1))
    assert "Read 3, before MLP" in page.locator("#grid .panel").nth(1).inner_text()
    assert page.locator(".sources tbody tr").count() == 4
    assert page.locator(".sources tr.chosen th").inner_text() == "A0"
    assert page.evaluate("[0.14, 4, -0.2, 0.0004].map(inColumn)") == [
        "0.140",
        "4.00",
        "−0.200",
        "4.00e−4",
    ]
    place = inspection.pairs.index((3, 1))
    said = page.locator("#without .verdict").inner_text()
    assert "output of sublayer 0, attention, at read 3 alone" in said
    assert number(re.search(r"by (\S+) nats", said).group(1)) == pytest.approx(
        inspection.removed_at.loss[place, 5].item(), abs=6e-4
    )
    page.get_by_label("at all reads").check()
    said = page.locator("#without .verdict").inner_text()
    assert "at every read" in said
    assert number(re.search(r"by (\S+) nats", said).group(1)) == pytest.approx(
        inspection.removed.loss[1, 5].item(), abs=6e-4
    )
    after = page.locator("#without .beside > div").nth(1).locator(".token").all_inner_texts()
    assert after == page.evaluate(
        "(ids) => ids.map((i) => clip(seen(i)))",
        [inspection.texts[i] for i in inspection.removed.top.ids[1, 5].tolist()],
    )
    page.get_by_label("effects").check()
    assert "change of loss" in page.locator("#scale").text_content()
    page.locator("#tokens .every").click()
    assert f"{inspection.loss.mean():.4f}" in page.locator("#summary").inner_text()
    said = page.locator("#without .verdict").inner_text()
    assert number(re.search(r"by (\S+) nats", said).group(1)) == pytest.approx(
        inspection.removed.loss[1].mean().item(), abs=6e-4
    )


def test_the_lens_shows_what_reads_and_sources_say(visit, inspection, written):
    page = visit(address(written, token=4, read=2))
    rows = page.locator(".says tbody tr")
    assert rows.count() == 6  # the embedding, four sublayers, the head
    said = rows.nth(3).locator(".said").all_inner_texts()
    expected = [
        inspection.texts[i]
        for i in [*inspection.reads.ids[2, 4].tolist(), *inspection.sources.ids[3, 4].tolist()]
    ]
    assert said == page.evaluate("(texts) => texts.map((text) => clip(seen(text)))", expected)
    assert rows.nth(3).get_attribute("class") == "chosen"
    page.keyboard.press("a")
    right = (inspection.reads.ids[4, :-1, 0] == torch.tensor(inspection.ids[1:])).float().mean()
    assert number(
        rows.nth(5).locator("td").first.inner_text().split()[0].removeprefix("<")
    ) / 100 == pytest.approx(right.item(), abs=2e-3)


def test_weight_against_effect_has_every_pair(visit, inspection, written):
    page = visit(address(written, token=2, read=4))
    assert (
        page.locator("#scatter .mark").count() == len(inspection.pairs) - 1
    )  # the first read has one source
    page.locator("#scatter svg").focus()
    page.keyboard.press("ArrowRight")
    said = page.locator("#tip").inner_text()
    shares = inspection.mixing / inspection.mixing.abs().sum(1, keepdim=True)
    least = min((shares[r, s, 2].abs().item(), i) for i, (r, s) in enumerate(inspection.pairs) if r)
    assert number(re.search(r"share of the row\s+(\S+)", said).group(1)) == pytest.approx(
        least[0], rel=1e-2
    )
    effect = inspection.removed_at.loss[least[1], 2].item()
    assert number(re.search(r"loss without it\s+(\S+)", said).group(1)) == pytest.approx(
        effect, abs=6e-4
    )


@pytest.mark.parametrize(
    "spec", ["attnres-full", "denseformer"]
)  # the weights of a second depend on no token
def test_weight_times_size_is_what_a_source_brings(visit, tmp_path, spec):
    inspection = look(spec)
    page = visit(address(inspection.save(tmp_path / "page.html"), token=2, read=4))
    brought = inspection.mixing * inspection.source_size
    page.get_by_label("weight × size", exact=True).check()
    assert "weight × size of the source" in page.locator("#scale").text_content()
    shown = "() => Array.from({ length: models[0].depth + 1 }, (_, read) => cellsOf(models[0], read)).flat()"
    rows, columns = map(list, zip(*inspection.pairs))
    for expected in (brought[..., 2], brought.mean(-1)):
        cells = torch.tensor(page.evaluate(shown), dtype=torch.float64)
        torch.testing.assert_close(cells, expected[rows, columns].double(), atol=2e-5, rtol=1e-4)
        points = torch.tensor(
            page.evaluate("pointsOf(models[0]).map(({ x }) => x)"), dtype=torch.float64
        )
        torch.testing.assert_close(
            points, cells[1:].abs(), atol=0, rtol=0
        )  # the first read has one source
        page.locator("#tokens .every").click()
    assert (
        "Rank correlation of weight × size and size of the effect"
        in page.locator("#scatter .caption").inner_text()
    )
    for where, column in (("grid", "weight_times_size"), ("scatter", "weight_times_size")):
        with page.expect_download() as download:
            page.locator(f'[data-save="{where}"] button', has_text="CSV").click()
        last = list(csv.DictReader(io.StringIO(download.value.path().read_text())))[-1]
        assert float(last[column]) == pytest.approx(brought[-1, -1].mean().item(), rel=1e-3)


def test_two_models_side_by_side(visit, inspection, tmp_path):
    inspection, other = replace(inspection, name="mine"), look("denseformer:period=2", name="yours")
    page = visit(inspection.save(tmp_path / "two.html", other))
    assert page.locator("#grid canvas").count() == page.locator("#says table").count() == 2
    assert page.locator("#grid .title small").all_inner_texts() == [
        one.residual for one in (inspection, other)
    ]
    page.locator('#tokens button[data-token="3"]').click()
    page.mouse.click(*cell(page, 4, 2, model=1))
    verdicts = page.locator("#without .verdict").all_inner_texts()
    place = inspection.pairs.index((4, 2))
    shown = [number(re.search(r"by (\S+) nats", said).group(1)) for said in verdicts]
    assert shown == pytest.approx(
        [one.removed_at.loss[place, 3].item() for one in (inspection, other)], abs=6e-4
    )
    with pytest.raises(UserError, match="same tokens"):
        inspection.to_html(look(tokens=tokens_of(1, LENGTH, seed=5)))


def test_the_address_keeps_what_is_chosen(visit, written):
    page = visit(address(written, token=6, read=3, source=2, show="weight", away="all"))
    assert page.locator('#tokens [aria-checked="true"]').get_attribute("data-token") == "6"
    assert page.locator("#values :checked").get_attribute("value") == "weight"
    assert "output of sublayer 1, MLP, at every read" in page.locator("#without").inner_text()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("x")
    assert "token=5" in page.url
    assert "away=read" in page.url
    page.reload()
    assert page.locator('#tokens [aria-checked="true"]').get_attribute("data-token") == "5"
    for nonsense in ("token=99&read=-1&source=x&show=<b>", "token=all&read=2&source=4"):
        page.evaluate("(hash) => { location.hash = hash; }", nonsense)
        page.wait_for_timeout(50)
        assert page.locator("#grid canvas").count() == 1


def test_everything_can_be_reached_by_keyboard(visit, written):
    page = visit(address(written, token=1, read=4, source=0))
    page.locator('#tokens [aria-checked="true"]').focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.token") == "2"
    page.locator("#grid svg").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert "Read 3, before MLP" in page.locator("#tip").inner_text()
    page.keyboard.press("Enter")
    assert "read=3&source=1" in page.url
    assert page.evaluate("document.activeElement.tagName") == "svg"
    page.locator(".sources tbody button").first.press("Enter")
    assert "source=0" in page.url


def test_a_phone_shows_all_of_it_without_scrolling_sideways(visit, inspection, tmp_path):
    page = visit(inspection.save(tmp_path / "two.html", look("mhc")), **PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator('#tokens button[data-token="4"]').tap()
    assert "After token 4" in page.locator("#summary").inner_text()
    page.touchscreen.tap(*cell(page, 2, 1))
    assert "read=2&source=1" in page.url
    odds = page.locator(".odds .percent")
    assert odds.count() == 20
    shown = page.evaluate("[0.0004, 0.0009, 0.0012, 0.994, 1].map(percent)")
    assert shown == ["<0.1 %", "<0.1 %", "0.12 %", "99.4 %", "100 %"]
    heights = [page.evaluate(FILL, words) for words in ("1 %", *shown)]
    assert heights == heights[:1] * 6  # each in one line


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tokens_can_be_read_in_light_and_in_the_dark(visit, written, scheme):
    page = visit(written, color_scheme=scheme)
    ratios = page.evaluate(CONTRAST)
    assert len(ratios) > 40
    assert min(ratios) >= 4.5
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 24)"
    assert dark == (scheme == "dark")


def test_tokens_and_names_are_never_markup(visit, tmp_path):
    tokens = [*HOSTILE, 20, 21]
    inspection = look(tokens=tokens, name="</title><script>alert(2)</script>" + "n" * 10_000)
    page = visit(inspection.save(tmp_path / "page.html", look(tokens=tokens, name="=1+1")))
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    shown = page.locator("#tokens button").all_inner_texts()[1:]
    assert shown[0].startswith("</script>")
    assert shown[2].startswith("\\u202eright")  # what would turn the text around it is spelled out
    assert len(shown[3]) == 41
    assert shown[4] == "\\u0000\\u001b[31m"
    assert page.locator("img").count() == 0
    with page.expect_download() as download:
        page.locator('[data-save="grid"] button', has_text="CSV").click()
    rows = list(csv.reader(io.StringIO(download.value.path().read_text())))
    assert rows[-1][0] == "'=1+1"  # no spreadsheet runs it


def test_downloads_hold_what_is_shown(visit, inspection, written):
    page = visit(address(written, token=3, read=2))
    saved = {}
    for where, words in (
        ("grid", "CSV"),
        ("grid", "PNG"),
        ("scatter", "SVG"),
        ("lens", "CSV"),
        ("sizes", "CSV"),
        ("page", "JSON"),
    ):
        with page.expect_download() as download:
            page.locator(f'[data-save="{where}"] button', has_text=words).click()
        saved[where, words] = download.value.path().read_bytes()
    rows = list(csv.DictReader(io.StringIO(saved["grid", "CSV"].decode())))
    assert [(int(row["read"]), int(row["source"])) for row in rows] == inspection.pairs
    for i, (row, (read, source)) in enumerate(zip(rows, inspection.pairs)):
        assert float(row["weight"]) == pytest.approx(
            inspection.mixing[read, source, 3].item(), abs=1e-5
        )
        assert float(row["loss_without_it_here"]) == pytest.approx(
            inspection.removed_at.loss[i, 3].item(), abs=1e-5
        )
    assert saved["grid", "PNG"].startswith(b"\x89PNG")
    assert b"<circle" in saved["scatter", "SVG"]
    assert len(saved["lens", "CSV"].decode().splitlines()) >= 1 + 2 * 5 * 5
    page.locator("#tokens .every").click()
    with page.expect_download() as download:
        page.locator('[data-save="lens"] button', has_text="CSV").click()
    said = list(csv.DictReader(io.StringIO(download.value.path().read_text())))
    assert (
        len(said) == LENGTH * 2 * 5 * 5
    )  # over all tokens there is no average of words: each token's are there
    assert float(said[-1]["probability"]) == pytest.approx(
        inspection.sources.probabilities[-1, -1, -1].item(), abs=1e-5
    )
    everything = json.loads(saved["page", "JSON"])
    assert everything["models"][0]["loss"] == pytest.approx(inspection.loss.tolist(), abs=1e-5)


def test_notes_heads_and_what_was_not_computed(visit, tmp_path):
    model, tokens = model_of("attnres-full:heads=4", layers=2), tokens_of(1, LENGTH)
    page = visit(headwater.inspect(model, tokens, removals="none").save(tmp_path / "start.html"))
    assert "mean nothing yet" in page.locator(".notes").inner_text()
    assert "average" in page.locator("#grid .caption").inner_text()
    assert "--removals" in page.locator("#without").inner_text()
    inspection = look("attnres-full:heads=4", removals="sources")
    page = visit(inspection.save(tmp_path / "heads.html"))
    page.locator('#tokens button[data-token="2"]').click()
    page.get_by_label("3", exact=True).check()
    page.mouse.move(*cell(page, 4, 2))
    weight = re.search(r"weight\s+(\S+)", page.locator("#tip").inner_text()).group(1)
    assert number(weight) == pytest.approx(inspection.parts["head 3"][4, 2, 2].item(), abs=1e-5)
    assert page.locator("#scatter .mark").count() == 5


def test_kinds_are_told_apart_and_experts_listed(visit, tmp_path):
    model = model_of(
        "attnres-full", scatter=True, layers=2, pattern="kda:mla", experts=4, expert_dim=8
    )
    inspection = headwater.inspect(model, tokens_of(1, LENGTH), removals="none")
    page = visit(address(inspection.save(tmp_path / "experts.html"), token=4))
    assert page.locator("#grid svg .kindmark").all_text_contents()[::2] == ["K", "E", "L", "E"]
    assert [
        word for word in ("KDA", "MoE", "MLA") if word in page.locator("#kinds").inner_text()
    ] == [
        "KDA",
        "MoE",
        "MLA",
    ]
    shown = page.locator(".experts tr").nth(1).locator(".expert code").all_inner_texts()
    assert shown == [str(i) for i in inspection.experts[3].ids[4].tolist()]
    page.locator("#tokens .every").click()
    first = page.locator(".experts tr").nth(1).locator(".expert").first
    often = inspection.experts[3].ids.flatten().bincount().max().item() / LENGTH
    assert number(first.locator("small").inner_text().removesuffix(" %")) / 100 == pytest.approx(
        often, abs=1e-2
    )


def test_a_notebook_shows_it_in_a_frame_of_its_own(visit, inspection, tmp_path):
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><link rel=icon href='data:,'>{inspection._repr_html_()}")
    page = visit(file)
    frame = page.frame_locator("iframe")
    frame.locator('#tokens button[data-token="2"]').click()
    assert "After token 2" in frame.locator("#summary").inner_text()
    assert page.locator("iframe").get_attribute("sandbox") == "allow-scripts allow-downloads"


def synthetic(length, layers, heads=0):
    """As large as a real one, without the passes."""
    generator, sources = torch.Generator().manual_seed(0), 2 * layers + 1
    pairs = sources * (sources + 1) // 2

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    def top(*shape):
        return Top(torch.randint(0, 30000, (*shape, 5), generator=generator), rand(*shape, 5))

    mixing = rand(sources, sources, length)
    return Inspection(
        name="large", residual="attnres-full", mixes="scalar", kinds=("attention", "mlp") * layers,
        tokens=("w",) * length, ids=(0,) * length, texts={i: f"word{i}" for i in range(30000)} | {0: "w"},
        loss=rand(length - 1), mixing=mixing, parts={f"head {i + 1}": mixing for i in range(heads)},
        read_size=rand(sources, length), source_size=rand(sources, length), reads=top(sources, length),
        sources=top(sources, length), experts={}, removed=Removal(8 * rand(sources, length - 1), top(sources, length)),
        removed_at=Removal(8 * rand(pairs, length - 1), top(pairs, length)),
    )  # fmt: skip


def test_128_tokens_and_24_layers_stay_under_3_mb(visit, tmp_path):
    large = synthetic(128, 24)
    page = large.to_html()
    assert len(page.encode()) < 3_000_000
    assert (
        LEVELS[2] not in page
    )  # effects at each read, and the likeliest token without each source, are there
    with_heads = replace(large, parts={f"head {i + 1}": large.mixing for i in range(3)}).save(
        tmp_path / "heads.html"
    )
    assert with_heads.stat().st_size < 3_000_000
    shown = visit(with_heads)
    assert "averages over tokens" in shown.locator(".notes").inner_text()
    shown.get_by_label("effects").check()
    shown.get_by_label("3", exact=True).check()
    average = large.mixing[48, 0].mean().item()
    assert shown.evaluate("weightsOf(models[0], 48)[0]") == pytest.approx(average, abs=1e-5)


@pytest.mark.parametrize("factor", [0.99, 1.0, 1.01])
def test_names_of_lines_that_end_close_together_do_not_overlap(
    inspection, tmp_path, browser, factor
):
    page = browser.new_page()
    page.goto(
        replace(inspection, source_size=inspection.read_size * factor)
        .save(tmp_path / "close.html")
        .as_uri()
    )
    boxes = {
        node.text_content(): node.bounding_box()
        for node in page.query_selector_all("#sizes .ending")
    }
    gap = boxes["sources"]["y"] - boxes["reads"]["y"]
    assert abs(gap) >= 12
    assert factor == 1 or (gap > 0) == (factor < 1)  # the larger one stands higher
    page.close()
