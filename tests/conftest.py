import gc
import importlib.util
import json
import os
import shutil
from pathlib import Path

import interpreter
import pytest
from longest import LONGEST

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)


def pytest_addoption(parser):
    parser.addoption(
        "--kills", type=int, help="runs that test_crash.py kills in each way; `make test-crash`"
    )
    parser.addoption(
        "--processes",
        type=int,
        default=0,
        help="forks of this process in which tests run; `make test`",
    )
    parser.addoption(
        "--share", help="2/8: the third of eight shares of the chosen tests; `make test-gpu`"
    )


def pytest_configure(config):
    gc.disable()  # nothing that is imported until tests run is garbage: looking for some takes two seconds of thirteen
    if config.getoption("--processes"):
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
            "1"  # CUDA bears no fork once it has been asked for devices
        )
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = (
        "1"  # else inductor tries in a new process whether vectors can be compiled
    )
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = (
            "1"  # before anything imports triton: kernels then run on the CPU
        )
        from processes import fork_the_server, keep_no_stacks

        keep_no_stacks()
        if config.getoption("--processes"):
            os.environ["HF_HUB_OFFLINE"] = "1"  # which is read at import, like the above
            fork_the_server()  # which has imported nothing of the tests yet
        if importlib.util.find_spec("triton"):
            interpreter.speed_up()
            interpreter.keep_masks_boolean()
            interpreter.round_to_nearest()


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    # One process runs files in the order in which they are named: a mutation run has the quickest first.
    if config.getoption("--processes") or config.getoption("--share"):
        ranks = {str(config.rootpath / "tests" / name): rank for rank, name in enumerate(LONGEST)}
        items.sort(key=lambda item: ranks.get(str(item.path), len(ranks)))
    if config.getoption("--share"):
        mine, shares = map(int, config.getoption("--share").split("/"))
        config.hook.pytest_deselected(
            items=[item for i, item in enumerate(items) if i % shares != mine]
        )
        items[:] = items[mine::shares]


def pytest_collection_finish():
    from processes import spare_collector

    spare_collector()


def pytest_runtest_teardown(item):
    """Several processes share a GPU's memory, and torch keeps what a test has freed."""
    if item.get_closest_marker("gpu"):
        import torch

        if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**32:
            torch.cuda.empty_cache()


def pytest_runtestloop(session):
    processes = session.config.getoption("--processes")
    if processes and not session.testsfailed and not session.config.option.collectonly:
        import together

        together.run(session, processes)
        return True
    return None


@pytest.fixture(scope="session")
def script():
    """Loads a script of the repository, by its path there, as a module."""

    def load(path):
        file = Path(__file__).parent.parent / path
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            # Where Python looks first when it runs a script
            patch.syspath_prepend(str(file.parent))
            spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A tiny run that has ended, beside its corpus: Muon for the matrices, two checkpoints."""
    from tinyrun import tiny

    from headwater.train.loop import train

    folder = tmp_path_factory.mktemp("finished")
    train(tiny(folder, optimizer="muon", keep=2), folder / "run")
    return folder / "run"


@pytest.fixture
def run_folder(finished, tmp_path) -> Path:
    """A copy of that run; its settings name the corpus of the first."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="session")
def untuned_fla():
    """fla's kernels with the first of their settings each: trying all takes a process minutes, and is about speed."""
    pytest.importorskip("fla.ops.kda", reason="needs flash-linear-attention, an extra of `dev`")
    import torch

    if not torch.cuda.is_available():
        return
    from triton.runtime.autotuner import Autotuner

    gc.unfreeze()  # what is kept for good is not listed
    kernels = [thing for thing in gc.get_objects() if issubclass(type(thing), Autotuner)]
    kernels = [kernel for kernel in kernels if kernel.base_fn.__module__.startswith("fla.")]
    assert len(kernels) > 10
    for kernel in kernels:
        kernel.configs = kernel.configs[:1]


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


VIEWPORT = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def windows(browser):
    """Windows by their settings, and the blank pages of each. A new page takes as long as reading most reports does."""
    opened = {}
    yield opened
    for context, _ in opened.values():
        context.close()


@pytest.fixture
def visit(browser, windows):
    """Opens a page and, at the end, insists that it raised nothing, logged nothing and asked for nothing but itself."""
    sync_api = pytest.importorskip("playwright.sync_api")
    taken, apart, troubles, allowed = [], [], [], set()

    def watch(request):  # blob: is what the page made itself, for a download
        if not request.url.startswith((*allowed, "data:", "blob:")):
            troubles.append(f"request {request.url}")

    heard = {
        "request": watch,
        "pageerror": lambda error: troubles.append(f"error {error}"),
        "console": lambda message: troubles.append(f"console {message.text}"),
        "dialog": lambda dialog: (troubles.append(f"dialog {dialog.message}"), dialog.dismiss()),
    }

    def page_for(settings):
        key = json.dumps(settings)
        if key not in windows:
            windows[key] = browser.new_context(**settings), []
        context, blank = windows[key]
        page = blank.pop() if blank else context.new_page()
        taken.append((page, blank))
        return page

    def open_page(file: Path | str, within: Path | None = None, **settings):
        """`file` is one, or the address of a server, which alone the page may ask; or what lies `within` a folder, for
        which a window is opened."""
        address = file if isinstance(file, str) else file.as_uri()
        settings = {"viewport": VIEWPORT} | settings
        allowed.add(address.partition("#")[0] if within is None else f"{within.as_uri()}/")
        # On a crowded machine a window of Chromium sometimes never loads: then a new one is opened.
        for is_last in (False, True):
            if within or is_last:
                apart.append(browser.new_context(**settings))
                page = apart[-1].new_page()
            else:
                page = page_for(settings)
            for event, listener in heard.items():
                page.on(event, listener)
            try:
                page.goto(address, timeout=120_000 if is_last else 30_000)
                break
            except sync_api.TimeoutError:
                if is_last:
                    raise
                (apart if within else taken).pop()
        return page

    yield open_page
    for context in apart:
        context.close()
    for page, blank in taken:
        kept = page.evaluate(
            "[localStorage.length, sessionStorage.length, document.cookie, window.name]"
        )
        assert kept == [0, 0, "", ""]  # else a page finds what another one left
        for event, listener in heard.items():
            page.remove_listener(event, listener)
        page.mouse.move(0, 0)
        page.goto("about:blank")
        blank.append(page)
    assert troubles == []
