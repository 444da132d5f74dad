"""What is installed from a wheel is the whole package, and works without anything else of this repository."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import headwater

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy to build from: nothing is left behind here."""
    source = tmp_path_factory.mktemp("clone") / "headwater"
    shutil.copytree(
        ROOT / "headwater", source / "headwater", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        out,
        source,
    ]
    subprocess.run(command, check=True, capture_output=True)
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_package(wheel):
    assert wheel.name.startswith(f"headwater-{headwater.__version__}-py3-none-any")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("headwater/")}
    files = (
        path
        for path in (ROOT / "headwater").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    assert inside == {path.relative_to(ROOT).as_posix() for path in files}


@pytest.mark.slow
def test_a_wheel_works_where_nothing_of_the_repository_is(wheel, tmp_path):
    """The packages it depends on are lent; headwater itself comes from the wheel alone."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (tmp_path / "text.txt").write_text("a river runs from its headwater to the sea. " * 400)
    run = [
        "train",
        "--size",
        "nano",
        "--source",
        "text.txt",
        "--cache",
        "cache",
        "--context",
        "32",
        "--out",
        "run",
    ]
    run += ["--steps", "2", "--batch-size", "2", "--eval-windows", "2"]
    program = (
        "import sys; sys.path.insert(0, 'site'); import headwater; from headwater.cli import main\n"
        "assert headwater.__file__.endswith('site/headwater/__init__.py'), headwater.__file__\n"
        f"assert not main({run}); assert not main(['report', 'run']); assert not main(['doctor'])\n"
        "assert not main(['generate', 'demo', '--max-new-tokens', '2'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").stat().st_size > 50_000


@pytest.mark.slow
def test_an_editable_install_is_found_from_the_folder_that_holds_the_clone(source, tmp_path):
    """Where a folder of the clone's name lies, which Python would take for a package without an __init__.py."""
    build = (
        "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    )
    subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=source, check=True, capture_output=True
    )
    (found,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(found).extractall(tmp_path)
    program = f"import site; site.addsitedir({str(tmp_path)!r}); import headwater; print(headwater.__file__)"
    command = [sys.executable, "-S", "-c", program]  # without the packages of this environment
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=source.parent, env=environment, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == source / "headwater" / "__init__.py"


def test_one_version_everywhere():
    assert f"\nversion: {headwater.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(
        rf"^## {re.escape(headwater.__version__)}", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
