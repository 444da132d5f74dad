"""Converted models of every dtype, saved here and loaded in a new process: whose caches are empty, as a user's are."""

import functools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tinyhf import load_elsewhere, logits, sample, stir, tiny_model, tokens

from headwater.hf import convert
from headwater.hf.convert.install import conversion_of
from headwater.residuals import names


class Case(NamedTuple):
    """Saved in one dtype, and loaded in another, or in the one that the config names."""

    kind: str
    residual: str = "attnres-block:block=3"
    stored: str = "bfloat16"
    target: str | None = None
    layers: int | None = None
    """Else as many as tiny models have: every kind of layer of an architecture."""

    @property
    def folder(self) -> str:
        words = (self.kind, self.residual.partition(":")[0], self.stored, self.target)
        return "-".join(filter(None, words))


DTYPES = [("float32", None), ("float16", None)]
DTYPES += [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")]
CASES = [Case(kind) for kind in sample()]
for kind in ("llama", "gemma2", "olmo2", "qwen3_moe"):
    CASES += [Case(kind, stored=stored, target=target, layers=2) for stored, target in DTYPES]
# A layer of this one is a single sublayer.
CASES += [Case("gpt_neox", stored=stored, target=target) for stored, target in DTYPES]
CASES += [Case("llama", name, layers=2) for name in names() if name != "attnres-block"]


@functools.cache
def save_plain(base: Path, case: Case) -> type:
    """The class of a plain model, which is saved."""
    sizes = {} if case.layers is None else {"num_hidden_layers": case.layers}
    plain = tiny_model(case.kind, **sizes)
    plain.to(getattr(torch, case.stored)).save_pretrained(base)
    return type(plain)


def saved(case: Case, root) -> tuple[torch.Tensor, list[int], list[str]]:
    """Logits of the model as it is loaded, its reads with a folded norm, and its sites; the model is saved.

    The plain one is loaded as a user has it: `model.bfloat16()` would also round the frequencies of rotary embeddings.
    """
    base = root / "plain" / f"{case.kind}-{case.stored}-{case.layers}"
    # Not Auto's: other tests import fla, whose models take names of transformers'.
    kind = save_plain(base, Case(case.kind, stored=case.stored, layers=case.layers))
    model = kind.from_pretrained(base, dtype=getattr(torch, case.stored))
    # Whether it computes the same is test_hf_architectures.py's.
    convert(model, case.residual, check=False)
    stir(model, 0.1)
    model.save_pretrained(root / case.folder)
    if case.target is not None:
        added = conversion_of(model)[0].depth.residual.state_dict()
        model = kind.from_pretrained(base, dtype=getattr(torch, case.target))
        convert(model, case.residual, check=False)
        conversion_of(model)[0].depth.residual.load_state_dict(added)
    conversion = conversion_of(model)[0]
    return logits(model), sorted(conversion.depth.norms), list(conversion.report.sites)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Logits of every model before it was saved, and what a new process finds of it."""
    root = tmp_path_factory.mktemp("saved")
    expected = {case: saved(case, root) for case in CASES}
    dtypes = {case.folder: case.target for case in CASES}
    return expected, load_elsewhere(root, {"input_ids": tokens()}, dtypes, "AutoModelForCausalLM")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.folder)
def test_a_new_process_loads_it_as_it_was(loaded, case):
    expected, about = loaded[0][case], loaded[1][case.folder]
    assert torch.equal(about["logits"], expected[0])
    assert (about["folded"], about["sites"]) == expected[1:]
