"""The inspector's page in headless Chromium: choosing, comparing, sharing, downloading; and that tokens stay text."""

import csv
import json
import re
from dataclasses import replace

import pytest
import torch
from tinymodels import model_of, tokens_of
from torch.testing import assert_close

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


def look(spec="attnres-full", tokens=None, **options):
    """Inspect a small model whose parameters are off their start."""
    tokens = tokens_of(1, LENGTH) if tokens is None else tokens
    model = model_of(spec, scatter=True, layers=2)
    options = {"tokenizer": Letters(), "name": spec} | options
    return headwater.inspect(model, tokens, **options)


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    return look()


@pytest.fixture(scope="module")
def written(inspection, tmp_path_factory):
    return inspection.save(tmp_path_factory.mktemp("inspect") / "one.html")


def address(file, **chosen):
    return f"{file.as_uri()}#{'&'.join(f'{key}={value}' for key, value in chosen.items())}"


def cell(page, read, source, model=0):
    """Return the place of a grid's cell on the screen."""
    panel = page.locator("#grid .panel").nth(model)
    panel.scroll_into_view_if_needed()
    canvas = panel.locator("canvas").bounding_box()
    size = canvas["width"] / 5
    x = canvas["x"] + (source + 0.5) * size
    return x, canvas["y"] + (read + 0.5) * size


def number(words: str, before: str = "") -> float:
    """The number in words, after these words."""
    return float(re.search(rf"{before}\s*(\S+)", words).group(1).replace("−", "-"))


def select(page, token) -> None:
    page.locator(f'#tokens button[data-token="{token}"]').click()


def words_of(page, selector: str) -> str:
    return page.locator(selector).inner_text()


def texts_of(inspection, ids) -> list[str]:
    return [inspection.texts[i] for i in ids.flatten().tolist()]


def near(value, abs=6e-4):
    return pytest.approx(value.item(), abs=abs)


def clipped(page, texts) -> list[str]:
    return page.evaluate("(texts) => texts.map((text) => clip(seen(text)))", texts)


def download(page, where: str, words: str) -> bytes:
    with page.expect_download() as caught:
        page.locator(f'[data-save="{where}"] button', has_text=words).click()
    return caught.value.path().read_bytes()


def table(page, where: str) -> list[dict]:
    lines = download(page, where, "CSV").decode().splitlines()
    return list(csv.DictReader(lines))


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
        on_page = torch.tensor(page.evaluate(f"[...models[0].{name}]"), dtype=torch.float64)
        values = values.double().flatten()
        assert_close(on_page, values, atol=1e-5, rtol=0)
    texts = page.evaluate("[...models[0].removedAt.top.ids].map((place) => data.texts[place])")
    assert texts == texts_of(inspection, inspection.removed_at.top.ids)
    assert page.locator("#grid .caption", has_text="matrices").count() == (spec == "ddl")


def test_a_token_a_read_and_a_source_are_chosen_and_taken_away(visit, inspection, written):
    page = visit(written)
    select(page, 5)
    assert page.locator('#tokens [aria-checked="true"]').get_attribute("data-token") == "5"
    assert f"loss {inspection.loss[5]:.4f} nats" in words_of(page, "#summary")
    page.mouse.move(*cell(page, 3, 1))
    assert number(words_of(page, "#tip"), "weight") == near(inspection.mixing[3, 1, 5], 1e-5)
    page.mouse.click(*cell(page, 3, 1))
    assert "Read 3, before MLP" in page.locator("#grid .panel").nth(1).inner_text()
    assert page.locator(".sources tbody tr").count() == 4
    assert words_of(page, ".sources tr.chosen th") == "A0"
    columns = page.evaluate("[0.14, 4, -0.2, 0.0004].map(inColumn)")
    assert columns == ["0.140", "4.00", "−0.200", "4.00e−4"]

    # Taken away at one read, at all reads, and on average over tokens.
    place, removed = inspection.pairs.index((3, 1)), inspection.removed
    verdict = words_of(page, "#without .verdict")
    assert "output of sublayer 0, attention, at read 3 only" in verdict
    assert number(verdict, "by") == near(inspection.removed_at.loss[place, 5])
    page.get_by_label("at all reads").check()
    verdict = words_of(page, "#without .verdict")
    assert "at every read" in verdict
    assert number(verdict, "by") == near(removed.loss[1, 5])
    after = page.locator("#without .beside > div").nth(1).locator(".token").all_inner_texts()
    assert after == clipped(page, texts_of(inspection, removed.top.ids[1, 5]))
    page.get_by_label("effects").check()
    assert "change of loss" in page.locator("#scale").text_content()
    page.locator("#tokens .every").click()
    assert f"{inspection.loss.mean():.4f}" in words_of(page, "#summary")
    assert number(words_of(page, "#without .verdict"), "by") == near(removed.loss[1].mean())


def test_the_lens_shows_what_reads_and_sources_say(visit, inspection, written):
    page = visit(address(written, token=4, read=2))
    rows = page.locator(".says tbody tr")
    assert rows.count() == 6  # the embedding, four sublayers, the head
    ids = torch.cat((inspection.reads.ids[2, 4], inspection.sources.ids[3, 4]))
    words = rows.nth(3).locator(".said").all_inner_texts()
    assert words == clipped(page, texts_of(inspection, ids))
    assert rows.nth(3).get_attribute("class") == "chosen"
    page.keyboard.press("a")
    likeliest, following = inspection.reads.ids[4, :-1, 0], torch.tensor(inspection.ids[1:])
    right = (likeliest == following).float().mean()
    share = rows.nth(5).locator("td").first.inner_text().split()[0]
    assert number(share.removeprefix("<")) / 100 == near(right, 2e-3)


def test_weight_against_effect_has_every_pair(visit, inspection, written):
    page = visit(address(written, token=2, read=4))
    # The first read has one source.
    assert page.locator("#scatter .mark").count() == len(inspection.pairs) - 1
    page.locator("#scatter svg").focus()
    page.keyboard.press("ArrowRight")
    sizes = inspection.mixing.abs()
    shares = sizes / sizes.sum(1, keepdim=True)
    dots = []
    for place, (read, source) in enumerate(inspection.pairs[1:], 1):
        dots.append((shares[read, source, 2].item(), place))
    smallest, place = min(dots)
    words = words_of(page, "#tip")
    assert number(words, "share of the row") == pytest.approx(smallest, rel=1e-2)
    assert number(words, "loss without it") == near(inspection.removed_at.loss[place, 2])


# The weights of the second depend on no token.
@pytest.mark.parametrize("spec", ["attnres-full", "denseformer"])
def test_weight_times_size_is_what_a_source_brings(visit, tmp_path, spec):
    inspection = look(spec)
    page = visit(address(inspection.save(tmp_path / "page.html"), token=2, read=4))
    brought = inspection.mixing * inspection.source_size
    page.get_by_label("weight × size", exact=True).check()
    assert "weight × size of the source" in page.locator("#scale").text_content()
    on_page = "() => Array.from({ length: models[0].depth + 1 }, (_, read) => cellsOf(models[0], read)).flat()"
    rows, columns = map(list, zip(*inspection.pairs))
    for expected in (brought[..., 2], brought.mean(-1)):
        cells = torch.tensor(page.evaluate(on_page), dtype=torch.float64)
        expected = expected[rows, columns].double()
        assert_close(cells, expected, atol=2e-5, rtol=1e-4)
        points = page.evaluate("pointsOf(models[0]).map(({ x }) => x)")
        # The first read has one source
        assert points == cells[1:].abs().tolist()
        page.locator("#tokens .every").click()
    caption = words_of(page, "#scatter .caption")
    assert "Rank correlation of weight × size and size of the effect" in caption
    for where in ("grid", "scatter"):
        brings = float(table(page, where)[-1]["weight_times_size"])
        expected = brought[-1, -1].mean().item()
        assert brings == pytest.approx(expected, rel=1e-3)


def test_two_models_side_by_side(visit, inspection, tmp_path):
    inspection, other = replace(inspection, name="mine"), look("denseformer:period=2", name="yours")
    page = visit(inspection.save(tmp_path / "two.html", other))
    assert page.locator("#grid canvas").count() == page.locator("#says table").count() == 2
    titles = page.locator("#grid .title small").all_inner_texts()
    assert titles == [inspection.residual, other.residual]
    select(page, 3)
    page.mouse.click(*cell(page, 4, 2, model=1))
    place = inspection.pairs.index((4, 2))
    verdicts = page.locator("#without .verdict").all_inner_texts()
    for verdict, one in zip(verdicts, (inspection, other), strict=True):
        assert number(verdict, "by") == near(one.removed_at.loss[place, 3])
    with pytest.raises(UserError, match="same tokens"):
        inspection.to_html(look(tokens=tokens_of(1, LENGTH, seed=5)))


def test_the_page_opens_where_the_last_read_misses_a_source_most(visit, inspection, written):
    effects = inspection.removed_at.loss[-len(inspection.source_size) :]
    after = range((len(inspection.tokens) - 1) // 4 + 1, len(inspection.tokens) - 1)
    places = [token for token in after if inspection.tokens[token + 1].strip()]
    source, at = divmod(int(effects[:, places].argmax()), len(places))
    page = visit(written)
    chosen = page.locator('#tokens [aria-checked="true"]')
    assert chosen.get_attribute("data-token") == str(places[at])
    changes = page.locator("#summary strong").all_inner_texts()
    assert [number(f"by {change}", "by") for change in changes] == [near(effects.max())]
    assert page.locator(".sources .chosen").count() == 1
    assert page.locator(".sources tbody tr").nth(source).get_attribute("class") == "chosen"


def test_the_address_keeps_what_is_chosen_and_keys_reach_everything(visit, written):
    chosen = '#tokens [aria-checked="true"]'
    choice = {"token": 6, "read": 3, "source": 2, "show": "weight", "away": "all"}
    page = visit(address(written, **choice))
    assert page.locator(chosen).get_attribute("data-token") == "6"
    assert page.locator("#values :checked").get_attribute("value") == "weight"
    assert "output of sublayer 1, MLP, at every read" in words_of(page, "#without")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("x")
    assert "token=5" in page.url
    assert "away=read" in page.url
    page.reload()
    assert page.locator(chosen).get_attribute("data-token") == "5"
    page.locator("#grid svg").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert "Read 2, before attention" in words_of(page, "#tip")
    page.keyboard.press("Enter")
    assert "read=2" in page.url
    assert page.evaluate("document.activeElement.tagName") == "svg"
    page.locator(".sources tbody button").first.press("Enter")
    assert "source=0" in page.url
    page.locator(chosen).focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.token") == "6"
    for nonsense in ("token=99&read=-1&source=x&show=<b>", "token=all&read=2&source=4"):
        page.evaluate("(hash) => { location.hash = hash; }", nonsense)
        page.wait_for_timeout(50)
        assert page.locator("#grid canvas").count() == 1


def test_a_phone_shows_all_of_it_without_scrolling_sideways(visit, inspection, tmp_path):
    page = visit(inspection.save(tmp_path / "two.html", look("mhc")), **PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator('#tokens button[data-token="4"]').tap()
    assert "After token 4" in words_of(page, "#summary")
    page.touchscreen.tap(*cell(page, 2, 1))
    assert "read=2&source=1" in page.url
    assert page.locator(".odds .percent").count() == 20
    on_page = page.evaluate("[0.0004, 0.0009, 0.0012, 0.994, 1].map(percent)")
    assert on_page == ["<0.1 %", "<0.1 %", "0.12 %", "99.4 %", "100 %"]
    heights = [page.evaluate(FILL, words) for words in ("1 %", *on_page)]
    assert heights == heights[:1] * 6  # each in one line


@pytest.mark.parametrize(
    ("scheme", "background"), [("light", "255, 255, 255"), ("dark", "18, 20, 24")]
)
def test_tokens_can_be_read_in_light_and_in_the_dark(visit, written, scheme, background):
    page = visit(written, color_scheme=scheme)
    ratios = page.evaluate(CONTRAST)
    assert len(ratios) > 40
    assert min(ratios) >= 4.5
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colour == f"rgb({background})"


def test_tokens_and_names_are_never_markup(visit, tmp_path):
    tokens = [*HOSTILE, 20, 21]
    inspection = look(tokens=tokens, name="</title><script>alert(2)</script>" + "n" * 10_000)
    page = visit(inspection.save(tmp_path / "page.html", look(tokens=tokens, name="=1+1")))
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    on_page = page.locator("#tokens button").all_inner_texts()[1:]
    assert on_page[0].startswith("</script>")
    assert on_page[2].startswith(
        "\\u202eright"
    )  # what would turn the text around it is spelled out
    assert len(on_page[3]) == 41
    assert on_page[4] == "\\u0000\\u001b[31m"
    assert page.locator("img").count() == 0
    assert "'=1+1" in table(page, "grid")[-1].values()  # no spreadsheet runs it


def test_downloads_hold_what_is_shown(visit, inspection, written):
    page = visit(address(written, token=3, read=2))
    rows, effects = table(page, "grid"), inspection.removed_at.loss
    for row, (read, source), effect in zip(rows, inspection.pairs, effects, strict=True):
        assert (row["read"], row["source"]) == (str(read), str(source))
        assert float(row["weight"]) == near(inspection.mixing[read, source, 3], 1e-5)
        assert float(row["loss_without_it_here"]) == near(effect[3], 1e-5)
    assert download(page, "grid", "PNG").startswith(b"\x89PNG")
    assert b"<circle" in download(page, "scatter", "SVG")
    assert len(table(page, "lens")) >= 2 * 5 * 5
    assert table(page, "sizes")
    page.locator("#tokens .every").click()
    words = table(page, "lens")
    # Over all tokens there is no average of words: each token's are there
    assert len(words) == LENGTH * 2 * 5 * 5
    probability = inspection.sources.probabilities[-1, -1, -1]
    assert float(words[-1]["probability"]) == near(probability, 1e-5)
    (model,) = json.loads(download(page, "page", "JSON"))["models"]
    assert model["loss"] == pytest.approx(inspection.loss.tolist(), abs=1e-5)


def test_notes_heads_and_what_was_not_computed(visit, tmp_path):
    model, tokens = model_of("attnres-full:heads=4", layers=2), tokens_of(1, LENGTH)
    page = visit(headwater.inspect(model, tokens, removals="none").save(tmp_path / "start.html"))
    assert "mean nothing yet" in words_of(page, ".notes")
    assert "average" in words_of(page, "#grid .caption")
    assert "--removals" in words_of(page, "#without")
    inspection = look("attnres-full:heads=4", removals="sources")
    page = visit(inspection.save(tmp_path / "heads.html"))
    select(page, 2)
    page.get_by_label("3", exact=True).check()
    page.mouse.move(*cell(page, 4, 2))
    weight = inspection.parts["head 3"][4, 2, 2]
    assert number(words_of(page, "#tip"), "weight") == near(weight, 1e-5)
    assert page.locator("#scatter .mark").count() == 5


def test_kinds_are_told_apart_and_experts_listed(visit, tmp_path):
    settings = {"layers": 2, "pattern": "kda:mla", "experts": 4, "expert_dim": 8}
    model = model_of("attnres-full", scatter=True, **settings)
    inspection = headwater.inspect(model, tokens_of(1, LENGTH), removals="none")
    page = visit(address(inspection.save(tmp_path / "experts.html"), token=4))
    marks = page.locator("#grid svg .kindmark").all_text_contents()
    assert marks[::2] == ["K", "E", "L", "E"]
    assert re.search("KDA.*MoE.*MLA", words_of(page, "#kinds"), re.DOTALL)
    row, experts = page.locator(".experts tr").nth(1), inspection.experts[3].ids
    names = row.locator(".expert code").all_inner_texts()
    assert names == [str(expert) for expert in experts[4].tolist()]
    page.locator("#tokens .every").click()
    often = experts.flatten().bincount().max() / LENGTH
    share = number(row.locator(".expert small").first.inner_text())
    assert share / 100 == near(often, 1e-2)


def test_a_notebook_shows_it_in_a_frame_of_its_own(visit, inspection, tmp_path):
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><link rel=icon href='data:,'>{inspection._repr_html_()}")
    page = visit(file)
    frame = page.frame_locator("iframe")
    frame.locator('#tokens button[data-token="2"]').click()
    assert "After token 2" in frame.locator("#summary").inner_text()
    assert page.locator("iframe").get_attribute("sandbox") == "allow-scripts allow-downloads"


def synthetic(length, layers):
    """Make an inspection as large as a real one, without the passes."""
    generator, sources = torch.Generator().manual_seed(0), 2 * layers + 1
    pairs = sources * (sources + 1) // 2

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    def top(*shape):
        ids = torch.randint(0, 30000, (*shape, 5), generator=generator)
        return Top(ids, rand(*shape, 5))

    def removal(places):
        return Removal(8 * rand(places, length - 1), top(places, length))

    texts = {i: f"word{i}" for i in range(30000)}
    return Inspection(
        name="large",
        residual="attnres-full",
        mixes="scalar",
        kinds=("attention", "mlp") * layers,
        tokens=(texts[0],) * length,
        ids=(0,) * length,
        texts=texts,
        loss=rand(length - 1),
        mixing=rand(sources, sources, length),
        parts={},
        read_size=rand(sources, length),
        source_size=rand(sources, length),
        reads=top(sources, length),
        sources=top(sources, length),
        experts={},
        removed=removal(sources),
        removed_at=removal(pairs),
    )


def test_128_tokens_and_24_layers_stay_under_3_mb(visit, tmp_path):
    large = synthetic(128, 24)
    page = large.to_html()
    assert len(page.encode()) < 3_000_000
    # Effects at each read, and the likeliest token without each source, are there
    assert LEVELS[2] not in page
    heads = replace(large, parts={f"head {i + 1}": large.mixing for i in range(3)})
    file = heads.save(tmp_path / "heads.html")
    assert file.stat().st_size < 3_000_000
    on_page = visit(file)
    assert "averages over tokens" in words_of(on_page, ".notes")
    on_page.get_by_label("effects").check()
    on_page.get_by_label("3", exact=True).check()
    average = large.mixing[48, 0].mean()
    assert on_page.evaluate("weightsOf(models[0], 48)[0]") == near(average, 1e-5)


@pytest.mark.parametrize("factor", [0.99, 1.0, 1.01])
def test_names_of_lines_that_end_close_together_do_not_overlap(visit, inspection, tmp_path, factor):
    close = replace(inspection, source_size=inspection.read_size * factor)
    page = visit(close.save(tmp_path / "close.html"))
    heights = {}
    for node in page.locator("#sizes .ending").all():
        heights[node.text_content()] = node.bounding_box()["y"]
    gap = heights["sources"] - heights["reads"]
    assert abs(gap) >= 12
    assert factor == 1 or (gap > 0) == (factor < 1)  # the larger one stands higher
