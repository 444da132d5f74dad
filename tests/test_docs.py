"""What the README and the site show is true: their code runs, their tables come from the results, the site builds.

Blocks run in this process, a page after another, each in a folder of its own. What trains gets a smaller batch, shorter
evaluations, half of the smallest model and a part of the standard library, and the runs of a comparison are no
processes: other tests see to those.
"""

import contextlib
import doctest
import glob
import importlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from residuals import test_contract as contract

from benchmarks import tables
from headwater import cli
from headwater.analyze import check_residual
from headwater.models.config import SIZES
from headwater.residuals import build, names, registry
from headwater.train import jobs, studies
from headwater.train.data import corpus

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
WRITTEN = [README, *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = {
    page.relative_to(ROOT).as_posix(): FENCE.findall(page.read_text(encoding="utf-8"))
    for page in WRITTEN
}
SMALL = ["--batch-size", "1", "--eval-windows", "2"]
RUN = {"python", "bash"}  # py is code of the repository, which has tests of its own
ELSEWHERE = {"examples/own_transformer.py": "tests/test_examples.py"}


def lines_of(block: str) -> list[str]:
    return block.replace("\\\n", " ").strip().splitlines()


@pytest.fixture(scope="module", autouse=True)
def short_library():
    """`stdlib` as a few of its files, and `nano` as half a model."""
    whole = corpus._stdlib_files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_stdlib_files", lambda: whole()[:60])
        patch.setitem(
            SIZES, "nano", SIZES["nano"] | {"dim": 32, "layers": 2, "mlp_dim": 48, "context": 64}
        )
        yield


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """What pages take for granted: a trained run, a second one, and a Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    place = tmp_path_factory.mktemp("docs")
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(
        LlamaConfig(**shape, vocab_size=256, max_position_embeddings=64)
    ).save_pretrained(place / "llama")
    with contextlib.chdir(place), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWATER_CACHE", str(place / "cache"))
        for line in re.findall(
            r"^headwater train .*", (DOCS / "guides" / "training.md").read_text(), re.M
        )[:2]:
            assert cli.main([*shlex.split(line)[1:], *SMALL, "--steps", "5"]) == 0
    return place


@pytest.fixture
def place(prepared, tmp_path, monkeypatch):
    """An empty folder, with commands as functions of this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWATER_CACHE", str(prepared / "cache"))
    # What a page registers ends with it
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(jobs, "launch", in_this_process)
    # Runs in this process need more memory than a page's, and a wider number must not fold a name.
    monkeypatch.setenv("COLUMNS", "100")
    # Runs are made smaller than a page says, so they are not what their folders are named after.
    monkeypatch.setattr(studies, "refuse_changed", lambda jobs: None)
    return tmp_path


def in_this_process(job, company):
    """Stands in for headwater.train.jobs.launch."""
    job.folder.mkdir(parents=True, exist_ok=True)
    jobs.record_launch(job, company)
    with job.log.open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        code = cli.main(["train", "--config", str(job.settings), "--out", str(job.folder), *SMALL])
    return SimpleNamespace(poll=lambda: code, returncode=code, pid=0)


def bring(page: str, prepared: Path) -> None:
    """The prepared folders that a page names, and does not make by itself."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in ("llama", "runs/first", "runs/longer"):
        if name in text and not re.search(rf'--out {name}\n|save_pretrained\("{name}"\)', text):
            shutil.copytree(prepared / name, name)


def run_line(line: str) -> None:
    """One line of a shell block: run here where that can be, else held to what it must agree with."""
    words = [word for word in shlex.split(line) if not re.match(r"[A-Z_]+=", word)]
    words = [name for word in words for name in (glob.glob(word) or [word])]  # as a shell does
    if words[0] == "make":  # this test runs inside one of them
        subprocess.run(["make", "--dry-run", *words[1:]], check=True, cwd=ROOT, capture_output=True)
    elif words[:2] == ["pip", "install"]:
        extras = re.findall(r"[\w-]+", words[-1].partition("[")[2])
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        assert words[2:4] in (["-e", "."], ["-e", words[-1]]), line
        assert set(extras) <= set(known), line
    elif words[0] == "python":
        assert words[1] in ELSEWHERE, line
        assert (ROOT / words[1]).exists(), line
    elif words[0] == "torchrun" and "generate" in words:  # test_parallel_generate.py has two ranks
        ranks = words.index("--tensor")
        assert words[ranks + 1] == words[words.index("--nproc-per-node") + 1], line
        assert cli.main([*words[words.index("generate") : ranks], *words[ranks + 2 :]]) == 0, line
    elif words[0] == "torchrun":
        layout(words)
    else:
        assert words[0] == "headwater", line
        small = SMALL if words[1] == "train" and "--resume" not in words else []
        assert cli.main([*words[1:], *small]) == 0, line


def layout(words: list[str]) -> None:
    """The flags of a run on machines that are not here: they must be flags, and there must be a plan."""
    number = {
        key: int(words[words.index(key) + 1]) if key in words else 1
        for key in ("--nnodes", "--nproc-per-node")
    }
    flags = words[words.index("train") + 1 :]
    for name in ("--out", "--device"):
        if name in flags:
            del flags[flags.index(name) : flags.index(name) + 2]
    assert (
        cli.main(["plan", *flags, "--world", str(number["--nnodes"] * number["--nproc-per-node"])])
        == 0
    )


def run_page(page: str, prepared: Path) -> None:
    bring(page, prepared)
    run_blocks(BLOCKS[page], page)


def run_blocks(blocks: list[tuple[str, str]], page: str) -> None:
    """Run the blocks of a page; one of `text` is what the block before it prints, with ... for what varies."""
    space: dict[str, object] = {"__name__": "a_page"}
    printed = io.StringIO()
    for language, block in blocks:
        if language == "text":
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert doctest.OutputChecker().check_output(block, printed.getvalue(), flags), (
                f"{page} shows\n{block}\nbut prints\n{printed.getvalue()}"
            )
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            run_block(language, block, page, space)


def run_block(language: str, block: str, page: str, space: dict[str, object]) -> None:
    named = re.match(r"# (\S+\.(?:py|toml))\n", block)
    if named:
        Path(named[1]).write_text(block)
        importlib.invalidate_caches()
    elif language == "python":
        exec(compile(block, page, "exec"), space)  # the page is ours
    elif language == "bash":
        for line in lines_of(block):
            run_line(line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page, blocks in BLOCKS.items() if RUN & {language for language, _ in blocks}]
)
def test_the_code_of_a_page_runs(page, place, prepared, capsys):
    before = set(sys.modules)
    run_page(page, prepared)
    for name in {"my_residuals"} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.mark.slow
def test_the_code_of_the_residuals_pages_runs(place, monkeypatch, capsys):
    """Those pages are made when the site is built."""
    monkeypatch.syspath_prepend(DOCS / "generate")
    made = importlib.import_module("residual_pages")
    for name in names():
        blocks = FENCE.findall(made.usage(name))
        assert [language for language, _ in blocks] == ["python", "bash"]
        run_blocks(blocks, name)


def test_pages_that_take_a_run_further_can_be_followed_one_after_another():
    """In the order of the site: no page goes back behind what the one before has done."""
    pages = re.findall(r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    text = "".join(
        (DOCS / page).read_text(encoding="utf-8") for page in pages if (DOCS / page).exists()
    )
    steps = [
        int(n)
        for n in re.findall(r"^headwater train .*--out runs/first .*?--steps (\d+)", text, re.M)
    ]
    assert len(steps) == 3
    assert steps == sorted(set(steps))


def test_a_block_that_fails_is_noticed(place, prepared, monkeypatch):
    monkeypatch.setitem(BLOCKS, "README.md", [("bash", "headwater train --residul x\n")])
    with pytest.raises((AssertionError, SystemExit)):
        run_page("README.md", prepared)
    for line in ("pip install -e '.[nothing]'", "rm -r x", "python examples/none.py"):
        with pytest.raises(AssertionError):
            run_line(line)


def test_every_language_is_known_and_what_is_not_code_parses():
    for blocks in BLOCKS.values():
        for language, block in blocks:
            assert language in {"python", "py", "bash", "toml", "yaml", "text"}
            if language in ("toml", "yaml"):
                assert {"toml": tomllib.loads, "yaml": yaml.safe_load}[language](block)


def test_tables_are_those_of_the_results():
    """Else: python -m benchmarks.tables"""
    found = [
        name for page in WRITTEN for name in re.findall(r"<!-- (\w+):begin -->", page.read_text())
    ]
    assert set(tables.TABLES) <= set(found)
    assert len(found) == len(set(found))  # else one table is written where another one stands
    for page in WRITTEN:
        assert tables.filled(page.read_text(encoding="utf-8")) == page.read_text(
            encoding="utf-8"
        ), page


def test_troubleshooting_is_headed_by_messages_that_exist():
    headings = re.findall(r"^## (`.*)", (DOCS / "guides/troubleshooting.md").read_text(), re.M)
    messages = [text for heading in headings for text in re.findall("`(.*?)`", heading)]
    ours = [text for text in messages if "CUDA" not in text and "Transformers" not in text]
    code = "".join(file.read_text() for file in (ROOT / "headwater").rglob("*.py"))
    assert len(ours) == 5
    assert all(text.removeprefix("GPU").strip() in code for text in ours)


def test_every_residual_has_its_costs_and_what_has_none_on_a_gpu_is_named():
    costs = tables.step_costs()
    page = (DOCS / "start" / "choose.md").read_text()
    (unmeasured,) = re.findall(r"Not measured yet: (.*?)\.", page)
    assert sorted((*costs, *re.findall("`(.*?)`", unmeasured))) == sorted(names())
    said = re.findall(r"`([\w-]+)` has not been measured on a GPU", page)
    assert sorted(said) == sorted(
        name for name, found in costs.items() if found["time of a step, one H200"] is None
    )


def test_the_residuals_that_tell_attention_from_mlp_are_named():
    said = re.search(
        r"tell attention from MLP \((.*?)\)", (DOCS / "guides/own-model.md").read_text(), re.DOTALL
    )
    assert set(re.findall("`(.*?)`", said[1])) == {
        name for name in names() if registry.entry(name).takes_kinds
    }


def test_there_is_one_current_set_of_results():
    """benchmarks/results/README.md says how it is kept."""
    listed = set(
        re.findall(r"`([\w-]+\.(?:json|txt))`", (tables.RESULTS / "README.md").read_text())
    )
    current = list(tables.RESULTS.glob("????-??-??/*"))
    assert sorted(file.name for file in current) == sorted(listed)
    shown = "".join(page.read_text(encoding="utf-8") for page in WRITTEN)
    assert not [file for file in current if f"{file.parent.name}/{file.name}" not in shown]
    for file, drawn in tables.figures().items():
        assert file.read_text(encoding="utf-8") == drawn


def cells_of(page: Path, row: str) -> list[str]:
    """The cells after the first of a table's row, which begins with `row`."""
    lines = page.read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"| {row}")]
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


def test_the_numbers_of_the_readme_are_those_of_the_results():
    overhead = re.search(r"\| 4096 \|.*\| (\S+ %) \|", tables.decoder())[1]
    assert f"takes {overhead} longer at width 4096" in cells_of(README, "pre-train")[0]
    assert len(names()) == 23
    assert cells_of(README, "compare architectures")[0].startswith("Twenty-three residuals")
    exact = json.loads(tables.path("cpu-architectures").read_text())["exact"]
    assert cells_of(README, "use Hugging Face")[0].startswith(f"{exact} types convert")
    times = dict(re.findall(r"\| (\S.+?) \| \S+ \| (\d\S+) \|", tables.stack()))
    others = [
        float(ms) for name, ms in times.items() if "headwater" not in name and "plain" not in name
    ]
    slower = min(others) / float(times["**headwater**"])
    assert f"other package takes {slower:.1f} times" in " ".join(README.read_text().split())


def test_the_results_in_the_readme_are_those_of_the_study():
    study = DOCS / "results" / "study.md"
    runs = (DOCS / "results" / "study-tables.md").read_text(encoding="utf-8")
    at_7_million = runs[runs.index("Width 192") :]
    for column, arm in enumerate(("attnres-block", "attnres-full")):
        row = rf"`{arm}` \| 3 \| \S+ \| \S+ \| (\S+) \| (\S+ to \S+) \|"
        difference, interval = re.search(row, at_7_million).groups()
        shown = [cells_of(README, line)[column] for line in ("bits per byte", "compute", "time")]
        assert shown[0] == f"{difference} ({interval})"
        _, compute, time, *_ = cells_of(study, f"`{arm}` | 6")
        assert shown[1:] == [
            cell.replace("**", "").replace(" ", " times ", 1) for cell in (compute, time)
        ]


@pytest.mark.parametrize("page", [*WRITTEN, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere_on_a_code_host_too(page):
    """Pages that are made when the site is built are not there: the site's hook maps links to code."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    links = [link for link in re.findall(r"\]\(([^)]+)", prose) if not link.startswith("http")]
    for link in links:
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if target.suffix != ".md" or not anchor:
            continue
        headings = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.M)
        anchors = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in headings}
        assert anchor in anchors, link


def test_the_example_changes_as_many_lines_as_pages_say():
    example = (ROOT / "examples" / "own_transformer.py").read_text()
    assert example.count("# was:") == 4
    for text in (example, (DOCS / "guides" / "own-model.md").read_text()):
        assert re.search(r"four lines of `?forward", text)


def test_both_commands_are_named_wherever_one_is():
    """make demo and make test: the README, the page on installing and the Makefile agree."""
    for page in ("README.md", "docs/start/install.md"):
        assert "```bash\nmake demo\nmake test\n```" in (ROOT / page).read_text()
    first = (ROOT / "Makefile").read_text().splitlines()[0]
    assert "`make demo` and `make test`" in first


def test_the_readme_is_short_and_its_pictures_small():
    assert len(README.read_text().splitlines()) <= 110
    shown = re.findall(r'src(?:set)?="([^"]+)"', README.read_text())
    assert [Path(file).stem for file in shown] == ["inspector-phone", "inspector-dark", "inspector"]
    assert max((ROOT / file).stat().st_size for file in shown) < 200_000


def test_the_example_of_a_residual_keeps_the_contract(monkeypatch):
    """The module as it stands, through the tests that every residual passes."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))  # other tests do not know it
    before = set(names())
    importlib.import_module("new_residual")
    (name,) = set(names()) - before
    for spec in (name, f"{name}:start=0.5"):
        assert not any(check_residual(spec).values())
        contract.test_activation_checkpointing_changes_nothing(spec)
        contract.test_bf16_reads_are_a_few_roundings_from_fp32(spec)
    residual = build(f"{name}:start=0.5", dim=16, sublayers=4)
    state = residual.begin(torch.randn(2, 3, 16))
    assert residual.weights(state, 0)[:, 0, 0, 0].tolist() == [1.0, 0.0]
    y, state = residual.read(state, 0)
    assert residual.weights(residual.write(state, 0, y), 1)[:, 0, 0, 0].tolist() == [1.0, 0.5]
