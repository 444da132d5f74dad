"""Converted models of every dtype, saved here and loaded in a new process: whose caches are empty, as a user's are."""

import functools
import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from processes import python
from safetensors.torch import load_file, save_file
from tinyhf import sample, stir, tiny_model, tokens

from headwater.hf import convert
from headwater.hf.convert.install import conversion_of
from headwater.residuals import names


class Case(NamedTuple):
    """Saved in one dtype, and loaded in another, or in the one that the config names."""

    model_type: str
    residual: str = "attnres-block:block=3"
    stored: str = "bfloat16"
    asked: str | None = None
    layers: int | None = None
    """Else as many as tiny models have: every kind of layer of an architecture."""

    @property
    def folder(self) -> str:
        return "-".join(
            filter(
                None, (self.model_type, self.residual.partition(":")[0], self.stored, self.asked)
            )
        )


DTYPES = [
    {"stored": "float32"},
    {"stored": "float16"},
    {"stored": "float32", "asked": "bfloat16"},
    {"stored": "float32", "asked": "float16"},
    {"stored": "bfloat16", "asked": "float32"},
]
CASES = [
    *(Case(model_type) for model_type in sample()),
    *(
        Case(name, **dtypes, layers=2)
        for name in ("llama", "gemma2", "olmo2", "qwen3_moe")
        for dtypes in DTYPES
    ),
    *(Case("gpt_neox", **dtypes) for dtypes in DTYPES),  # whose layer is a single sublayer
    *(Case("llama", residual, layers=2) for residual in names() if residual != "attnres-block"),
]

LOAD = """
import json, traceback
import benchmarks.tinyhf
import torch, transformers
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
import headwater.hf
from headwater.hf.convert.install import conversion_of
from safetensors.torch import load_file, save_file
tokens = load_file("tokens.safetensors")["tokens"]
found = {}
for name, dtype in json.load(open("cases.json")).items():
    try:
        dtype = "auto" if dtype is None else getattr(torch, dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        with torch.no_grad():
            save_file({"logits": model(tokens).logits}, f"{name}/logits.safetensors")
        conversion = conversion_of(model)[0]
        found[name] = {"folded": sorted(conversion.depth.norms), "sites": list(conversion.report.sites)}
    except Exception as error:
        found[name] = {"error": "".join(traceback.format_exception_only(error))}
json.dump(found, open("found.json", "w"))
"""


@functools.cache
def save_plain(base: Path, model_type: str, stored: str, layers: int | None) -> type:
    """The class of a plain model, which is saved."""
    plain = tiny_model(model_type, **({} if layers is None else {"num_hidden_layers": layers}))
    plain.to(getattr(torch, stored)).save_pretrained(base)
    return type(plain)


def saved(case: Case, root) -> tuple[torch.Tensor, list[int], list[str]]:
    """What the model gives as it is loaded, its reads with a folded norm, and its sites; the model is saved.

    The plain one is loaded as a user has it: `model.bfloat16()` would also round the frequencies of rotary embeddings.
    """
    base = root / "plain" / f"{case.model_type}-{case.stored}-{case.layers}"
    # Not Auto's: other tests import fla, whose models take names of transformers'.
    load = save_plain(base, case.model_type, case.stored, case.layers).from_pretrained
    model = load(base, dtype=getattr(torch, case.stored))
    convert(
        model, case.residual, check=False
    )  # whether it computes the same is test_hf_architectures.py's
    stir(model, 0.1)
    model.save_pretrained(root / case.folder)
    if case.asked is not None:
        added = conversion_of(model)[0].depth.residual.state_dict()
        model = load(base, dtype=getattr(torch, case.asked))
        convert(model, case.residual, check=False)
        conversion_of(model)[0].depth.residual.load_state_dict(added)
    conversion = conversion_of(model)[0]
    with torch.no_grad():
        return model(tokens()).logits, sorted(conversion.depth.norms), list(conversion.report.sites)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What every model gave before it was saved, and what a new process finds of it."""
    root = tmp_path_factory.mktemp("saved")
    expected = {case: saved(case, root) for case in CASES}
    save_file({"tokens": tokens()}, root / "tokens.safetensors")
    (root / "cases.json").write_text(json.dumps({case.folder: case.asked for case in CASES}))
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # where `benchmarks` is
    python("-c", LOAD, cwd=root, env=environment)
    return root, expected, json.loads((root / "found.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.folder)
def test_a_new_process_loads_it_as_it_was(loaded, case):
    root, expected, found = loaded
    logits, folded, sites = expected[case]
    assert "error" not in found[case.folder], found[case.folder]["error"]
    assert found[case.folder]["folded"] == folded
    assert found[case.folder]["sites"] == sites
    assert torch.equal(load_file(root / case.folder / "logits.safetensors")["logits"], logits)
