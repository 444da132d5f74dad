"""Load a model's folder in a process of its own, as its reader would.

    python studies/pretrained/load.py FOLDER OUT [--remote-code]

Reads OUT/tokens.safetensors and writes OUT/loaded.safetensors: the logits of these tokens, and a greedy text decoded
from a cache. With --remote-code the folder brings its own modeling file, and headwater is not imported.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def answers(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The logits of all tokens, and the text that follows the first four of them."""
    with torch.no_grad():
        logits = model(tokens).logits
    prompt = tokens[:1, :4]
    mask = torch.ones_like(prompt)
    text = model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)
    return {"logits": logits, "text": text}


def main() -> None:
    folder, out = sys.argv[1:3]
    remote = "--remote-code" in sys.argv
    if not remote:
        import headwater.hf  # noqa: F401
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=remote
    )
    assert remote != ("headwater" in sys.modules)
    tokens = load_file(Path(out) / "tokens.safetensors")["tokens"]
    save_file(answers(model.eval(), tokens), Path(out) / "loaded.safetensors")


if __name__ == "__main__":
    main()
