"""Folders that an earlier commit wrote are read as it read them; fixtures/before/README.md says how they were made."""

import shutil
from pathlib import Path

import pytest
import torch
from processes import python
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headwater.hf import load_delta

BEFORE = Path(__file__).parent / "fixtures" / "before"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy, since what resumes also writes."""
    return Path(shutil.copytree(BEFORE, tmp_path / "before"))


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


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
