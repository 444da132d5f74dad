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


def test_it_names_what_is_here(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"torch +{re.escape(metadata.version('torch'))}\n", shown)
    assert re.search(r"wandb +not installed; it is for --wandb", shown)
    if not torch.cuda.is_available():
        assert re.search(r"reads +by the reference operators", shown)


def test_what_stands_in_the_way_fails(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "PACKAGES", (("torch", "99.0", "99.0", "everything"),))
    assert main(["doctor"]) == 1
    told = capsys.readouterr()
    assert re.search(r"! torch +\S+; 99.0 or later is needed, for everything", told.out)
    assert "1 of these must be mended" in told.err


def test_releases_newer_than_tested_are_said(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", (("torch", "1.0", "1.9", "everything"),))
    (found,) = (finding for finding in doctor.examine() if finding[0] == "torch")
    assert "newer than the 1.9 that headwater was tested with" in found[1]
    assert not found[2]


@pytest.mark.parametrize(("name", "least", "newest"), [row[:3] for row in doctor.PACKAGES])
def test_the_releases_are_those_of_the_project(name, least, newest):
    """The least is in pyproject.toml, the newest in constraints.txt, which is what the tests run with, or newer where
    docs/reference/versions.md says what has been run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *(word for words in project["optional-dependencies"].values() for word in words),
    ]
    plain = name.replace("_", "[-_]")
    bounds = [
        match[1]
        for word in asked
        if (match := re.match(rf"{plain}(?:\[\w+\])?[>=]=([\d.]+)", word))
    ]
    assert any(bound == least or bound.startswith(f"{least}.") for bound in bounds)
    pins = re.findall(rf"^{plain}==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if name in ON_THE_PAGE:
        assert [
            pin for pin in pins if release(least) <= release(pin)[:2] <= release(newest)
        ] == pins
    else:
        assert [pin for pin in pins if pin.startswith(newest)] == (pins if newest else [])


def release(version):
    return tuple(map(int, version.split(".")))


@pytest.mark.parametrize("name", ON_THE_PAGE)
def test_newer_releases_than_the_tested_are_not_allowed_and_the_page_says_so(name):
    """docs/reference/versions.md; those beside the pinned releases are of `make test-torch` and `make test-hf`."""
    (least, newest) = next(row[1:3] for row in doctor.PACKAGES if row[0] == name)
    major, minor = map(int, newest.split("."))
    assert re.search(
        rf'"{name}>={least},<{major}\.{minor + 1}"', (ROOT / "pyproject.toml").read_text()
    )
    page, makefile = (
        (ROOT / "docs/reference/versions.md").read_text(),
        (ROOT / "Makefile").read_text(),
    )
    allowed = least if least == newest else f"{least} to {newest}"
    assert re.search(rf"^\| {name} \| {allowed} \|", page, re.MULTILINE | re.IGNORECASE)
    beside = re.findall(rf"^{name.upper()} \?= (.*)", makefile, re.MULTILINE)
    for tried in " ".join(beside).split():
        assert re.search(rf"[ |]{tried.rpartition('.')[0]}\b", page)
    pinned = re.findall(rf"^{name}==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert any(tried.startswith(f"{least}.") for tried in [*" ".join(beside).split(), *pinned])


def test_what_a_gpu_would_be_told():
    state, problem = doctor._reads(torch.empty(4, 8, dtype=torch.float64))
    assert problem
    assert re.fullmatch(
        r"by the reference operators: (tensors are on cpu|dtype torch.float64 is none of).*", state
    )
