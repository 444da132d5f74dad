"""Small random models of transformers, as benchmarks/architectures.py builds them, and what tests do with them."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from processes import python
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.tinyhf import VOCAB, sample, stir, tiny_config, tiny_model, tokens
from headwater.hf import convert, verify

__all__ = [
    "VOCAB",
    "agree",
    "converted",
    "greedy",
    "load",
    "load_elsewhere",
    "logits",
    "same",
    "sample",
]
__all__ += ["stir", "tiny_config", "tiny_model", "tokens", "training"]

ROOT = Path(__file__).parents[1]
LOAD = """
import gc, json, os, traceback
gc.disable()  # nothing that is imported is garbage
import benchmarks.tinyhf, torch, transformers, headwater.hf
from headwater.hf.convert.install import conversion_of
from safetensors.torch import load_file, save_file
auto, dtypes = json.load(open("cases.json"))
about = {}
for name, dtype in dtypes.items():
    try:
        dtype = "auto" if dtype is None else getattr(torch, dtype)
        model = getattr(transformers, auto).from_pretrained(name, dtype=dtype).eval()
        with torch.no_grad():
            logits = model(**load_file("inputs.safetensors")).logits.contiguous()
            save_file({"logits": logits}, f"{name}/logits.safetensors")
        conversion = conversion_of(model)[0]
        about[name] = {"folded": sorted(conversion.depth.norms), "sites": list(conversion.report.sites)}
    except Exception as error:
        about[name] = {"error": "".join(traceback.format_exception_only(error))}
json.dump(about, open("about.json", "w"))
"""


def converted(
    residual: str = "attnres-block:block=3",
    kind: str = "llama",
    amount: float = 0.5,
    **options: Any,
) -> Any:
    """A converted model, its residual moved off its start by `amount`; unchecked, which other tests are about."""
    sizes = {key: options.pop(key) for key in ("num_hidden_layers", "vocab_size") if key in options}
    model = tiny_model(kind, **sizes)
    convert(model, residual, check=False, **options)
    stir(model, amount)
    return model


@torch.no_grad()
def logits(model: Any, rows: Tensor | None = None) -> Tensor:
    return model(tokens() if rows is None else rows).logits


def same(one: Any, other: Any) -> bool:
    """Tell whether two models give the same logits, to the bit."""
    return torch.equal(logits(one), logits(other))


def agree(model: Any, plain: Any) -> bool:
    """Tell whether a model computes what another does, by rounding apart, with a cache and padding too."""
    return verify(model, plain, tokens()).equal


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def greedy(model: Any, rows: Any, count: int = 12, **options: Any) -> Tensor:
    inputs = rows if isinstance(rows, dict) else {"input_ids": rows}
    length = {"max_new_tokens": count, "min_new_tokens": count}
    return model.generate(**inputs, do_sample=False, **length, **options)


def training(model: Any) -> Tensor:
    """All gradients of one pass."""
    model.zero_grad()
    model(tokens(), labels=tokens()).loss.backward()
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def load_elsewhere(
    root: Path, inputs: dict[str, Tensor], dtypes: dict[str, str | None], auto: str
) -> dict[str, Any]:
    """Load folders below `root` in a new process, whose caches are empty: logits, and what was found."""
    save_file(inputs, root / "inputs.safetensors")
    (root / "cases.json").write_text(json.dumps([auto, dtypes]))
    python("-c", LOAD, cwd=root, env={**os.environ, "PYTHONPATH": str(ROOT)})
    about = json.loads((root / "about.json").read_text())
    for name in dtypes:
        assert "error" not in about[name], (name, about[name])
        about[name]["logits"] = load_file(root / name / "logits.safetensors")["logits"]
    return about
