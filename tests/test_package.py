"""What is installed from a wheel is the whole package, and works without anything else of this repository."""

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
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: nothing is left behind here."""
    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "wheel"))
    shutil.copytree(ROOT / "headwater", source / "headwater", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, source]
    subprocess.run(command, check=True, capture_output=True)
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_package(wheel):
    assert wheel.name.startswith(f"headwater-{headwater.__version__}-py3-none-any")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("headwater/")}
    files = (path for path in (ROOT / "headwater").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert inside == {path.relative_to(ROOT).as_posix() for path in files}


@pytest.mark.slow
def test_a_wheel_works_where_nothing_of_the_repository_is(wheel, tmp_path):
    """The packages it depends on are lent; headwater itself comes from the wheel alone."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (tmp_path / "text.txt").write_text("a river runs from its headwater to the sea. " * 400)
    run = ["train", "--size", "nano", "--source", "text.txt", "--cache", "cache", "--context", "32", "--out", "run"]
    run += ["--steps", "2", "--batch-size", "2", "--eval-windows", "2"]
    program = (
        "import sys; sys.path.insert(0, 'site'); import headwater; from headwater.cli import main\n"
        "assert headwater.__file__.endswith('site/headwater/__init__.py'), headwater.__file__\n"
        f"assert not main({run}); assert not main(['report', 'run']); assert not main(['doctor'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").stat().st_size > 50_000


def test_one_version_everywhere():
    assert f"\nversion: {headwater.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(headwater.__version__)}", (ROOT / "CHANGELOG.md").read_text(), re.M)
