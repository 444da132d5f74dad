"""Convert SmolLM2 with each residual, and check that it is the same model until it is trained.

    PYTHONPATH=. python studies/pretrained/before.py MODEL --text FILE

MODEL is the folder that smollm2.py writes; FILE is held-out text. Adds to results/before.json after each residual, and
prints its table: the distance from the plain model and how many greedy texts are equal, in fp32 and bf16; and if the
model is the same after it was saved and loaded in a new process, exported with its own modeling file, and reverted.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from load import answers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import headwater
from headwater import hf

HERE = Path(__file__).parent
# All that start as the plain residual does, and ddl, which does not.
RESIDUALS = (
    "attnres-block", "attnres-full", "mhc", "ddl", "mhc-lite", "hyper-connections", "denseformer",
    "muddformer", "laurel", "deepcrossattention", "delta-attnres", "hyper-attnres", "highway",
    "depth-window",
)  # fmt: skip
REMOTE = ("attnres-block", "attnres-full")  # the two that have a modeling file
PROMPT, NEW = 8, 16  # tokens of a greedy text
COLUMNS = ("KL fp32", "KL bf16", "texts fp32", "texts bf16", "loaded", "remote code", "reverted")


class Reference(NamedTuple):
    """The plain model in one dtype, and its greedy texts."""

    model: Any
    texts: Tensor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--residuals", nargs="+", default=RESIDUALS)
    parser.add_argument("--prompts", type=int, default=50)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    plain = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    plain.eval()
    windows = read_windows(options.text, tokenizer, options.prompts)
    prompts = windows[:, :PROMPT]
    references = []
    for dtype in (torch.bfloat16, torch.float32):
        model = copy.deepcopy(plain).to(dtype)
        references.append(Reference(model, continue_greedily(model, prompts)))

    path = options.out / "before.json"
    if not path.exists():
        half, single = (reference.texts for reference in references)
        results = {
            "perplexity": perplexity(plain, read_windows(options.text, tokenizer, 16, 256)),
            "greedy": tokenizer.decode(single[0]),
            "texts_of_plain_in_both": int((half == single).all(-1).sum()),
            "residuals": {},
        }
        write(path, results)
    for residual in options.residuals:
        result = check(references, residual, windows)
        results = json.loads(path.read_text())
        results["residuals"][residual] = result
        write(path, results)
        print(residual, json.dumps(result), flush=True)
    print(table(results["residuals"]))


def write(path: Path, results: dict[str, Any]) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n")


def read_windows(text: Path, tokenizer: Any, count: int, length: int = 64) -> Tensor:
    """`count` windows of `length` tokens, spread over a text; each begins with a paragraph."""
    letters = text.read_text(encoding="utf-8")
    step = len(letters) // count
    windows = []
    for place in range(0, step * count, step):
        start = letters.index("\n\n", place) + 2
        ids = tokenizer(letters[start : start + 16 * length]).input_ids[:length]
        windows.append(torch.tensor(ids))
    return torch.stack(windows)


@torch.no_grad()
def perplexity(model: Any, windows: Tensor) -> float:
    losses = [model(input_ids=window[None], labels=window[None]).loss for window in windows]
    return torch.stack(losses).mean().exp().item()


@torch.no_grad()
def continue_greedily(model: Any, prompts: Tensor) -> Tensor:
    """Texts decoded from a cache."""
    mask = torch.ones_like(prompts)
    return model.generate(prompts, attention_mask=mask, max_new_tokens=NEW, do_sample=False)


def check(references: list[Reference], residual: str, windows: Tensor) -> dict[str, Any]:
    """Say how far a converted model is from the plain one, and if it survives folders."""
    results: dict[str, Any] = {}
    for plain, texts in references:
        model = copy.deepcopy(plain)
        report = headwater.convert(model, residual)
        verification = headwater.verify(model, plain, windows[:2])
        ours = continue_greedily(model, windows[:, :PROMPT])
        results[str(plain.dtype).removeprefix("torch.")] = {
            "equal": verification.equal,
            "kl": verification.kl,
            "kl_decoding": [distance.kl for distance in verification.decoding.values()],
            "logit_difference": verification.logit_difference,
            "texts": int((ours == texts).all(-1).sum()),
            "of": len(texts),
        }

    # The last model, in fp32, goes to a folder and back, and then loses its residual again.
    with tempfile.TemporaryDirectory() as name:
        results |= through_folders(model, residual, windows[:2, :32], Path(name))
    results["report"] = str(report).splitlines()[:2]
    hf.revert(model)
    pairs = zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    results["reverted"] = all(torch.equal(*pair) for pair in pairs)
    return results


def through_folders(model: Any, residual: str, tokens: Tensor, folder: Path) -> dict[str, Any]:
    """Save the model, and compare what new processes load with it, bit for bit."""
    saved = folder / "saved"
    model.save_pretrained(saved)
    save_file({"tokens": tokens.contiguous()}, folder / "tokens.safetensors")
    expected = answers(model, tokens)
    results = {"loaded": loads_equal(saved, folder, expected)}
    if residual in REMOTE:
        exported = folder / "exported"
        command = [sys.executable, "-m", "headwater", "convert", str(saved), "--remote-code"]
        subprocess.run([*command, "--out", str(exported)], check=True, capture_output=True)
        results["remote_code"] = loads_equal(exported, folder, expected, "--remote-code")
    return results


def loads_equal(folder: Path, out: Path, expected: dict[str, Tensor], *flags: str) -> bool:
    command = [sys.executable, str(HERE / "load.py"), str(folder), str(out), *flags]
    subprocess.run(command, check=True, capture_output=True)
    loaded = load_file(out / "loaded.safetensors")
    return all(torch.equal(loaded[name], value) for name, value in expected.items())


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = [("residual", *COLUMNS), ("---",) * (1 + len(COLUMNS))]
    for residual, result in results.items():
        single, half = result["float32"], result["bfloat16"]
        checks = [result["loaded"], result.get("remote_code"), result["reverted"]]
        words = {True: "yes", False: "no", None: ""}
        rows.append((
            f"`{residual}`", f"{single['kl']:.0e}", f"{half['kl']:.1e}",
            f"{single['texts']} of {single['of']}", f"{half['texts']} of {half['of']}",
            *(words[value] for value in checks),
        ))  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
