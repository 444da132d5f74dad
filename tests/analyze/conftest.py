"""A comparison on disk, its report, and a browser that insists on silence and on no network."""

import shutil
from pathlib import Path

import pytest
from runfolder import make_comparison

from headwater.analyze.report import write_report

RESIDUALS = ["standard", "attnres-block:block=4", "attnres-full"]
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> Path:
    return make_comparison(tmp_path_factory.mktemp("report") / "compare", RESIDUALS, [0, 1, 2], layers=6, steps=200)


@pytest.fixture(scope="module")
def written(comparison) -> Path:
    return write_report([comparison])


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; install Debian's chromium to run it")
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

    def watch(request):  # blob: is what the page made itself, for a download
        if not request.url.startswith((*allowed, "data:", "blob:")):
            troubles.append(f"request {request.url}")

    def open_page(file: Path | str, **settings):
        """`file` is one, or the address of a server, which alone the page may ask."""
        address = file if isinstance(file, str) else file.as_uri()
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | settings))
        contexts.append(context)
        page = context.new_page()
        allowed.add(address.partition("#")[0])
        page.on("request", watch)
        page.on("pageerror", lambda error: troubles.append(f"error {error}"))
        page.on("console", lambda message: troubles.append(f"console {message.text}"))
        page.on("dialog", lambda dialog: (troubles.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []
