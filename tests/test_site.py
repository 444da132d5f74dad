"""The site that `make docs` builds: whole, linked, in step with the code, and readable from disk without a network."""

import importlib
import inspect
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from headwater import cli
from headwater.residuals import entry, names, options_of
from tests.formulas import FORMULAS

ROOT = Path(__file__).parent.parent
ROOMS = ("residuals", "models", "train", "hf", "analyze", "ops")
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


class Links(HTMLParser):
    """Where a page leads, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.leads: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "a" and found.get("href"):
            self.leads.append(found["href"])
        elif tag in ("link", "script", "img", "iframe", "source"):
            self.loads += [found[key] for key in ("href", "src") if found.get(key)]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[str, str]:
    return {
        path.relative_to(site).as_posix(): path.read_text(encoding="utf-8")
        for path in site.rglob("*.html")
    }


@pytest.mark.slow
def test_every_page_can_be_reached_and_nothing_comes_from_a_network(pages, site):
    seen, waiting = set(), ["index.html"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        links = Links(pages[page])
        assert not [
            address for address in links.loads if urlsplit(address).scheme not in ("", "data")
        ], page
        for address in (
            unquote(urlsplit(lead).path) for lead in links.leads if not urlsplit(lead).scheme
        ):
            target = (site / page).parent.joinpath(address).resolve() if address else site / page
            assert target.is_file(), f"{page} leads to {address}"
            waiting.append(target.relative_to(site).as_posix())
    assert set(pages) - seen == {"404.html"}


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_residual_has_a_page_with_mathematics_options_and_a_picture(name, pages):
    page = pages[f"reference/residuals/{name}.html"]
    equations = page.count('display="block"')
    assert equations == len(re.split(r";\s+|,\s{2,}", entry(name).formula.partition(": ")[0]))
    assert "arithmatex" not in page
    assert not re.search(
        r"<mo>(\w{2,}|&#x02016;)</mo>", page
    )  # operators: spaced on both sides, bars drawn out
    assert all(f"<code>{option.name}</code>" in page for option in options_of(name)[1])
    assert page.count("takes") >= 91  # 13 reads of 13 sources, the lower triangle
    assert FORMULAS[name].__name__ in page


def test_a_residual_s_page_has_the_verdicts_of_the_study(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))
    residual_pages = importlib.import_module("residual_pages")
    tables = (ROOT / "docs" / "results" / "study-tables.md").read_text(encoding="utf-8")
    rows = residual_pages.study_rows("scaling", "attnres-block")
    assert [row[0] for row in rows] == ["2 million", "7 million", "16 million", "43 million"]
    for _, variant, seeds, bits, difference, interval, verdict in rows:
        begins = re.escape(f"| {variant} | {seeds} | {bits} |")
        ends = re.escape(f"| {difference} | {interval} | {verdict} |")
        assert re.search(rf"{begins} \S+ {ends}", tables)
    assert len(residual_pages.study_rows("ablations", "ddl")) == 4
    assert residual_pages.study("hyper-attnres").count("2 million") == 1
    assert residual_pages.PURPOSE.keys() == set(names())


@pytest.mark.parametrize(
    "file",
    [*ROOT.glob("docs/assets/*.svg"), *ROOT.glob("studies/*/figure*.svg")],
    ids=lambda f: f.name,
)
def test_pictures_have_no_ground_of_their_own_and_colours_for_the_dark(file):
    text = file.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r'fill="(white|#fff|#ffffff)"', text)


@pytest.mark.slow
def test_every_public_name_and_every_command_is_in_the_reference(pages):
    shown = (
        "".join(pages[f"reference/python/{room}.html"] for room in ROOMS[:-1])
        + pages["reference/operators.html"]
    )
    own = {entry(name).build for name in names()}
    public = re.findall(
        r'^    "(\w+)",$', (ROOT / "headwater" / "hf" / "__init__.py").read_text(), re.M
    )
    # Read, not imported: transformers takes its time
    exported = {name for name in public if not name.isupper()}
    for module in (importlib.import_module(f"headwater.{room}") for room in ROOMS if room != "hf"):
        things = {name: getattr(module, name) for name in module.__all__}
        exported |= {name for name, thing in things.items() if inspect.isfunction(thing)}
        exported |= {
            name for name, thing in things.items() if inspect.isclass(thing) and thing not in own
        }
    assert {"convert", "build", "train", "sinkhorn", "Decoder"} <= exported
    assert not [
        name for name in exported if not re.search(rf'id="headwater\.[\w.]*\b{name}"', shown)
    ]
    commands = pages["reference/commands.html"]
    assert all(f'id="{command}"' in commands for command in cli.COMMANDS)
    assert all(
        f"<code>{flag}</code>" in commands
        for flag in ("--residual", "--query-lr", "--pipeline", "--prompt")
    )
    # Compare and plan say whose flags they take
    assert commands.count("<code>--query-lr</code>") == 1
    assert len(re.findall('<strong>Optim</strong> as of <a href="#train">', commands)) == 2


BROKEN = {
    "a link to no page": {"index.md": "[x](nowhere.md)", "nav": ["index.md"]},
    "a link to no section": {"index.md": "[x](#nowhere)", "nav": ["index.md"]},
    "a page outside of the navigation": {"index.md": "x", "other.md": "y", "nav": ["index.md"]},
    "nothing": {"index.md": "[x](other.md#y)", "other.md": "# y", "nav": ["index.md", "other.md"]},
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_stops_the_build(fault, tmp_path):
    """With our settings, on a site of a page or two."""
    (tmp_path / "docs").mkdir()
    for name, text in BROKEN[fault].items():
        if name != "nav":
            (tmp_path / "docs" / name).write_text(text)
    changed = {
        "docs_dir": str(tmp_path / "docs"),
        "site_dir": str(tmp_path / "site"),
        "nav": BROKEN[fault]["nav"],
    }
    config = load_config(
        str(ROOT / "mkdocs.yml"), strict=True, hooks=[], plugins=[], extra_css=[], **changed
    )
    if fault == "nothing":
        build(config)
        return
    with pytest.raises(Abort):
        build(config)


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(
    "settings", [{}, PHONE | {"color_scheme": "dark"}], ids=["desk", "phone in the dark"]
)
def test_it_reads_from_disk(settings, site, visit):
    page = visit(site / "index.html", within=site, **settings)
    for name in (
        "start/tutorial.html",
        "reference/residuals/attnres-block.html",
        "reference/commands.html",
        "results/study.html",
    ):
        page.goto((site / name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), name
    assert page.evaluate("document.fonts.size") == 1


@pytest.mark.slow
@pytest.mark.browser
def test_pictures_keep_their_size_on_a_phone(site, visit):
    """They have two panels of 380 pixels, with words for that size; the page itself is no wider than the phone."""
    page = visit(site / "results" / "study-tables.html", within=site, **PHONE)
    pictures = page.locator(".md-content img[src$='.svg']").all()
    assert len(pictures) > 3
    assert {round(picture.bounding_box()["width"]) for picture in pictures} == {640}
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("settings", [{}, PHONE], ids=["desk", "phone"])
def test_a_row_of_numbers_is_a_line(settings, site, visit):
    """An interval that breaks over three lines cannot be held against the one below it."""
    page = visit(site / "results" / "study-tables.html", within=site, **settings)
    rows = "[...document.querySelectorAll('table:has(th:nth-child(5)) tbody tr')].map(row => row.offsetHeight)"
    heights = page.evaluate(rows)
    assert len(heights) > 50
    assert max(heights) < 40


@pytest.mark.slow
@pytest.mark.browser
def test_what_a_flag_means_is_seen_on_a_phone(site, visit):
    for name in ("reference/commands.html", "reference/residuals/attnres-block.html"):
        page = visit(site / name, within=site, **PHONE)
        cells = "[...document.querySelectorAll('.flags td:last-child')].map(cell => cell.getBoundingClientRect())"
        places = page.evaluate(f"{cells}.map(place => [place.left, place.right])")
        assert len(places) > 10
        assert all(left >= 0 and right <= 390 for left, right in places)


@pytest.mark.slow
@pytest.mark.browser
def test_search_from_disk_finds_the_page_of_a_question_first(site, visit):
    page = visit(site / "index.html", within=site)
    field = page.locator(".md-search__input")
    for words, first in SEARCHES.items():
        field.fill("")
        field.press_sequentially(words)  # it listens to keys
        page.wait_for_selector(f".md-search-result__item:first-child a[href*='{first}']")


SEARCHES = {
    "out of memory": "guides/troubleshooting",
    "NaN": "guides/troubleshooting",
    "LoRA": "guides/huggingface",
    "block size": "start/choose",
    "multi-GPU": "guides/distributed",
    "resume": "guides/checkpoints",
    "custom data": "guides/training",
    "learning rate of queries": "guides/own-model",
}
