"""Swap the residual of a Llama, see that nothing changed, fine-tune it, save it, load it.

    python examples/fine_tune_llama.py [FOLDER]          # a transformers checkpoint; without one, a small random Llama

Needs `pip install 'headwater[hf]'`.
"""

import copy
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import headwater
from headwater import hf  # registers converted models with transformers, so that they load


def model_of(folder: str | None) -> torch.nn.Module:
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256))


if __name__ == "__main__":
    model = model_of(sys.argv[1] if len(sys.argv) > 1 else None)
    before = copy.deepcopy(model)
    print(headwater.convert(model, residual="attnres-block:block=4"))

    text = torch.tensor(list(Path(__file__).read_bytes()))
    batch = text[: len(text) // 64 * 64].view(-1, 64)
    print(headwater.verify(model, before, batch[:2]))

    # The queries train; hf.trainable(model, only=True) would leave the rest as it is
    hf.trainable(model)
    optimizer = torch.optim.AdamW(headwater.param_groups(model, lr=1e-3, weight_decay=0.0))
    model.train()
    for step in range(1, 11):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss:.3f}")

    with tempfile.TemporaryDirectory() as folder:
        model.eval().save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(again(batch[:2]).logits, model(batch[:2]).logits)
    print("saved and loaded: the same logits")
