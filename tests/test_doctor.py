"""`headwater doctor`: what it says holds, and what stands in the way fails."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch

from headwater import doctor
from headwater.cli import main

ROOT = Path(__file__).parent.parent
ON_THE_PAGE = ("torch", "triton", "transformers")  # docs/reference/versions.md
BOUNDS = {name: (least, newest) for name, least, newest, _ in doctor.PACKAGES}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def pins(name: str) -> list[str]:
    """The releases of a package in constraints.txt, which is what the tests run with."""
    return re.findall(rf"^{name}==([\d.]+)", read("constraints.txt"), re.MULTILINE)


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))[:2]


def test_it_names_what_is_here_and_fails_at_what_stands_in_the_way(capsys, monkeypatch):
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert re.search(rf"torch +{re.escape(metadata.version('torch'))}\n", output)
    assert re.search(r"wandb +not installed; it is for --wandb", output)
    if not torch.cuda.is_available():
        assert re.search(r"reads +by the reference operators", output)
    monkeypatch.setattr(doctor, "PACKAGES", (("torch", "99.0", "99.0", "everything"),))
    assert main(["doctor"]) == 1
    output = capsys.readouterr()
    assert re.search(r"! torch +\S+; 99.0 or later is needed, for everything", output.out)
    assert "1 problem. Fix the lines above" in output.err
    monkeypatch.setattr(doctor, "PACKAGES", (("torch", "1.0", "1.9", "everything"),))
    (torch_line,) = (finding for finding in doctor.examine() if finding[0] == "torch")
    assert "newer than the 1.9 that headwater was tested with" in torch_line[1]
    assert not torch_line[2]


@pytest.mark.parametrize("name", BOUNDS)
def test_the_releases_are_those_of_the_project(name):
    """The least is in pyproject.toml, the newest in constraints.txt, or newer where the page on
    versions says what has been run."""
    least, newest = BOUNDS[name]
    project = tomllib.loads(read("pyproject.toml"))["project"]
    requirements = " ".join(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        requirements += f" {' '.join(extra)}"
    plain = name.replace("_", "[-_]")
    bounds = re.findall(rf"(?<!\S){plain}(?:\[\w+\])?[>=]=([\d.]+)", requirements)
    assert any(f"{bound}.".startswith(f"{least}.") for bound in bounds)
    for pin in pins(plain):
        if name in ON_THE_PAGE:
            assert release(least) <= release(pin) <= release(newest)
        else:
            assert newest
            assert pin.startswith(newest)


@pytest.mark.parametrize("name", ON_THE_PAGE)
def test_newer_releases_than_the_tested_are_not_allowed_and_the_page_says_so(name):
    """docs/reference/versions.md; those beside the pinned releases are of `make test-torch` and `make test-hf`."""
    least, newest = BOUNDS[name]
    major, minor = release(newest)
    assert re.search(rf'"{name}>={least},<{major}\.{minor + 1}"', read("pyproject.toml"))
    page = read("docs/reference/versions.md")
    allowed = least if least == newest else f"{least} to {newest}"
    assert re.search(rf"^\| {name} \| {allowed} \|", page, re.MULTILINE | re.IGNORECASE)
    beside = re.findall(rf"^{name.upper()} \?= (.*)", read("Makefile"), re.MULTILINE)
    tried = " ".join(beside).split()
    for version in tried:
        assert re.search(rf"[ |]{version.rpartition('.')[0]}\b", page)
    assert any(version.startswith(f"{least}.") for version in [*tried, *pins(name)])


def test_engines_that_are_installed_are_listed_with_the_tested_release(monkeypatch):
    installed = {"torchtitan": "0.3.0", "vllm": "0.40.1"}

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    assert [finding[:2] for finding in doctor._engines()] == [
        ("torchtitan", "0.3.0; the release that headwater was tested with"),
        ("vllm", "0.40.1; 0.32.0 is the release that headwater was tested with"),
    ]
    pins = read("tests/engines/requirements.txt") + read("tests/engines/alone.txt")
    for name, tested in doctor.ENGINES:
        assert name == "vllm" or f"\n{name}=={tested}\n" in pins


def test_what_a_gpu_would_be_told():
    state, problem = doctor._reads(torch.empty(4, 8, dtype=torch.float64))
    assert problem
    reason = r"(tensors are on cpu|dtype torch.float64 is none of).*"
    assert re.fullmatch(rf"by the reference operators: {reason}", state)
