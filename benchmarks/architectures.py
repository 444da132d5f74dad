"""Every causal language model of transformers, small and random: converted, is it still the same model?

`python -m benchmarks.architectures` builds each type it can, converts it in three dtypes, and holds it to the plain
one: one pass, padding, decoding from a cache and from a static one, gradients; off its start, decoding against one
pass; saved, and loaded in a new process; reverted. It writes cpu-architectures.json of benchmarks/results and the
tables of docs/reference/architectures.md. `--types NAME ...` tries some and prints them alone; `--missing` goes on
where a run ended.
"""

import argparse
import copy
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.tables import path
from benchmarks.tinyhf import stir, tiny_config, tiny_model, tokens
from headwater.errors import UserError
from headwater.hf import LAYOUTS, Layout, convert, revert, verify
from headwater.hf.convert.refusals import REASONS, layout_of
from headwater.hf.convert.trial import ERRORS
from headwater.hf.same_function import decode, one_pass, relative_distance

ROOT = Path(__file__).parent.parent
RESULTS = path("cpu-architectures")
PAGE = ROOT / "docs" / "reference" / "architectures.md"
MARKS = re.compile(
    "(?<=<!-- architectures:begin -->\n).*?(?=<!-- architectures:end -->)", re.DOTALL
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SPEC = "attnres-block:block=3"
TEXT_OF = {  # types of several parts, and the type of the part that is converted
    "gemma3": "gemma3_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "emu3": "emu3_text_model",
    "fuyu": "persimmon",
    "got_ocr2": "qwen2",
    "moss_transcribe_diarize": "qwen3",
}
NOT_AUTO = {"emu3": "Emu3ForCausalLM"}  # saved, these load by their class alone, the plain ones too
BIG = 50_000_000  # parameters
CHUNK = 30  # types between two writes of the results
# Of all gradients together; relative distance of logits of one pass and of a cache
COSINE, FAR = (0.9999, 1e-3)

LOAD = """
import json, sys, traceback
import benchmarks.tinyhf
import torch, transformers
import headwater.hf
from headwater.hf.convert.classes import head_class
from safetensors.torch import load_file, save_file
tokens = load_file("tokens.safetensors")["tokens"]
failed = {}
for name, cls in json.load(open("folders.json")).items():
    try:
        cls = transformers.AutoModelForCausalLM if cls is None else head_class(getattr(transformers, cls))
        model = cls.from_pretrained(name, dtype="auto").eval()
        with torch.no_grad():
            save_file({"logits": model(tokens).logits.contiguous()}, f"{name}/logits.safetensors")
    except Exception as error:
        failed[name] = "".join(traceback.format_exception_only(error)).strip()
json.dump(failed, open("failed.json", "w"))
"""


class Failed(Exception):
    """A converted model that is not what it should be."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", choices=TYPES, metavar="NAME", default=[])
    parser.add_argument(
        "--missing", action="store_true", help="only what the results do not have yet"
    )
    parser.add_argument(
        "--tables", action="store_true", help="write the tables from the results that are there"
    )
    arguments = parser.parse_args()
    if arguments.types:
        print(json.dumps(count(run(arguments.types))))
        return
    rows = json.loads(RESULTS.read_text())["types"] if arguments.missing or arguments.tables else {}
    missing = (
        []
        if arguments.tables
        else [n for n in TYPES if rows.get(n, {"status": "wrong"})["status"] == "wrong"]
    )
    for begin in range(0, len(missing), CHUNK):
        rows |= run(missing[begin : begin + CHUNK])
        write(rows)
    print(json.dumps(count(rows)))
    PAGE.write_text(MARKS.sub(lambda _: tables(), PAGE.read_text()))


def count(rows: dict[str, dict[str, Any]]) -> dict[str, int]:
    counts = {
        status: sum(row["status"] == status for row in rows.values())
        for status in ("exact", "refused", "wrong")
    }
    return {**counts, "of": len(rows)}


def write(rows: dict[str, dict[str, Any]]) -> None:
    about = {
        "command": "python -m benchmarks.architectures",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "residual": SPEC,
        **count(rows),
    }
    RESULTS.write_text(
        json.dumps({**about, "types": {name: rows[name] for name in TYPES if name in rows}}) + "\n"
    )


def run(types: Any) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_file({"tokens": tokens()}, root / "tokens.safetensors")
        for model_type in types:
            begin = time.perf_counter()
            rows[model_type] = row = try_type(model_type, root)
            print(
                f"{model_type:26} {row['status']:8} {row.get('why', '')} {time.perf_counter() - begin:.1f} s",
                flush=True,
            )
        load_again(rows, root)
    return rows


def try_type(model_type: str, root: Path) -> dict[str, Any]:
    try:
        with torch.device("meta"):
            size = sum(
                p.numel()
                for p in AutoModelForCausalLM.from_config(tiny_config(model_type)).parameters()
            )
        hold(size < BIG, f"no small one: {size:,} parameters")
        plain = tiny_model(model_type)
    except (*ERRORS, ImportError, NotImplementedError, StrictDataclassError, Failed) as error:
        if model_type in LAYOUTS:
            return {"status": "wrong", "why": f"transformers cannot build it: {error}"[:200]}
        return {"status": "refused", "why": reason(model_type)}
    try:
        convert(copy.deepcopy(plain), SPEC)
    except UserError as error:
        return {"status": "refused", "why": str(error)}
    row: dict[str, Any] = {"status": "exact"}
    plain.save_pretrained(root / model_type / "plain")
    for name, dtype in DTYPES.items():
        try:
            row[name] = dict(checks(model_type, dtype, root / model_type))
        except (Failed, UserError, *ERRORS) as error:
            return {"status": "wrong", "why": f"{name}: {type(error).__name__}: {error}"[:300]}
    return row


def reason(model_type: str) -> str:
    """Say why a type is not built here."""
    try:
        layout_of(model_type, TYPES)
    except UserError as error:
        return str(error)
    raise Failed(f"{model_type} has a layout and was not built")


def checks(model_type: str, dtype: torch.dtype, root: Path) -> Iterator[tuple[str, Any]]:
    """Name and result of each; raises Failed. The plain model is loaded as a user has it."""
    auto = getattr(transformers, NOT_AUTO.get(model_type, "AutoModelForCausalLM"))
    plain, model = (auto.from_pretrained(root / "plain", dtype=dtype).eval() for _ in range(2))
    before = digest(model)
    report = convert(model, SPEC)
    hold(report.difference is not None, f"not checked: {report.unchecked}")
    result = verify(model, plain, tokens())
    hold(result.equal, str(result))
    yield "forward", result.kl
    yield "decoding", max((distance.kl for distance in result.decoding.values()), default=None)
    if dtype == torch.float32:
        yield "gradients", gradients(model, plain)
        yield "static cache", static_cache(model, plain)
    stir(model, 0.1)
    hold(
        not torch.equal(logits(model), logits(plain)),
        "off its start it still computes the same: nothing was converted",
    )
    yield "off its start", off_start(model, plain, dtype)
    folder = root / str(dtype).removeprefix("torch.")
    model.save_pretrained(folder)
    save_file({"logits": logits(model)}, folder / "expected.safetensors")
    revert(model)
    hold(
        digest(model) == before and torch.equal(logits(model), logits(plain)),
        "reverted, it is another model",
    )
    hold(
        type(model) is type(plain) and model.config.to_dict() == plain.config.to_dict(),
        "reverted, its config differs",
    )
    yield "reverted", True


def hold(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Failed(otherwise)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(tokens()).logits.contiguous()


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def gradients(model: nn.Module, plain: nn.Module) -> float:
    """The cosine of all gradients of shared parameters; every added one gets a finite gradient."""
    for network in (model, plain):
        network.zero_grad()
        network(tokens(), labels=tokens()).loss.backward()
    converted = dict(model.named_parameters())
    shared = [
        (converted[name].grad, p.grad) for name, p in plain.named_parameters() if p.grad is not None
    ]
    one, other = (
        torch.cat([pair[which].double().flatten() for pair in shared]) for which in (0, 1)
    )
    added = [p.grad for name, p in converted.items() if "residual." in name]
    hold(
        all(grad is not None and bool(grad.isfinite().all()) for grad in added),
        "an added parameter has no gradient",
    )
    cosine = float(torch.cosine_similarity(one, other, dim=0))
    hold(cosine > COSINE, f"gradients of the shared parameters point elsewhere: cosine {cosine}")
    for network in (model, plain):
        network.zero_grad()
    return cosine


def static_cache(model: nn.Module, plain: nn.Module) -> bool | None:
    """Greedy tokens with a static cache against those with the usual one. None: the plain model does not have it."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
    static = {**options, "cache_implementation": "static", "disable_compile": True}
    try:
        expected = plain.generate(tokens(), **static)
    except (*ERRORS, NotImplementedError):
        return None
    hold(
        torch.equal(model.generate(tokens(), **static), expected),
        "another continuation with a static cache",
    )
    return True


@torch.no_grad()
def off_start(model: nn.Module, plain: nn.Module, dtype: torch.dtype) -> float | None:
    """One pass against decoding without a cache being wrong: relative, the median token. None: neither does the plain
    model give from its cache what it gives in one pass, or it has no cache."""

    inputs = {"input_ids": tokens()}

    def gaps(network: nn.Module) -> Tensor | None:
        cached = decode(network, inputs)
        return None if cached is None else relative_distance(cached, one_pass(network, inputs))

    limit = max(FAR, 16 * torch.finfo(dtype).eps)
    plain_gaps, gaps_here = gaps(plain), gaps(model)
    if plain_gaps is None or gaps_here is None or plain_gaps.max() > limit:
        return None
    hold(
        float(gaps_here.median()) <= limit,
        f"trained, a token from the cache is off by {float(gaps_here.median()):.2g}",
    )
    return float(gaps_here.median())


def load_again(rows: dict[str, dict[str, Any]], root: Path) -> None:
    """All that was saved, in one new process, whose caches are empty as a user's are."""
    folders = [
        path.parent.relative_to(root) for path in sorted(root.glob("*/*/expected.safetensors"))
    ]
    classes = {str(folder): NOT_AUTO.get(folder.parts[0]) for folder in folders}
    (root / "folders.json").write_text(json.dumps(classes))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", LOAD], cwd=root, check=True, env=environment)
    failed = json.loads((root / "failed.json").read_text())
    for folder in folders:
        row, dtype = rows[folder.parts[0]], folder.parts[1]
        if str(folder) in failed:
            rows[folder.parts[0]] = {
                "status": "wrong",
                "why": f"{dtype}, loaded: {failed[str(folder)]}"[:300],
            }
            continue
        values, expected = (
            load_file(root / folder / f"{name}.safetensors")["logits"]
            for name in ("logits", "expected")
        )
        # Libraries for matrix products differ between processes
        eps = torch.finfo(expected.dtype).eps
        if not torch.allclose(
            values, expected, rtol=4 * eps, atol=4 * eps * float(expected.abs().max())
        ):
            row.update(status="wrong", why=f"{dtype}: loaded in a new process, it is another model")


def tables() -> str:
    """Make the page's tables: what converts, with its numbers, and what does not, by reason."""
    results = json.loads(RESULTS.read_text())
    rows = results["types"]
    exact, refused = (
        [name for name in rows if rows[name]["status"] == status] for status in ("exact", "refused")
    )
    groups: dict[str, list[str]] = {}
    for name in exact:
        groups.setdefault(describe(layout_used(name)), []).append(name)
    lines = [
        f"transformers {results['transformers']} has {len(rows)} causal language models. {len(exact)} are exact,",
        f"in fp32, bf16 and fp16, and {len(refused)} are refused with the reason. KL in nats per token, the largest of",
        f"a row, in fp32 (`{RESULTS.relative_to(ROOT)}`).",
        "",
        "| layer | model types | KL | from a cache |",
        "|---|---|---|---|",
    ]
    for label, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        kls = [
            max(rows[name]["fp32"][key] or 0.0 for name in names) for key in ("forward", "decoding")
        ]
        lines.append(f"| {label} | {', '.join(names)} | `{kls[0]:.0e}` | `{kls[1]:.0e}` |")
    lines += ["", "| refused, since | model types |", "|---|---|"]
    reason_by_type = {name: why for why, names in REASONS for name in names.split()}
    reasons: dict[str, list[str]] = {}
    for name in refused:
        reasons.setdefault(reason_by_type.get(name, "its layers are not described yet"), []).append(
            name
        )
    lines += [f"| {why} | {', '.join(names)} |" for why, names in reasons.items()]
    return "\n".join(lines) + "\n"


def layout_used(model_type: str) -> Layout:
    """Return the layout of the model, or of the text part of a model with several."""
    return LAYOUTS.get(model_type) or LAYOUTS[TEXT_OF[model_type]]


def describe(layout: Layout) -> str:
    """A layout in a few words."""
    if not layout.mlp:
        return "one sublayer a layer"
    norms = {
        (True, False): "pre-norm",
        (False, True): "norms on outputs alone",
        (True, True): "norms on both sides",
    }
    after = any("norm" in name for name in layout.attention_out)
    words = [norms[layout.attention_norm is not None, after]]
    if layout.parallel:
        words = [
            "attention and MLP side by side" + ("" if layout.parallel is True else ", or pre-norm")
        ]
    if layout.otherwise is not None:
        words.append("or others, layer by layer")
    if layout.multiplier is not None:
        words.append("outputs multiplied")
    if layout.shrinking:
        words.append("the stream divided by a root")
    if layout.mlp_beside:
        words.append("a second MLP beside the first")
    if len(layout.attention) > 1:
        words.append(f"attention or {' or '.join(layout.attention[1:])}")
    return ", ".join(words)


if __name__ == "__main__":
    main()
