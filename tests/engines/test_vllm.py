"""vLLM serves what `headwater convert --remote-code` wrote: the tokens are transformers'. `make test-engines`."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from headwater.cli import main
from headwater.hf import convert
from headwater.integrations.vllm import greedy_tokens

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-engines", allow_module_level=True)

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [200, 100, 50]]
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@pytest.fixture(scope="module", params=MODELS)
def served(request, tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A folder whose queries are trained, and the tokens that transformers gives."""
    config, kind = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = kind(config(**SHAPE))
    convert(model, "attnres-block:block=3")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than at a start, so that one token is clearly the likeliest.
            spread = 0.5 if "residual." in name else 0.1
            parameter.add_(spread * torch.randn_like(parameter))
    model.eval().save_pretrained(folder / "trained")
    words = ["convert", str(folder / "trained"), "--out", str(folder / "served"), "--remote-code"]
    assert main(words) == 0
    expected = []
    for prompt in PROMPTS:
        tokens = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, min_new_tokens=12
        )
        expected.append(tokens[0, len(prompt) :].tolist())
    assert len(set(expected[0])) > 3, "a text that repeats one token shows little"
    return folder / "served", expected


@pytest.mark.parametrize(
    ("ranks", "eager"), [(1, True), (1, False), (2, True)], ids=["eager", "compiled", "two ranks"]
)
def test_tokens_are_those_of_transformers(served, tmp_path, monkeypatch, ranks, eager):
    folder, expected = served
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert greedy_tokens(folder, PROMPTS, ranks=ranks, eager=eager) == expected


def test_serve_check_compares_tokens(served, capsys):
    folder, _ = served
    assert main(["serve-check", str(folder)]) == 0
    output = capsys.readouterr().out
    assert f"yes, without pipeline parallelism: vllm serve {folder}" in output
    assert "12 greedy tokens of vLLM are transformers'" in output
