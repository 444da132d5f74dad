"""The README's code blocks run, in order: as they stand, but for a smaller batch in what trains."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from residuals import test_contract as contract

from headwater.residuals import build, names, registry

ROOT = Path(__file__).parent.parent


def blocks_of(page: str) -> list[tuple[str, str]]:
    return re.findall(r"```(\w+)\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


BLOCKS = blocks_of("README.md")


def run_python(page: str, folder: Path) -> str:
    """What the Python blocks of a page print, run in order as one program."""
    script = folder / "blocks.py"
    script.write_text("\n".join(body for language, body in blocks_of(page) if language == "python"))
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_python_blocks_run(tmp_path):
    assert run_python("README.md", tmp_path).count("torch.Size") == 2


@pytest.mark.slow
def test_the_blocks_of_the_page_about_python_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    shown = run_python("docs/python.md", tmp_path)
    assert "[('matrices', 0.003, 0.1), ('rest', 0.003, 0.0), ('queries', 0.00030000000000000003, 0.0)]" in shown
    assert "standard" in shown
    assert "attnres-block" in shown


def test_the_blocks_of_the_page_about_kimi_linear_run(tmp_path):
    shown = run_python("docs/kimi-linear.md", tmp_path)
    assert "('kda', 'mlp', 'kda', 'moe', 'kda', 'moe', 'mla', 'moe')" in shown
    assert "torch.Size([1, 12])" in shown


@pytest.mark.slow
def test_shell_blocks_run(tmp_path):
    lines = [line for language, body in BLOCKS if language == "bash" for line in body.strip().splitlines()]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for line in lines:
        words = shlex.split(line)
        if words[0] == "make":  # this test runs inside one of them
            subprocess.run(["make", "--dry-run", *words[1:]], check=True, cwd=ROOT, capture_output=True)
            continue
        if words[1] in ("train", "compare") and "--config" not in words:  # which has it from the run before
            words += ["--batch-size", "1"]
        result = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
    assert (tmp_path / "runs/family/report.html").exists()


def test_the_table_of_residuals_is_the_one_the_code_prints():
    """After a change: headwater residuals --markdown, between the two marks."""
    from headwater.analyze.table import markdown, residual_table

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    printed = readme.split("<!-- residuals:begin -->\n")[1].split("<!-- residuals:end -->")[0]
    assert printed == markdown(residual_table())


def test_every_link_inside_the_repository_leads_somewhere():
    prose = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)", prose)
    inside = [link for link in links if not link.startswith("http")]
    assert "docs/report.png" in inside
    assert not [link for link in inside if not (ROOT / link).exists()]


def test_every_language_is_known():
    assert {language for language, _ in BLOCKS} == {"python", "bash"}


def test_the_residual_that_contributing_shows_keeps_the_contract(tmp_path, monkeypatch):
    """The block as it stands, in a module of its own, through the tests that every residual passes."""
    (block,) = (body for language, body in blocks_of("CONTRIBUTING.md") if language == "python")
    assert sum(map(bool, block.splitlines())) < 40
    (tmp_path / "shown_residual.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))  # other tests do not know it
    before = set(names())
    importlib.import_module("shown_residual")
    (name,) = set(names()) - before
    for spec in (name, f"{name}:start=0.5"):
        contract.test_gradients_reach_every_parameter(spec)
        contract.test_activation_checkpointing_changes_nothing(spec, False)
        contract.test_saved_and_loaded_is_the_same_model(spec, tmp_path / spec.replace(":", "-"))
        contract.test_decoding_with_a_cache_equals_decoding_without(spec)
        contract.test_it_starts_as_it_says(spec)
        contract.test_the_mixing_matrix_gives_back_the_reads(spec)
        contract.test_state_is_a_value(spec)
        contract.test_bf16_reads_are_a_few_roundings_from_fp32(spec)
    residual = build(f"{name}:start=0.5", dim=16, sublayers=4)
    state = residual.begin(torch.randn(2, 3, 16))
    assert residual.weights(state, 0)[:, 0, 0, 0].tolist() == [1.0, 0.5]
