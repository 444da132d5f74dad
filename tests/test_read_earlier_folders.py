"""Folders that an earlier commit wrote are read as it read them; fixtures/before/README.md says how they were made."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from processes import python
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headwater.hf import load_delta
from headwater.train import load_run

BEFORE = Path(__file__).parent / "fixtures" / "before"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy, since what resumes also writes."""
    return Path(shutil.copytree(BEFORE, tmp_path / "before"))


def resume(folder: Path, run: str) -> str:
    """From inside `folder`, where the relative paths of its configurations hold."""
    env = {**os.environ, "HEADWATER_CACHE": str(folder / "cache")}
    return python("-m", "headwater", "train", "--resume", "--out", run, cwd=folder, env=env)


def losses(run: Path) -> dict[tuple[str, int], float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        (record["kind"], record["step"]): record["loss"] for record in records if "loss" in record
    }


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["run", "sharded"])
def test_the_model_of_a_run(name):
    loaded = load_run(BEFORE / name)
    expected = load_file(BEFORE / name / "expected.safetensors")
    assert_same(loaded.model.eval()(expected["tokens"]), expected["logits"])
    assert loaded.tokenizer.decode(list(b"headwater")) == "headwater"


@pytest.mark.slow
def test_a_finished_run_is_resumed_and_stays_as_it_is(folder):
    assert "8.0807 bits per byte on held-out text after 12 steps" in resume(folder, "run")
    for path in (path for path in (BEFORE / "run").rglob("*") if path.is_file()):
        assert (folder / path.relative_to(BEFORE)).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_one_process_goes_on_with_what_two_ranks_left(folder):
    """Its checkpoint is of step 6; the two ranks logged the steps after it as well, which are taken again."""
    expected = losses(folder / "sharded")
    assert "after 12 steps" in resume(folder, "sharded")
    assert json.loads((folder / "sharded" / "summary.json").read_text())["steps"] == 12
    assert [path.name for path in sorted((folder / "sharded" / "checkpoints").iterdir())][
        -1
    ] == "step-00000012"
    assert losses(folder / "sharded") == pytest.approx(expected, rel=1e-5)


LOAD = """
import headwater.hf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
tokens = load_file("converted/expected.safetensors")["tokens"]
model = AutoModelForCausalLM.from_pretrained("converted")
save_file({"logits": model(tokens).logits.detach()}, "found.safetensors")
"""


@pytest.mark.slow
def test_a_new_process_loads_a_converted_model(folder):
    python("-c", LOAD, cwd=folder)
    assert_same(
        load_file(folder / "found.safetensors")["logits"],
        load_file(BEFORE / "converted" / "expected.safetensors")["logits"],
    )


@torch.no_grad()
def test_a_delta_file_on_its_base():
    model = AutoModelForCausalLM.from_pretrained(BEFORE / "base", local_files_only=True)
    expected = load_file(BEFORE / "converted" / "expected.safetensors")
    assert (model(expected["tokens"]).logits - expected["logits"]).abs().max() > 0.1
    load_delta(model, BEFORE / "delta.safetensors")
    assert_same(model(expected["tokens"]).logits, expected["logits"])
